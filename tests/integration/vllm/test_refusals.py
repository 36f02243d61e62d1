"""What cannot be served right is refused aloud, and the message names the tensor; everything else goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_factory import greedy_tokens, make_official, read_weights, write_weights
from vllm_engine import PROMPTS, EngineError, EngineProcess

BROKEN_IMPORT = 'raise ImportError("gated_serving is broken on purpose")\n'
OTHER_VERSION = """
import wrapt

def pretend(module):
    module.__version__ = {version!r}

wrapt.register_post_import_hook(pretend, "vllm.version")
"""
OTHER_LAYERS = """
import wrapt

def rename(module):
    del module.QKVParallelLinear.weight_loader_v2

wrapt.register_post_import_hook(rename, "vllm.model_executor.layers.linear")
"""


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_weights(folder: Path, tensors: dict[str, torch.Tensor] | None = None, *, drop: str = "") -> None:
    weights = read_weights(folder) | (tensors or {})
    weights.pop(drop, None)
    write_weights(folder, weights, "safetensors")


def make_llama(folder: Path) -> Path:
    make_official(folder, gate="none", qk_norm=False)
    change_config(folder, architectures=["LlamaForCausalLM"], model_type="llama")
    return folder


def refused(engine: EngineProcess, folder: Path, *parts: str, **options: Any) -> None:
    with pytest.raises(EngineError) as error:
        engine.generate(folder, num_logprobs=None, **options)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_gate_rows_without_a_flag(engine: EngineProcess, tmp_path: Path, model_type: str) -> None:
    folder = make_official(tmp_path, model_type=model_type)
    change_config(folder, headwise_attn_output_gate=False)
    refused(engine, folder, "model.layers.0.self_attn.q_proj.weight", "[132, 96]", "expected shape [128, 96]")


def test_gate_rows_without_a_flag_in_biases(engine: EngineProcess, tmp_path: Path) -> None:
    folder = make_official(tmp_path, gate="none", qkv_bias=True)
    change_weights(folder, {"model.layers.1.self_attn.q_proj.bias": torch.ones(132)})
    refused(engine, folder, "model.layers.1.self_attn.q_proj.bias", "[132]", "[128]")


def test_oversize_query_projection_of_another_architecture(engine: EngineProcess, tmp_path: Path) -> None:
    folder = make_llama(tmp_path)
    engine.generate(folder, num_logprobs=None)
    change_weights(folder, {"model.layers.1.self_attn.q_proj.weight": torch.ones(256, 96)})
    refused(engine, folder, "model.layers.1.self_attn.q_proj.weight", "[256, 96]", "[128, 96]")


@pytest.mark.parametrize("name", ["gate", "g_proj"])
def test_gate_that_another_architecture_has_no_use_for(engine: EngineProcess, tmp_path: Path, name: str) -> None:
    folder = make_llama(tmp_path)
    change_weights(folder, {f"model.layers.1.self_attn.{name}.weight": torch.ones(4, 96)})
    refused(engine, folder, f"model.layers.1.self_attn.{name}.weight", "[4, 96]", "no use for")


def test_gate_projection_beside_a_packed_gate(engine: EngineProcess, tmp_path: Path) -> None:
    folder = make_official(tmp_path)
    change_weights(folder, {"model.layers.0.self_attn.g_proj.weight": torch.ones(4, 96)})
    refused(engine, folder, "model.layers.0.self_attn.g_proj.weight", "[4, 96]", "no use for")


def test_config_of_another_gate(engine: EngineProcess, tmp_path: Path) -> None:
    folder = make_official(tmp_path)
    change_config(folder, headwise_attn_output_gate=False, elementwise_attn_output_gate=True)
    refused(engine, folder, "model.layers.0.self_attn.q_proj.weight", "[132, 96]", "[256, 96]")


def test_both_flags(engine: EngineProcess, tmp_path: Path) -> None:
    folder = make_official(tmp_path)
    change_config(folder, elementwise_attn_output_gate=True)
    refused(engine, folder, "headwise_attn_output_gate and elementwise_attn_output_gate")


def test_missing_tensor(engine: EngineProcess, tmp_path: Path) -> None:
    folder = make_official(tmp_path)
    change_weights(folder, drop="model.layers.1.self_attn.k_proj.weight")
    refused(engine, folder, "model.layers.1.self_attn.k_proj.weight", "lacks")


def test_missing_expert(engine: EngineProcess, tmp_path: Path) -> None:
    folder = make_official(tmp_path, model_type="qwen3_moe")
    change_weights(folder, drop="model.layers.1.mlp.experts.2.up_proj.weight")
    refused(engine, folder, "model.layers.1.mlp.experts.2.up_proj", "lacks")


def test_bias_that_the_config_denies(engine: EngineProcess, tmp_path: Path) -> None:
    folder = make_official(tmp_path, qkv_bias=True)
    change_config(folder, qkv_bias=False, attention_bias=False)
    refused(engine, folder, "_proj.bias", "attention_bias")


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_bias_that_an_ungated_config_denies(engine: EngineProcess, tmp_path: Path, model_type: str) -> None:
    folder = make_official(tmp_path, gate="none", model_type=model_type)
    name = "model.layers.1.self_attn.k_proj.bias"
    change_weights(folder, {name: torch.zeros(64)})
    plain = engine.generate(folder, num_logprobs=None)
    change_weights(folder, {name: torch.ones(64)})
    refused(engine, folder, name, "[64]", "a bias", "no use for", "attention_bias")
    change_weights(folder, drop="model.layers.1.self_attn.k_proj.bias")
    assert engine.generate(folder, num_logprobs=None).tokens == plain.tokens


@pytest.mark.parametrize("gate", ["none", "headwise"])
@pytest.mark.parametrize(("projection", "rows"), [("up_proj", 161), ("up_proj", 320), ("down_proj", 97)])
def test_expert_that_is_too_large(engine: EngineProcess, tmp_path: Path, gate: Any, projection: str, rows: int) -> None:
    folder = make_official(tmp_path, gate=gate, model_type="qwen3_moe")
    name = f"model.layers.1.mlp.experts.2.{projection}.weight"
    weight = read_weights(folder)[name]
    change_weights(folder, {name: torch.cat([weight, weight])[:rows].contiguous()})
    refused(engine, folder, name, f"[{rows}, {weight.shape[1]}]", f"expected shape {list(weight.shape)}")


def test_expert_too_many(engine: EngineProcess, tmp_path: Path) -> None:
    folder = make_official(tmp_path, model_type="qwen3_moe")
    change_weights(folder, {"model.layers.1.mlp.experts.4.up_proj.weight": torch.ones(160, 96)})
    refused(engine, folder, "model.layers.1.mlp.experts.4.up_proj.weight", "[160, 96]", "num_experts")


def test_heads_that_cannot_be_divided(parallel_engine: EngineProcess, tmp_path: Path) -> None:
    folder = make_official(tmp_path, heads=3, kv_heads=1, head_dim=32)
    refused(parallel_engine, folder, "attention heads", tensor_parallel_size=2)


def test_transformers_implementation_is_refused(engine: EngineProcess, tmp_path: Path) -> None:
    folder = make_official(tmp_path)
    refused(engine, folder, "GatedQwen3ForCausalLM", model_impl="transformers")


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("gated_serving/__init__.py", BROKEN_IMPORT, "gated_serving is broken on purpose"),
        ("sitecustomize.py", OTHER_VERSION.format(version="0.31.2"), "vLLM is 0.31.2"),
        ("sitecustomize.py", OTHER_VERSION.format(version="0.34.0"), "vLLM is 0.34.0"),
    ],
    ids=["failed-import", "too-old", "too-new"],
)
def test_plugin_that_cannot_work_refuses_gated_models_only(
    tmp_path: Path, module: str, source: str, reason: str
) -> None:
    shadow = tmp_path / "shadow" / module
    shadow.parent.mkdir(parents=True)
    shadow.write_text(source)
    official = make_official(tmp_path / "official")
    ungated = make_official(tmp_path / "ungated", gate="none")
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text(
        json.dumps({"model_type": "gated_qwen3", "architectures": ["GatedQwen3ForCausalLM"]})
    )
    process = EngineProcess(tmp_path / "log", {"PYTHONPATH": str(tmp_path / "shadow")})
    try:
        for folder in (official, own):
            refused(process, folder, "vllm_gated plugin cannot serve it", reason)
        generated = process.generate(ungated, num_logprobs=None)
    finally:
        process.close()
    assert generated.tokens == [greedy_tokens(ungated, prompt, 8) for prompt in PROMPTS]


def test_guard_that_cannot_work_refuses_gated_models(tmp_path: Path) -> None:
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "sitecustomize.py").write_text(OTHER_LAYERS)
    official = make_official(tmp_path / "official")
    process = EngineProcess(tmp_path / "log", {"PYTHONPATH": str(tmp_path / "shadow")})
    try:
        # The layers are imported after the config is read: the model itself refuses, then the config does.
        refused(process, official, "not guarded")
        refused(process, official, "vllm_gated plugin cannot serve it", "weight_loader_v2")
    finally:
        process.close()
