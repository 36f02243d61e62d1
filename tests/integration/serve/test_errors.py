"""What ``gated-serving serve`` says, and exits with, when it cannot serve."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file


def run_serve(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gated_serving.cli", "serve", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, **environment}, check=False
    )


def assert_refused(result: subprocess.CompletedProcess[str], exit_code: int, *words: str) -> None:
    assert result.returncode == exit_code, result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    for word in words:
        assert word in result.stderr


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


def test_no_such_folder() -> None:
    assert_refused(run_serve("no/such/folder"), 2, "no/such/folder", "no such folder")


def test_a_file_is_not_a_folder(tiny_folder: Path) -> None:
    assert_refused(run_serve(tiny_folder / "config.json"), 2, "a file; name the checkpoint's folder")


def test_a_truncated_weight_file(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_refused(run_serve(copy, "--port", "0"), 2, "model.safetensors")


def test_a_broken_weight_file(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"not tensors at all, but long enough to be read")
    assert_refused(run_serve(copy, "--port", "0"), 2, "model.safetensors")


def test_broken_config(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    assert_refused(run_serve(copy, "--port", "0"), 2, "config.json")


def test_config_and_weights_that_disagree_are_refused_by_tensor_and_shape(copy: Path) -> None:
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name][:-2].contiguous()
    save_file(tensors, weights, metadata={"format": "pt"})
    assert_refused(run_serve(copy, "--port", "0"), 1, name, str(list(tensors[name].shape)))


def test_a_missing_tokenizer(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    assert_refused(run_serve(copy, "--port", "0"), 1, "tokenizer")


def test_a_port_in_use(tiny_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_refused(run_serve(tiny_folder, "--port", str(port)), 3, str(port), "in use")


def test_a_model_that_is_not_there_is_told_before_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run_serve("nosuch", "--port", str(taken.getsockname()[1]))
    assert_refused(result, 2, "nosuch")
    assert "in use" not in result.stderr


@pytest.mark.parametrize("port", ["-1", "70000", "many"])
def test_a_port_that_is_none(tiny_folder: Path, port: str) -> None:
    assert_refused(run_serve(tiny_folder, "--port", port), 2, "--port")


def test_a_host_that_is_not_ours(tiny_folder: Path) -> None:
    assert_refused(run_serve(tiny_folder, "--host", "192.0.2.77", "--port", "0"), 2, "192.0.2.77")


@pytest.mark.parametrize("size", ["1K", "4000T"])
def test_a_kv_cache_that_is_too_small_or_too_large(tiny_folder: Path, size: str) -> None:
    result = run_serve(tiny_folder, "--port", "0", "--kv-cache-memory-bytes", size)
    assert_refused(result, 3, "KV cache", "--kv-cache-memory-bytes")


def test_a_kv_cache_that_is_too_large_by_environment(tiny_folder: Path) -> None:
    result = run_serve(tiny_folder, "--port", "0", VLLM_CPU_KVCACHE_SPACE="900000")
    assert_refused(result, 3, "KV cache", "VLLM_CPU_KVCACHE_SPACE")


def test_an_unknown_option_at_first_and_from_then_on(tiny_folder: Path, tmp_path: Path) -> None:
    """The first time vLLM's own parser finds it; its options are remembered, and the second time none of it starts."""
    for attempt in ("first", "second"):
        result = run_serve(tiny_folder, "--port", "0", "--max-modle-len", "64", XDG_CACHE_HOME=str(tmp_path))
        assert_refused(result, 2, "--max-modle-len")
        if attempt == "second":
            assert "did you mean --max-model-len" in result.stderr
            assert "starting vLLM" not in result.stdout


def test_a_wrong_value_is_told_in_few_lines_and_not_as_a_traceback(tiny_folder: Path) -> None:
    result = run_serve(tiny_folder, "--port", "0", "--max-model-len", "100000")
    assert_refused(result, 2, "100000", "max_model_len")
    assert len(result.stderr.splitlines()) < 8


def test_two_models(tiny_folder: Path) -> None:
    assert_refused(run_serve(tiny_folder, tiny_folder, "--port", "0"), 2, "two models")


def test_without_vllm_it_says_what_to_install(tiny_folder: Path) -> None:
    program = (
        "import sys, importlib.metadata as m; real = m.version\n"
        "def version(name):\n"
        "    if name.startswith('vllm'): raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        f"sys.argv = ['gated-serving', 'serve', {json.dumps(str(tiny_folder))}]\n"
        "from gated_serving.cli import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert_refused(result, 3, "vLLM is not installed", "pip install")
