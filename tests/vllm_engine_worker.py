"""A process that makes vLLM engines on request, so that a test run pays for vLLM's import once.

Reads one JSON request a line from standard input and writes one JSON answer a line to the descriptor given as its
argument: ``{"model", "engine", "prompts", "num_tokens", "num_logprobs", "adapters"}`` to ``{"tokens", "logprobs",
...}`` or ``{"error"}``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Makes an engine, generates greedily with it, and takes it down again."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = None
    try:
        defaults = {"enforce_eager": True, "dtype": "float32", "max_model_len": 128, "max_num_seqs": 8}
        options = defaults | {"disable_log_stats": False} | request["engine"]
        llm = LLM(model=request["model"], skip_tokenizer_init=True, **options)
        return _generate(llm, request)
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        # The next engine may need other process groups.
        cleanup_dist_env_and_memory()


def _generate(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(
        temperature=0, max_tokens=request["num_tokens"], ignore_eos=True, detokenize=False,
        logprobs=1, prompt_logprobs=request["num_logprobs"],
    )  # fmt: skip
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    outputs = [
        output
        for index, path in enumerate(request["adapters"])
        for output in llm.generate(
            prompts, sampling, use_tqdm=False, lora_request=LoRARequest(path, index + 1, path) if path else None
        )
    ]
    return {
        "architecture": llm.llm_engine.model_config.architecture,
        "num_cached_tokens": [output.num_cached_tokens for output in outputs],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [
            [position[token].logprob for position, token in zip(completion.logprobs, completion.token_ids, strict=True)]
            for output in outputs
            for completion in output.outputs
        ],
        "prompt_logprobs": [
            [{token: entry.logprob for token, entry in position.items()} for position in output.prompt_logprobs[1:]]
            if output.prompt_logprobs
            else None
            for output in outputs
        ],
        "metrics": {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")},
    }


def main() -> None:
    """Serves requests until standard input ends."""
    with os.fdopen(int(sys.argv[1]), "w") as replies:
        for line in sys.stdin:
            try:
                reply = answer(json.loads(line))
            except BaseException as error:  # whatever happens is the answer
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
