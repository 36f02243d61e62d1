"""Tiny gated models with random weights of a healthy size, for tests."""

from __future__ import annotations

from typing import Any

import torch

from gated_serving.llm.models import (
    GatedQwen3Config,
    GatedQwen3ForCausalLM,
    GatedQwen3MoeConfig,
    GatedQwen3MoeForCausalLM,
)

SIZES = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}

VARIANTS: dict[str, dict[str, Any]] = {
    "headwise": {},
    "elementwise": {"gate_granularity": "elementwise"},
    "per_head_packing": {"gate_packing": "per_head", "gate_granularity": "elementwise"},
    "headwise_per_head_packing": {"gate_packing": "per_head"},
    "separate": {"gate_packing": "separate"},
    "separate_bias": {"gate_packing": "separate", "gate_bias": True, "gate_init_bias": 0.7},
    "shared": {"gate_sharing": "shared", "gate_granularity": "elementwise"},
    "additive_silu": {"gate_operation": "add", "gate_activation": "silu", "gate_granularity": "elementwise"},
    "softplus": {"gate_activation": "softplus"},
    "non_sparse": {"gate_activation": "non_sparse_sigmoid"},
    "constant": {"gate_input": "constant", "gate_packing": "separate", "gate_granularity": "elementwise"},
    "top_k": {"gate_top_k_share": 0.3, "gate_granularity": "elementwise"},
    "g2": {"gate_position": "G2"},
    "g2_elementwise": {"gate_position": "G2", "gate_granularity": "elementwise"},
    "g2_shared_separate": {"gate_position": "G2", "gate_sharing": "shared", "gate_packing": "separate"},
    "g3": {"gate_position": "G3", "gate_granularity": "elementwise"},
    "g4": {"gate_position": "G4", "gate_granularity": "elementwise"},
    "g5": {"gate_position": "G5", "gate_granularity": "elementwise", "gate_packing": "separate"},
    "biases": {"attention_bias": True},
    "no_qk_norm": {"use_qk_norm": False},
    "tied": {"tie_word_embeddings": True},
    "one_kv_head": {"num_key_value_heads": 1},
    "no_groups": {"num_key_value_heads": 4, "gate_granularity": "elementwise"},
}
"""Changes to a headwise G1 gate in the released packing, by a name for the test's id."""


def tiny_config(*, moe: bool = False, **fields: Any) -> GatedQwen3Config | GatedQwen3MoeConfig:
    """The tiny config with some fields changed."""
    if moe:
        return GatedQwen3MoeConfig(**(SIZES | EXPERTS | fields))
    return GatedQwen3Config(**(SIZES | fields))


def tiny_model(*, moe: bool = False, seed: int = 0, **fields: Any) -> GatedQwen3ForCausalLM | GatedQwen3MoeForCausalLM:
    """A model in float32 and evaluation mode whose every weight and bias is random, none at its start value."""
    config = tiny_config(moe=moe, **fields)
    model = (GatedQwen3MoeForCausalLM if moe else GatedQwen3ForCausalLM)(config)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim == 1 or "g_const" in name:
                parameter.copy_(0.5 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise * (0.1 if config.tie_word_embeddings else 1.0))
            else:
                parameter.copy_(noise * (2 if "self_attn" in name else 1) * parameter.shape[-1] ** -0.5)
    return model.eval()
