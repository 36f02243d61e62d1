"""The table of expected tensors against what the model classes have."""

import json
from typing import Any

import pytest
import torch
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from gated_serving.llm.checkpoints import expected_tensors, read_headers, recognise
from gated_serving.llm.models import (
    GatedQwen3Config,
    GatedQwen3ForCausalLM,
    GatedQwen3MoeConfig,
    GatedQwen3MoeForCausalLM,
)

SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GATES: dict[str, dict[str, Any]] = {
    "headwise": {},
    "elementwise_per_head": {"gate_granularity": "elementwise", "gate_packing": "per_head"},
    "values": {"gate_position": "G2", "gate_granularity": "elementwise"},
    "separate_with_bias": {"gate_packing": "separate", "gate_bias": True},
    "output": {"gate_position": "G5", "gate_granularity": "elementwise", "gate_packing": "separate"},
    "constant": {"gate_input": "constant", "gate_packing": "separate", "gate_position": "G3"},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_gated_dense(gate, tied):
    config = GatedQwen3Config(**SIZES, **GATES[gate], tie_word_embeddings=tied, attention_bias=tied, use_qk_norm=tied)
    with torch.device("meta"):
        model = GatedQwen3ForCausalLM(config)
    assert expected(config, "GatedQwen3ForCausalLM") == shapes(model, tied=tied)


@pytest.mark.parametrize(
    ("config_class", "model_class"), [(Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_ungated_dense(config_class, model_class, has_bias):
    config = config_class(**SIZES, attention_bias=has_bias)
    with torch.device("meta"):
        model = model_class(config)
    assert expected(config, model_class.__name__) == shapes(model)


@pytest.mark.parametrize(
    ("config_class", "model_class"),
    [(GatedQwen3MoeConfig, GatedQwen3MoeForCausalLM), (Qwen3MoeConfig, Qwen3MoeForCausalLM)],
)
@pytest.mark.parametrize("sparsity", [{}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_moe_as_it_is_saved(tmp_path, config_class, model_class, sparsity):
    model_class(config_class(**SIZES, **MOE, **sparsity)).save_pretrained(tmp_path)
    layout = recognise(json.loads((tmp_path / "config.json").read_text())).layout
    assert layout is not None
    found = {name: header.shape for name, header in read_headers(tmp_path).items()}
    assert expected_tensors(layout) == found


def expected(config, architecture):
    layout = recognise(config.to_dict() | {"architectures": [architecture]}).layout
    assert layout is not None
    return expected_tensors(layout)


def shapes(model, *, tied=False):
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del found["lm_head.weight"]
    return found
