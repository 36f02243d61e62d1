"""What vLLM is told on a CPU when the user has not said otherwise.

Measured on 2 cores with a 5.3M-parameter model:

* Eager execution: compiling makes answers faster by a third or so, but costs half a minute to a minute at start-up and
  needs a C++ compiler, which a machine that only serves may not have. The choice is told, and ``--no-enforce-eager``
  takes it back.
* The checkpoint's own dtype. vLLM would round float32 weights to bfloat16 on a CPU without being asked.
* One compute thread a core, less one core for the API and the scheduler; a second compute thread on 2 cores made
  answers slower whenever anything else ran.
* KV-cache space for a number of full-length sequences, where vLLM would take most of the machine's memory.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gated_serving.llm.serving.errors import MachineError, UsageError
from gated_serving.llm.serving.machine import available_memory_bytes, num_physical_cores
from gated_serving.llm.serving.model_source import ServedModel
from gated_serving.llm.serving.options import ServeSettings

GIB = 1 << 30
MIB = 1 << 20
NUM_FULL_SEQUENCES = 64  # how many sequences of full length the cache is laid out for, memory permitting
MAX_CACHE_SHARE = 0.4  # of the memory left beside the weights
MAX_DEFAULT_CACHE_BYTES = 8 * GIB
MIN_DEFAULT_CACHE_BYTES = 64 * MIB
PROCESS_BYTES = int(1.2 * GIB)  # what vLLM's processes hold beside weights and cache
BLOCK_TOKENS = 128  # vLLM's block size on a CPU
_SIZE_FIELDS = ("num_hidden_layers", "num_attention_heads", "hidden_size")
_OPTIONAL_SIZE_FIELDS = ("head_dim", "num_key_value_heads")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
# Anything of this asks for more than one engine process, or says how processes are made.
_PARALLEL_OPTIONS = (
    "--tensor-parallel", "-tp", "--pipeline-parallel", "-pp", "--data-parallel", "-dp", "--distributed-executor",
    "--prefill-context-parallel", "--decode-context-parallel", "-dcp", "-pcp", "--nnodes", "--node-rank", "--numa-bind",
    "--enable-expert-parallel", "-ep", "--api-server-count", "-asc", "--kv-transfer-config", "--worker-cls",
)  # fmt: skip
_PROCESS_VARIABLES = (
    "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_SIM_MULTI_NUMA",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How vLLM is started.

    Attributes:
        options: Options of ours, which stand before the user's, so that the user's win.
        environment: Variables to add.
        forks_engine: Whether API and engine share their imports by a fork; otherwise vLLM makes its processes.
        notes: What the reader should know about the choices.
    """

    options: tuple[str, ...] = ()
    environment: Mapping[str, str]
    forks_engine: bool = False
    notes: tuple[str, ...] = ()


def plan_cpu(settings: ServeSettings, model: ServedModel) -> LaunchPlan:
    """Choose dtype, compilation, KV-cache space, threads and processes for a CPU.

    Raises:
        MachineError: The KV cache asked for, or the smallest one that works, does not fit into memory.
        UsageError: ``max_position_embeddings`` is no length.
    """
    notes: list[str] = []
    dtype = _choose_dtype(settings, model.config)
    options = [] if settings.has("--dtype") else ["--dtype", dtype]
    if not settings.has("--enforce-eager", "--no-enforce-eager") and not settings.has_prefix("-O", "-cc", "--compil"):
        options.append("--enforce-eager")
        notes.append("eager execution, for a quick start; --no-enforce-eager compiles (slower start, faster answers)")
    options += _cache_options(settings, model, dtype, notes)
    environment, forks_engine = _processes(settings, notes)
    return LaunchPlan(options=tuple(options), environment=environment, forks_engine=forks_engine, notes=tuple(notes))


def _choose_dtype(settings: ServeSettings, config: dict[str, Any]) -> str:
    """The dtype asked for, else the checkpoint's, as a name."""
    asked = settings.value("--dtype")
    if asked not in (None, "auto"):
        return {"float": "float32", "half": "float16"}.get(str(asked), str(asked))
    if config.get("model_type") == "qwen3_next":
        return "bfloat16"  # the CPU build's linear attention knows no other
    stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return stored if stored in _DTYPE_BYTES else "bfloat16"


def cache_bytes_per_token(config: dict[str, Any], dtype: str) -> int:
    """Bytes of keys and values that one token takes, over all layers."""
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or max(1, config["hidden_size"] // heads))
    num_kv_heads = int(config.get("num_key_value_heads") or heads)
    return 2 * int(config["num_hidden_layers"]) * num_kv_heads * head_dim * _DTYPE_BYTES.get(dtype, 2)


def _cache_options(settings: ServeSettings, model: ServedModel, dtype: str, notes: list[str]) -> list[str]:
    available = available_memory_bytes()
    asked = _asked_cache_bytes(settings)
    room = None if available is None else available - int(model.weights_bytes * _growth(model, dtype)) - PROCESS_BYTES
    if asked is not None and available is not None and asked > available:
        raise MachineError(
            f"the KV cache asked for takes {asked / GIB:.1f} GiB, but only {available / GIB:.1f} GiB of memory are "
            f"free. Ask for less with --kv-cache-memory-bytes or {_CACHE_VARIABLE}"
        )
    max_length = _max_length(settings, model.config)
    if max_length is None:
        return []  # vLLM knows the length and the layers of such a model; we do not
    per_token = cache_bytes_per_token(model.config, dtype)
    needed = per_token * (-(-max_length // BLOCK_TOKENS) + 1) * BLOCK_TOKENS
    if asked is not None:
        if asked < needed:
            raise MachineError(
                f"too little memory for the KV cache: one sequence of {max_length} tokens takes "
                f"{needed / MIB:.1f} MiB, and {asked / MIB:.1f} MiB were given. Give more with --kv-cache-memory-bytes "
                f"or {_CACHE_VARIABLE}, or lower --max-model-len"
            )
        return []
    if settings.has("--gpu-memory-utilization"):
        return []
    room = needed * NUM_FULL_SEQUENCES if room is None else room
    length_options: list[str] = []
    if needed > room * 0.9:
        if settings.has("--max-model-len"):
            raise _no_room(max_length, needed, room)
        max_length = int(room * MAX_CACHE_SHARE) // per_token // BLOCK_TOKENS * BLOCK_TOKENS
        if max_length < BLOCK_TOKENS:
            raise _no_room(BLOCK_TOKENS, per_token * BLOCK_TOKENS, room)
        notes.append(f"memory is short: serving {max_length} tokens at most; --max-model-len sets another length")
        length_options = ["--max-model-len", str(max_length)]
        needed = per_token * (max_length + BLOCK_TOKENS)
    wanted = max(NUM_FULL_SEQUENCES * needed, MIN_DEFAULT_CACHE_BYTES)
    chosen = max(needed, min(wanted, MAX_DEFAULT_CACHE_BYTES, int(room * MAX_CACHE_SHARE)))
    notes.append(f"KV cache {chosen / MIB:,.0f} MiB, {chosen // per_token:,} tokens; --kv-cache-memory-bytes sets it")
    return [*length_options, "--kv-cache-memory-bytes", str(chosen)]


def _no_room(num_tokens: int, needed: int, room: int) -> MachineError:
    return MachineError(
        f"too little memory for the KV cache: one sequence of {num_tokens} tokens takes {needed / MIB:,.1f} MiB, and "
        f"{max(room, 0) / MIB:,.1f} MiB are free beside the weights and vLLM itself. Free some memory, or lower "
        "--max-model-len"
    )


def _growth(model: ServedModel, dtype: str) -> float:
    """How the weights grow when they are loaded in another dtype than the stored one."""
    stored = str(model.config.get("dtype") or model.config.get("torch_dtype") or dtype).removeprefix("torch.")
    return _DTYPE_BYTES.get(dtype, 2) / _DTYPE_BYTES.get(stored, 2)


def _max_length(settings: ServeSettings, config: dict[str, Any]) -> int | None:
    """Tokens of the longest sequence, or None where layers are not all full attention of one known size."""
    sizes = [config.get(name) for name in _SIZE_FIELDS]
    sizes += [config[name] for name in _OPTIONAL_SIZE_FIELDS if config.get(name) is not None]
    if (
        config.get("model_type") == "qwen3_next"
        or config.get("use_sliding_window")
        or not all(isinstance(size, int) and size > 0 for size in sizes)
    ):
        return None
    asked = settings.value("--max-model-len")
    if asked is not None:
        return parse_size(asked)
    length = config.get("max_position_embeddings")
    if length is None:
        return None
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise UsageError(f"config.json: max_position_embeddings={length!r}: must be a whole number of at least 1")
    return length


def _asked_cache_bytes(settings: ServeSettings) -> int | None:
    """The KV-cache space that the user set, by option or environment."""
    option = settings.value("--kv-cache-memory-bytes", "--kv-cache-memory")
    variable = os.environ.get(_CACHE_VARIABLE, "")
    if variable:  # vLLM lets the variable win
        return int(variable) * GIB if variable.isdigit() else None
    return None if option is None else parse_size(option)


def parse_size(text: str) -> int | None:
    """Read a number as vLLM does: ``2k`` is 2,000 and ``2K`` is 2,048; None when it is not one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", text)
    if match is None:
        return None
    number, suffix = match.groups()
    exponent = "kmgt".index(suffix.lower()) + 1 if suffix else 0
    return int(float(number) * (1000 if suffix.islower() else 1024) ** exponent)


def _processes(settings: ServeSettings, notes: list[str]) -> tuple[dict[str, str], bool]:
    """Threads and processes: the environment to add, and whether the engine is forked."""
    asked = [name for name in _PROCESS_VARIABLES if os.environ.get(name)]
    if settings.has_prefix(*_PARALLEL_OPTIONS) or asked:
        notes.append("vLLM makes its own processes for these settings; starting takes longer")
        return {}, False
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, num_physical_cores() - 1))
    preload = os.environ.get("LD_PRELOAD", "")
    gomp = _torch_gomp()
    if gomp is not None and not any(name in preload for name in ("libgomp", "libiomp", "libomp")):
        environment["LD_PRELOAD"] = f"{preload}:{gomp}" if preload else str(gomp)
    return environment, True


def _torch_gomp() -> Path | None:
    """The OpenMP library that torch brings; preloaded, torch and vLLM's kernels share one pool of threads."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    found = [*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*")]
    return found[0] if found else None
