from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gated_serving.llm.serving import cpu_defaults
from gated_serving.llm.serving.cpu_defaults import GIB, LaunchPlan, cache_bytes_per_token, parse_size, plan_cpu
from gated_serving.llm.serving.errors import MachineError, UsageError
from gated_serving.llm.serving.model_source import ServedModel
from gated_serving.llm.serving.options import ServeSettings

CONFIG: dict[str, Any] = {
    "model_type": "gated_qwen3",
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 256,
    "max_position_embeddings": 1024,
    "dtype": "float32",
}


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores, 8 GiB, and nothing set."""
    monkeypatch.setattr(cpu_defaults, "available_memory_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(cpu_defaults, "num_physical_cores", lambda: 4)
    for name in (*cpu_defaults._PROCESS_VARIABLES, "VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)


def plan(*options: str, **fields: Any) -> LaunchPlan:
    model = ServedModel(
        folder=Path("/model"), name="model", summary="", config=CONFIG | fields, weights_bytes=20_000_000
    )
    return plan_cpu(ServeSettings(model="model", vllm_options=options), model)


def option(made: LaunchPlan, name: str) -> str | None:
    return made.options[made.options.index(name) + 1] if name in made.options else None


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": None}, "bfloat16"),
        ({"model_type": "qwen3_next"}, "bfloat16"),
    ],
)
def test_the_checkpoints_dtype(fields: dict[str, Any], dtype: str) -> None:
    assert option(plan(**fields), "--dtype") == dtype


def test_what_the_user_sets_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan("--dtype", "bfloat16", "--no-enforce-eager", "--kv-cache-memory-bytes", "64M")
    assert made.options == ()
    assert "--enforce-eager" in plan().options
    assert "--enforce-eager" not in plan("-O3").options
    assert option(plan("--gpu-memory-utilization", "0.3"), "--kv-cache-memory-bytes") is None
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("LD_PRELOAD", "/lib/libiomp5.so")
    assert not {"OMP_NUM_THREADS", "LD_PRELOAD"} & set(plan().environment)


def test_one_core_is_left_to_the_api() -> None:
    assert plan().environment["OMP_NUM_THREADS"] == "3"


def test_cache_for_many_full_sequences_within_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    per_token = cache_bytes_per_token(CONFIG, "float32")
    assert per_token == 2 * 6 * 2 * 32 * 4
    roomy = int(option(plan(), "--kv-cache-memory-bytes") or 0)
    assert roomy >= 64 * 1024 * per_token
    monkeypatch.setattr(cpu_defaults, "available_memory_bytes", lambda: int(1.3 * GIB))
    short = int(option(plan(), "--kv-cache-memory-bytes") or 0)
    assert 1024 * per_token < short < roomy


def test_a_long_model_is_shortened_aloud_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_defaults, "available_memory_bytes", lambda: 2 * GIB)
    made = plan(max_position_embeddings=1_000_000)
    length = int(option(made, "--max-model-len") or 0)
    assert 0 < length < 1_000_000
    assert any(str(length) in note for note in made.notes)
    assert int(option(made, "--kv-cache-memory-bytes") or 0) >= length * cache_bytes_per_token(CONFIG, "float32")


def test_a_length_that_was_asked_for_is_never_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_defaults, "available_memory_bytes", lambda: 2 * GIB)
    with pytest.raises(MachineError, match="1000000 tokens"):
        plan("--max-model-len", "1000000")


@pytest.mark.parametrize(("size", "word"), [("1M", "too little memory"), ("9G", "are free"), ("900T", "are free")])
def test_cache_sizes_that_cannot_work(size: str, word: str) -> None:
    with pytest.raises(MachineError, match=word):
        plan("--kv-cache-memory-bytes", size)


def test_cache_space_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert option(plan(), "--kv-cache-memory-bytes") is None
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "500")
    with pytest.raises(MachineError, match="VLLM_CPU_KVCACHE_SPACE"):
        plan()


def test_no_memory_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_defaults, "available_memory_bytes", lambda: GIB)
    with pytest.raises(MachineError, match="too little memory for the KV cache"):
        plan()


@pytest.mark.parametrize(
    "options", [("--tensor-parallel-size", "2"), ("-tp", "2"), ("--distributed-executor-backend", "mp")]
)
def test_more_than_one_worker_leaves_the_processes_to_vllm(options: tuple[str, ...]) -> None:
    made = plan(*options)
    assert not made.forks_engine
    assert not made.environment
    assert plan().forks_engine


def test_thread_binding_that_was_set_leaves_the_processes_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    assert not plan().forks_engine


@pytest.mark.parametrize(
    ("text", "number"),
    [("5", 5), ("2k", 2000), ("2K", 2048), ("1.5G", 3 * 2**29), ("1m", 10**6), ("many", None), ("-1", None)],
)
def test_sizes_as_vllm_reads_them(text: str, number: int | None) -> None:
    assert parse_size(text) == number


@pytest.mark.parametrize("length", ["banana", float("inf"), {}, 0, -1, True])
def test_a_length_that_is_none_is_named(length: object) -> None:
    with pytest.raises(UsageError, match="max_position_embeddings="):
        plan(max_position_embeddings=length)


@pytest.mark.parametrize("field", ["num_attention_heads", "hidden_size", "num_hidden_layers", "head_dim"])
def test_sizes_that_cannot_be_told_are_left_to_vllm(field: str) -> None:
    assert option(plan(**{field: "banana"}), "--kv-cache-memory-bytes") is None
