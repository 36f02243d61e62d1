"""The released checkpoints' config flags, and what they mean in this project's terms.

The released gated-attention models (arXiv 2505.06708) keep Qwen's own model type and architecture name and say only
by flags that ``q_proj`` holds gate rows; whoever ignores the flags drops the rows. The packing is always per
key/value group and the gate a sigmoid at G1. Needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gated_serving.attention.config import GateConfig, Granularity

GRANULARITY_FLAGS = {
    "headwise_attn_output_gate": Granularity.HEADWISE,
    "elementwise_attn_output_gate": Granularity.ELEMENTWISE,
}
MODEL_TYPES = {"qwen2": "gated_qwen3", "qwen3": "gated_qwen3", "qwen3_moe": "gated_qwen3_moe"}
ARCHITECTURES = {"gated_qwen3": "GatedQwen3ForCausalLM", "gated_qwen3_moe": "GatedQwen3MoeForCausalLM"}


def read_flag(config: Mapping[str, Any], field: str) -> bool:
    """A field that is true or false; an absent one, or null, is false.

    Raises:
        ValueError: It is something else, such as the text "false", which Python would take for true.
    """
    value = config.get(field)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{field}={value!r}: must be true or false")
    return bool(value)


def is_official_gated(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says by its flags that ``q_proj`` holds gate rows.

    Raises:
        ValueError: A flag is neither true nor false.
    """
    return config.get("model_type") in MODEL_TYPES and bool(_true_flags(config))


def official_gate(config: Mapping[str, Any]) -> GateConfig:
    """The gate that a released config describes.

    Raises:
        ValueError: Both flags are set, or one is neither true nor false.
    """
    found = _true_flags(config)
    if len(found) != 1:
        raise ValueError(
            f"headwise_attn_output_gate and elementwise_attn_output_gate: exactly one must be true, found {len(found)}"
        )
    return GateConfig(granularity=found[0])


def translate_official(config: Mapping[str, Any]) -> dict[str, Any]:
    """A released config.json as one of the project's own families; every other field is kept.

    ``qkv_bias`` (which also puts a bias on ``o_proj``) becomes ``attention_bias``. ``use_qk_norm`` keeps its name.

    Raises:
        ValueError: The flags do not say which gate, or a field is neither true nor false.
    """
    gate = official_gate(config)
    translated = {name: value for name, value in config.items() if name not in GRANULARITY_FLAGS}
    has_bias = read_flag(config, "qkv_bias" if "qkv_bias" in config else "attention_bias")
    translated.pop("qkv_bias", None)
    translated["attention_bias"] = has_bias
    translated.setdefault("use_qk_norm", True)
    if config["model_type"] != "qwen3" and translated.get("head_dim") is None:
        # Qwen2's and Qwen3-MoE's default; a dense Qwen3 config without the field means 128.
        translated["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    model_type = MODEL_TYPES[config["model_type"]]
    return (
        translated
        | gate.to_fields()
        | {
            "model_type": model_type,
            "architectures": [ARCHITECTURES[model_type]],
        }
    )


def _true_flags(config: Mapping[str, Any]) -> list[Granularity]:
    return [granularity for flag, granularity in GRANULARITY_FLAGS.items() if read_flag(config, flag)]
