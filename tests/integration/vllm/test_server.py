"""True server processes: `python -m vllm.entrypoints.openai.api_server --model DIR`, asked over HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoint_factory import greedy_tokens, make_official
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm_engine import ENVIRONMENT

PROMPT = [1, 5, 6, 7]
START_TIMEOUT_S = 300


def add_tokenizer(folder: Path, vocab: int = 1000) -> None:
    """A tokenizer whose token i is the word ``t{i}``."""
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(vocab)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[str]:
    """Runs vLLM's server on a free port and gives its address once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder),
        "--host",
        "127.0.0.1",
        "--kv-cache-memory-bytes",
        "64M",
    ]
    environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), *options], env=environment, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{log.read_text()}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server is not ready:\n{log.read_text()}") from None


def complete(address: str, **fields: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{address}/v1/completions", data=json.dumps(fields).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def test_server_answers_right_for_the_official_format(tmp_path: Path) -> None:
    folder = make_official(tmp_path / "model", gate="elementwise", weights="bin")
    add_tokenizer(folder)
    with serving(
        folder, tmp_path / "log", "--dtype", "float32", "--enforce-eager", "--max-model-len", "128"
    ) as address:
        answer = complete(
            address, model=str(folder), prompt=" ".join(f"t{token}" for token in PROMPT), temperature=0, max_tokens=8
        )
    assert answer["choices"][0]["text"].split() == [f"t{token}" for token in greedy_tokens(folder, PROMPT, 8)]


def test_server_refuses_what_it_would_serve_wrong(tmp_path: Path) -> None:
    folder = make_official(tmp_path / "model")
    add_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text()) | {"headwise_attn_output_gate": False}
    (folder / "config.json").write_text(json.dumps(config))
    with (
        pytest.raises(RuntimeError, match=r"(?s)q_proj\.weight, shape \[132, 96\].*expected shape \[128, 96\]"),
        serving(folder, tmp_path / "log", "--dtype", "float32", "--enforce-eager"),
    ):
        pass
