"""A process that makes vLLM engines on request, so that a test run pays for vLLM's import once.

Reads one JSON request a line from standard input and writes one JSON answer a line to the descriptor given as its
argument: ``{"model", "engine", "prompts", "num_tokens", "num_logprobs", "adapters"}`` to ``{"tokens", "logprobs",
...}`` or ``{"error"}``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

KV_CACHE_BYTES = 1 << 24  # vLLM fills the whole cache with zeros; these prompts need little of it


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Makes an engine, generates greedily with it, and takes it down again."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = None
    try:
        defaults = {"enforce_eager": True, "dtype": "float32", "max_model_len": 128, "max_num_seqs": 8}
        options = defaults | {"disable_log_stats": False, "kv_cache_memory_bytes": KV_CACHE_BYTES} | request["engine"]
        register_kernels_once()
        choose_worker_start("fork" if request["forks_workers"] else "spawn")
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
        "packed_modules": llm.apply_model(_packed_modules)[0],
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


def _packed_modules(model: Any) -> dict[str, list[str]]:
    """Which of its modules hold several of the checkpoint's."""
    return getattr(model, "packed_modules_mapping", {})


def register_kernels_once() -> None:
    """Spares all engines but the first vLLM's search of every imported module for the kernels that a CPU replaces."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    register = current_platform.register_triton_kernel_overrides
    if not isinstance(vars(platform).get(register.__name__), staticmethod):
        setattr(platform, register.__name__, staticmethod(cache(register)))


def choose_worker_start(method: str) -> None:
    """Sets how vLLM starts the processes of several ranks: a fork of this one needs no imports of its own.

    vLLM's CPU platform asks for "spawn" while it makes the engine's config, so the choice has to follow that.
    """
    from vllm.engine.arg_utils import EngineArgs

    create = vars(EngineArgs)["create_engine_config"]
    create = getattr(create, "__wrapped__", create)

    @wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method
        return config

    EngineArgs.create_engine_config = create_engine_config


def keep_imports_from_collection() -> Callable[[], None]:
    """Returns what makes the garbage collector pass over all that is alive when it is called.

    vLLM collects several times an engine, and most of an engine's time would go into walking over the imported modules.
    Its own freezing, which it takes back with ours in it, is switched off.
    """
    freeze = gc.freeze
    gc.freeze = gc.unfreeze = lambda: None
    return freeze


def main() -> None:
    """Serves requests until standard input ends."""
    freeze = keep_imports_from_collection()
    with os.fdopen(int(sys.argv[1]), "w") as replies:
        for line in sys.stdin:
            try:
                reply = answer(json.loads(line))
            except BaseException as error:  # whatever happens is the answer
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(reply), file=replies, flush=True)
            freeze()


if __name__ == "__main__":
    main()
