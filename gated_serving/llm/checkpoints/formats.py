"""Which format a config.json is in, which gate it describes, and which tensors belong to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from gated_serving.attention.config import FIELD_PREFIX, GateConfig, Granularity, Packing
from gated_serving.llm.checkpoints.errors import BrokenConfig
from gated_serving.llm.checkpoints.layout import Layout, read_experts, read_num_layers, read_shape, read_size
from gated_serving.llm.models.official import (
    ARCHITECTURES,
    GRANULARITY_FLAGS,
    MODEL_TYPES,
    is_official_gated,
    official_gate,
    read_flag,
)

_FLAGS = ("tie_word_embeddings", "attention_bias", "qkv_bias", "use_qk_norm", *GRANULARITY_FLAGS)
_QWEN3_HEAD_DIM = 128
"""What transformers takes for a dense Qwen3 whose config has no ``head_dim``."""


class Format(StrEnum):
    """The formats that the doctor tells apart."""

    OFFICIAL = "official"
    """The released gated checkpoints: Qwen's own names, the gate said by flags."""
    GATED_QWEN3 = "gated_qwen3"
    GATED_QWEN3_MOE = "gated_qwen3_moe"
    QWEN3_NEXT = "qwen3_next"
    UNGATED = "ungated"
    """Nothing in config or tensor names suggests a gate, whatever the family."""
    UNKNOWN = "unknown"
    """There is a gate, or a sign of one, that this project cannot read."""


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """What config.json says.

    Args:
        format: As config.json alone has it.
        model_type: As in config.json.
        architecture: The first one named, or "".
        gate: The gate it describes, if any.
        layout: What the tensors must be; None for a family that this project has no table of.
        faults: What is wrong with the config's gate fields, one sentence each.
    """

    format: Format
    model_type: str
    architecture: str
    gate: GateConfig | None = None
    layout: Layout | None = None
    faults: tuple[str, ...] = ()


def recognise(config: Mapping[str, Any]) -> Recognised:
    """Reads a config.json.

    Raises:
        BrokenConfig: A field that every model has is absent or makes no sense.
    """
    model_type, architecture = _names(config)
    _check_values(config, is_known=model_type in (*ARCHITECTURES, *MODEL_TYPES, Format.QWEN3_NEXT))
    base = Recognised(format=Format.UNGATED, model_type=model_type, architecture=architecture)
    if model_type in ARCHITECTURES:
        form = Format(model_type)
        try:
            gate = GateConfig.from_fields(config)
            _check_bias(gate, config)
        except ValueError as error:
            return replace(base, format=form, faults=(str(error),))
        default_head_dim = _QWEN3_HEAD_DIM if form is Format.GATED_QWEN3 else None
        return replace(base, format=form, gate=gate, layout=_own_layout(config, gate, default_head_dim))
    if model_type == Format.QWEN3_NEXT:
        gate = GateConfig(granularity=Granularity.ELEMENTWISE, packing=Packing.PER_HEAD)
        return replace(base, format=Format.QWEN3_NEXT, gate=gate, layout=_qwen3_next_layout(config, gate))
    faults = _gate_faults(config)
    if is_official_gated(config):
        try:
            gate = official_gate(config)
        except ValueError as error:
            return replace(base, format=Format.OFFICIAL, faults=(str(error),))
        return replace(base, format=Format.OFFICIAL, gate=gate, layout=official_layout(config, gate), faults=faults)
    if faults:
        return replace(base, format=Format.UNKNOWN, layout=_ungated_layout(config, base), faults=faults)
    return replace(base, format=Format.UNGATED, layout=_ungated_layout(config, base))


def official_layout(config: Mapping[str, Any], gate: GateConfig | None) -> Layout:
    """The tensors of a released checkpoint: ``qkv_bias`` is a bias on o too, qk-norm is a choice."""
    is_moe = MODEL_TYPES.get(config.get("model_type", "")) == Format.GATED_QWEN3_MOE
    default_head_dim = _QWEN3_HEAD_DIM if config.get("model_type") == "qwen3" else None
    has_bias = bool(config.get("qkv_bias", config.get("attention_bias", False)))
    return _layout(
        config, gate, is_moe=is_moe, default_head_dim=default_head_dim, has_bias=has_bias,
        qk_norm=bool(config.get("use_qk_norm", True)),
    )  # fmt: skip


def stock_layout(config: Mapping[str, Any], recognised: Recognised) -> Layout | None:
    """The tensors that stock vLLM's class of that architecture asks for; None when it is none of the Qwen ones.

    vLLM's Qwen3 classes know neither the gate nor ``use_qk_norm`` nor a bias on o, and its Qwen2 class has a bias
    on q, k and v whatever the config says.
    """
    if recognised.layout is None:
        return None
    if recognised.architecture == "Qwen2ForCausalLM":
        return replace(recognised.layout, gate=None, qkv_bias=True, output_bias=False, qk_norm=False)
    if recognised.architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        has_bias = bool(config.get("attention_bias", False))
        return replace(recognised.layout, gate=None, qkv_bias=has_bias, output_bias=False, qk_norm=True)
    return None


def _names(config: Mapping[str, Any]) -> tuple[str, str]:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise BrokenConfig(f"config.json: model_type={model_type!r}: must name the model's family")
    architectures = config.get("architectures") or [""]
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise BrokenConfig(f"config.json: architectures={architectures!r}: must be a list of class names")
    return model_type, architectures[0]


def _check_values(config: Mapping[str, Any], *, is_known: bool) -> None:
    """Refuses values that loading stops at, or that Python would read as something else than was meant."""
    try:
        for field in _FLAGS if is_known else ("tie_word_embeddings",):
            read_flag(config, field)
    except ValueError as error:
        raise BrokenConfig(f"config.json: {error}") from error
    epsilon = config.get("rms_norm_eps")
    if is_known and epsilon is not None:
        is_number = isinstance(epsilon, int | float) and not isinstance(epsilon, bool)
        if not is_number or not 0 < epsilon < math.inf:
            raise BrokenConfig(f"config.json: rms_norm_eps={epsilon!r}: must be a finite number above 0")


def _check_bias(gate: GateConfig, config: Mapping[str, Any]) -> None:
    if gate.init_bias and gate.is_packed and not config.get("attention_bias"):
        raise ValueError(
            f"gate_init_bias={gate.init_bias}: the gate's rows lie in q_proj, which has no bias (attention_bias=false)"
        )


def _gate_faults(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Signs of a gate in a config that is not one of the project's own, other than the released flags."""
    faults: list[str] = []
    is_qwen = config.get("model_type") in MODEL_TYPES
    for field, value in config.items():
        if value in (False, None, 0, 0.0, "") or (field in GRANULARITY_FLAGS and is_qwen):
            continue
        if field in GRANULARITY_FLAGS:
            faults.append(f"{field}={value!r}: this gate is known for {', '.join(MODEL_TYPES)} only")
        elif is_qwen and field.startswith(FIELD_PREFIX):
            faults.append(f"{field}={value!r}: a field of {' and '.join(ARCHITECTURES)}, not of "
                          f"{config.get('model_type')}")  # fmt: skip
        elif "gate" in field and any(word in field for word in ("attn", "attention", "value", "query", "key")):
            faults.append(f"{field}={value!r}: a gate that this project does not know")
    return tuple(faults)


def _own_layout(config: Mapping[str, Any], gate: GateConfig, default_head_dim: int | None) -> Layout:
    return _layout(
        config, gate, is_moe=config["model_type"] == Format.GATED_QWEN3_MOE, default_head_dim=default_head_dim,
        has_bias=bool(config.get("attention_bias", False)), qk_norm=bool(config.get("use_qk_norm", True)),
    )  # fmt: skip


def _ungated_layout(config: Mapping[str, Any], base: Recognised) -> Layout | None:
    if base.model_type not in MODEL_TYPES:
        return None
    if any(field in config for field in ("use_qk_norm", "qkv_bias", *GRANULARITY_FLAGS)):
        return official_layout(config, None)
    if base.architecture == "Qwen2ForCausalLM" or (base.model_type == "qwen2" and not base.architecture):
        layout = _layout(config, None, is_moe=False, default_head_dim=None, has_bias=True, qk_norm=False)
        return replace(layout, output_bias=False)
    if base.architecture not in ("", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        return None  # a head of another kind, such as a classifier's
    return _layout(
        config, None, is_moe=base.model_type == "qwen3_moe",
        default_head_dim=_QWEN3_HEAD_DIM if base.model_type == "qwen3" else None,
        has_bias=bool(config.get("attention_bias", False)), qk_norm=True,
    )  # fmt: skip


def _qwen3_next_layout(config: Mapping[str, Any], gate: GateConfig) -> Layout:
    """Only the tensors around softmax attention: the rest is transformers' and vLLM's own business."""
    num_layers = read_num_layers(config)
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != num_layers):
        raise BrokenConfig(f"config.json: layer_types={kinds!r}: must be a list of {num_layers} kinds of layer")
    if kinds is None:
        interval = read_size(config, "full_attention_interval", default=4)
        kinds = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)]
    has_bias = bool(config.get("attention_bias", False))
    return Layout(
        shape=read_shape(config, default_head_dim=256),
        num_layers=num_layers,
        vocab_size=read_size(config, "vocab_size"),
        intermediate_size=0,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=True,
        gate=gate,
        attention_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention"),
        is_complete=False,
    )


def _layout(
    config: Mapping[str, Any],
    gate: GateConfig | None,
    *,
    is_moe: bool,
    default_head_dim: int | None,
    has_bias: bool,
    qk_norm: bool,
) -> Layout:
    experts = read_experts(config) if is_moe else None
    num_layers = read_num_layers(config)
    has_plain_mlp = experts is None or not all(experts.has_experts(layer) for layer in range(num_layers))
    return Layout(
        shape=read_shape(config, default_head_dim=default_head_dim),
        num_layers=num_layers,
        vocab_size=read_size(config, "vocab_size"),
        intermediate_size=read_size(config, "intermediate_size") if has_plain_mlp else 0,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=qk_norm,
        gate=gate,
        experts=experts,
    )
