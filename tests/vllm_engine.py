"""The tests' side of ``vllm_engine_worker``: starts it, asks it, and says what stands in its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from torch import Tensor

LogProbabilities = Callable[[list[int]], Tensor]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
PROMPTS = [[1, 5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 11, 200, 300, 45, 12], [400]]


@dataclass
class Generated:
    """What an engine produced, prompt by prompt."""

    architecture: str
    packed_modules: dict[str, list[str]]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    prompt_logprobs: list[list[dict[str, float]] | None]
    num_cached_tokens: list[int | None]
    metrics: dict[str, float]


class EngineError(Exception):
    """The engine could not be made or failed; the message is the worker's error and log."""


@dataclass
class EngineProcess:
    """A worker process; several engines in turn."""

    log: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        read_end, write_end = os.pipe()
        self.log_file = self.log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("vllm_engine_worker.py")), str(write_end)],
            env=os.environ | ENVIRONMENT | self.environment, stdin=subprocess.PIPE, stdout=self.log_file,
            stderr=subprocess.STDOUT, pass_fds=[write_end], text=True,
        )  # fmt: skip
        os.close(write_end)
        self.replies: IO[str] = os.fdopen(read_end)

    def generate(
        self,
        model: str | Path,
        *,
        prompts: Sequence[Sequence[int]] = PROMPTS,
        num_tokens: int = 8,
        num_logprobs: int | None = 5,
        adapters: Sequence[Path | None] = (None,),
        forks_workers: bool = False,
        **engine: Any,
    ) -> Generated:
        """Greedy tokens and logprobs of one model: all prompts without an adapter, or with each of several in turn.

        With ``forks_workers`` the processes of several ranks are forks of the worker, where vLLM would start new ones.

        Raises:
            EngineError: The engine could not be made, or failed.
        """
        start = self.log.stat().st_size
        request = {
            "model": str(model), "engine": engine, "prompts": prompts, "num_tokens": num_tokens,
            "num_logprobs": num_logprobs, "adapters": [str(adapter) if adapter else None for adapter in adapters],
            "forks_workers": forks_workers,
        }  # fmt: skip
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        reply = json.loads(self.replies.readline() or json.dumps({"error": "the process died"}))
        if "error" in reply:
            raise EngineError(f"{reply['error']}\n{self.log.read_text()[start:]}")
        return Generated(**reply)

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.replies.close()
        self.log_file.close()


def assert_right(
    generated: Generated, log_probabilities: LogProbabilities, prompts: Sequence[Sequence[int]] = PROMPTS
) -> None:
    """Greedy tokens equal the reference's, and every prompt logprob is within 1e-3 of it.

    Args:
        generated: From an engine in float32.
        log_probabilities: The reference: token ids to ``[T, vocab]``.
        prompts: Those that were asked; answers may repeat them (several adapters).
    """
    assert len(generated.tokens) % len(prompts) == 0
    for index, tokens in enumerate(generated.tokens):
        prompt = list(prompts[index % len(prompts)])
        expected = log_probabilities([*prompt, *tokens])
        # The same as decoding greedily with the reference: each token is the best one after those before it.
        best = expected.argmax(-1).tolist()[len(prompt) - 1 : -1]
        assert tokens == best, f"prompt {prompt}"
        for position, entries in enumerate(generated.prompt_logprobs[index] or []):
            for token, logprob in entries.items():
                assert abs(logprob - expected[position, int(token)].item()) < 1e-3, f"prompt {prompt}, at {position}"
