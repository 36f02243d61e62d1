"""From a run's settings to a transformers config and a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from gated_serving.llm.models import (
    GatedQwen3Config,
    GatedQwen3ForCausalLM,
    GatedQwen3MoeConfig,
    GatedQwen3MoeForCausalLM,
)
from gated_serving.llm.training.settings import MOE_FAMILIES, Family, ModelSettings

_CLASSES: dict[Family, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "gated_qwen3": (GatedQwen3Config, GatedQwen3ForCausalLM),
    "gated_qwen3_moe": (GatedQwen3MoeConfig, GatedQwen3MoeForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
}
_SHARED_FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "max_position_embeddings", "tie_word_embeddings", "initializer_range", "attention_bias",
)  # fmt: skip
_MOE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def build_config(
    settings: ModelSettings, *, vocab_size: int | None = None, eos_token_id: int | None = None
) -> PreTrainedConfig:
    """The transformers config of a model.

    Args:
        settings: Architecture and sizes.
        vocab_size: Entries of the tokenizer; ``settings.vocab_size`` has precedence, and must not be smaller.
        eos_token_id: The end-of-text token, where there is a tokenizer.

    Raises:
        ValueError: No vocabulary size is known, or the embedding would have fewer rows than the tokenizer has entries,
            or ``settings.extra`` names a field that the config does not have or that has a setting of its own.
    """
    rows = settings.vocab_size or vocab_size
    if rows is None:
        raise ValueError("vocab_size=None: must be given where there is no tokenizer to take it from")
    if vocab_size is not None and rows < vocab_size:
        raise ValueError(f"vocab_size={rows}: must be at least {vocab_size}, the entries of the tokenizer")
    fields: dict[str, Any] = {name: getattr(settings, name) for name in _SHARED_FIELDS}
    fields |= {"vocab_size": rows, "eos_token_id": eos_token_id, "pad_token_id": eos_token_id, "bos_token_id": None}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": settings.rope_theta}
    if settings.family in MOE_FAMILIES:
        fields |= {name: getattr(settings, name) for name in _MOE_FIELDS}
    if settings.is_gated:
        fields |= settings.gate_fields()
    config_class, _ = _CLASSES[settings.family]
    _check_extra(settings, fields, config_class)
    try:
        return config_class(**fields | dict(settings.extra))
    except Exception as error:  # each config class has its own
        raise ValueError(f"model: these settings make no {config_class.__name__}: {error!r}") from error


def _check_extra(settings: ModelSettings, fields: dict[str, Any], config_class: type[PreTrainedConfig]) -> None:
    known = config_class()
    for name in settings.extra:
        if name in fields:
            raise ValueError(f"model.extra={dict(settings.extra)!r}: {name} has a setting of its own; use that")
        if not hasattr(known, name):
            raise ValueError(f"model.extra={dict(settings.extra)!r}: {config_class.__name__} has no field {name!r}")


def build_model(settings: ModelSettings, config: PreTrainedConfig) -> PreTrainedModel:
    """A freshly initialised model in float32, on the device of the surrounding ``torch.device`` context.

    Raises:
        ValueError: The config makes no model, as with an activation that nobody knows.
    """
    try:
        return model_class(settings.family)(config)
    except Exception as error:  # a wrong field shows itself in as many ways as there are layers
        raise ValueError(f"model: these settings make no {settings.family} model: {error!r}") from error


def model_class(model_type: str) -> type[PreTrainedModel]:
    """The model class of a config's ``model_type``, which is a family's name.

    Raises:
        ValueError: No family has that name.
    """
    for family, (_, found) in _CLASSES.items():
        if family == model_type:
            return found
    raise ValueError(f"model_type={model_type!r}: must be one of {', '.join(_CLASSES)}")


def count_parameters(model: nn.Module) -> int:
    """Parameters of a model; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_active_parameters(model: nn.Module, config: PreTrainedConfig) -> int:
    """Parameters that one token uses: of the experts only those a token is routed to."""
    total = count_parameters(model)
    num_experts = getattr(config, "num_experts", None)
    if not num_experts:
        return total
    in_experts = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
    return total - in_experts + in_experts * getattr(config, "num_experts_per_tok") // num_experts  # noqa: B009


def build_on_meta(settings: ModelSettings) -> tuple[PreTrainedModel, PreTrainedConfig]:
    """A model without memory, to count and compare shapes."""
    config = build_config(settings)
    with torch.device("meta"):
        return build_model(settings, config), config
