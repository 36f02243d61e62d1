"""Which tensors a Qwen-like checkpoint must hold, and in which shapes.

The table is written out by hand rather than taken from a model made on the meta device: it needs neither torch nor
transformers, so the doctor answers at once; a test holds it against the model classes.

Legend: N query heads, K key/value heads, D head dim, R gate rows, H hidden size, F feed-forward size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gated_serving.attention.config import AttentionShape, GateConfig, GateInput
from gated_serving.llm.checkpoints.errors import BrokenConfig

Shape = tuple[int, ...]
MAX_LAYERS = 10_000
MAX_EXPERTS = 200_000  # of all layers together


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture of experts of a model.

    Args:
        count: Experts a layer.
        size: Feed-forward size of one expert.
        step: Every ``step``-th layer has experts, the others a plain MLP.
        dense_layers: Layers that have a plain MLP whatever the step says.
    """

    count: int
    size: int
    step: int = 1
    dense_layers: tuple[int, ...] = ()

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of a plain MLP."""
        return self.count > 0 and layer not in self.dense_layers and (layer + 1) % self.step == 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All that the shapes of a checkpoint follow from.

    Args:
        shape: Sizes of an attention layer.
        num_layers: Decoder layers.
        vocab_size: V.
        intermediate_size: F of a plain MLP.
        tied: Whether the embedding is the head too.
        qkv_bias: Whether q, k and v have a bias.
        output_bias: Whether o has one.
        qk_norm: Whether queries and keys are normalised.
        gate: The gate, or None.
        experts: The mixture of experts, or None.
        attention_layers: Layers with softmax attention; None means all.
        is_complete: Whether the table names every tensor, so that others are too many.
    """

    shape: AttentionShape
    num_layers: int
    vocab_size: int
    intermediate_size: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    gate: GateConfig | None = None
    experts: Experts | None = None
    attention_layers: tuple[int, ...] | None = None
    is_complete: bool = True


def expected_tensors(layout: Layout) -> dict[str, Shape]:
    """Name and shape of every tensor that the checkpoint must hold.

    A tied head is not among them; see ``optional_tensors``.
    """
    return dict(_tensors(layout))


def optional_tensors(layout: Layout) -> dict[str, Shape]:
    """Tensors that may be there too: a tied model's head is the embedding again, and is not used."""
    return {"lm_head.weight": (layout.vocab_size, layout.shape.hidden_size)} if layout.tied else {}


def is_derived(name: str) -> bool:
    """Whether a tensor is computed from the config by every implementation, and its stored value is ignored."""
    return name.endswith(("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"))


def read_size(config: Mapping[str, Any], field: str, *, default: int | None = None, maximum: int | None = None) -> int:
    """A whole number of at least 1 from config.json.

    Raises:
        BrokenConfig: The field is absent without a default, or is no whole number from 1 to ``maximum``.
    """
    value = config.get(field, default)
    if value is None:
        if default is None:
            raise BrokenConfig(f"config.json: {field} is missing")
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BrokenConfig(f"config.json: {field}={value!r}: must be a whole number of at least 1")
    if maximum is not None and value > maximum:
        raise BrokenConfig(f"config.json: {field}={value!r}: must be at most {maximum}")
    return value


def read_num_layers(config: Mapping[str, Any]) -> int:
    """``num_hidden_layers``, of a size that a model can have: every tensor of every layer is gone through.

    Raises:
        BrokenConfig: It is absent or makes no sense.
    """
    return read_size(config, "num_hidden_layers", maximum=MAX_LAYERS)


def read_shape(config: Mapping[str, Any], *, default_head_dim: int | None) -> AttentionShape:
    """The attention's sizes from config.json.

    Args:
        config: The whole config.
        default_head_dim: What an absent ``head_dim`` means; None means ``hidden_size / num_attention_heads``.

    Raises:
        BrokenConfig: A field is absent or makes no sense.
    """
    hidden_size = read_size(config, "hidden_size")
    num_heads = read_size(config, "num_attention_heads")
    try:
        return AttentionShape(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=read_size(config, "num_key_value_heads", default=num_heads),
            head_dim=read_size(config, "head_dim", default=default_head_dim or hidden_size // num_heads),
        )
    except ValueError as error:
        raise BrokenConfig(f"config.json: {error}") from error


def read_experts(config: Mapping[str, Any]) -> Experts:
    """The mixture of experts from a ``*_moe`` config.json.

    Raises:
        BrokenConfig: A field is absent or makes no sense.
    """
    dense_layers = config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or not all(isinstance(layer, int) for layer in dense_layers):
        raise BrokenConfig(f"config.json: mlp_only_layers={dense_layers!r}: must be a list of layer numbers")
    return Experts(
        # transformers writes the one name and reads both.
        count=read_size(
            config,
            "num_local_experts" if "num_local_experts" in config else "num_experts",
            maximum=MAX_EXPERTS // read_num_layers(config),
        ),
        size=read_size(config, "moe_intermediate_size"),
        step=read_size(config, "decoder_sparse_step", default=1),
        dense_layers=tuple(dense_layers),
    )


def _tensors(layout: Layout) -> Iterator[tuple[str, Shape]]:
    hidden_size = layout.shape.hidden_size
    yield "model.embed_tokens.weight", (layout.vocab_size, hidden_size)
    for layer in range(layout.num_layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden_size,)
        if layout.attention_layers is None or layer in layout.attention_layers:
            yield from _attention_tensors(at + "self_attn.", layout)
        yield at + "post_attention_layernorm.weight", (hidden_size,)
        if layout.is_complete:
            yield from _mlp_tensors(at + "mlp.", layer, layout)
    yield "model.norm.weight", (hidden_size,)
    if not layout.tied:
        yield "lm_head.weight", (layout.vocab_size, hidden_size)


def _attention_tensors(at: str, layout: Layout) -> Iterator[tuple[str, Shape]]:
    gate, shape = layout.gate, layout.shape
    query_rows = gate.num_query_rows(shape) if gate else shape.num_query_rows
    key_rows = shape.num_kv_heads * shape.head_dim
    for name, rows, columns, has_bias in (
        ("q_proj", query_rows, shape.hidden_size, layout.qkv_bias),
        ("k_proj", key_rows, shape.hidden_size, layout.qkv_bias),
        ("v_proj", key_rows, shape.hidden_size, layout.qkv_bias),
        ("o_proj", shape.hidden_size, shape.num_query_rows, layout.output_bias),
    ):
        yield f"{at}{name}.weight", (rows, columns)
        if has_bias:
            yield f"{at}{name}.bias", (rows,)
    if layout.qk_norm:
        yield f"{at}q_norm.weight", (shape.head_dim,)
        yield f"{at}k_norm.weight", (shape.head_dim,)
    if gate and not gate.is_packed:
        if gate.input is GateInput.CONSTANT:
            yield f"{at}g_const.weight", (gate.num_gate_heads(shape), gate.gate_width(shape))
            return
        yield f"{at}g_proj.weight", (gate.num_gate_rows(shape), shape.hidden_size)
        if gate.bias:
            yield f"{at}g_proj.bias", (gate.num_gate_rows(shape),)


def _mlp_tensors(at: str, layer: int, layout: Layout) -> Iterator[tuple[str, Shape]]:
    hidden_size, experts = layout.shape.hidden_size, layout.experts
    if experts is None or not experts.has_experts(layer):
        blocks, size = [at], layout.intermediate_size
    else:
        yield at + "gate.weight", (experts.count, hidden_size)
        blocks, size = [f"{at}experts.{expert}." for expert in range(experts.count)], experts.size
    for block in blocks:
        yield block + "gate_proj.weight", (size, hidden_size)
        yield block + "up_proj.weight", (size, hidden_size)
        yield block + "down_proj.weight", (hidden_size, size)
