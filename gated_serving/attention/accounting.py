"""What a gate costs: parameters and floating-point operations."""

from __future__ import annotations

from gated_serving.attention.config import AttentionShape, GateConfig, GateInput


def num_gate_parameters(
    gate: GateConfig, shape: AttentionShape, *, num_layers: int, projection_bias: bool = False
) -> int:
    """Parameters that the gate adds to a model (column "Added Param" of Table 1).

    Args:
        gate: The gate.
        shape: Sizes of one attention layer.
        num_layers: Layers with such a gate.
        projection_bias: Whether ``q_proj`` has a bias, which packed gate rows then have too.
    """
    rows = gate.num_gate_rows(shape)
    if gate.input is GateInput.CONSTANT:
        return num_layers * rows
    has_bias = projection_bias if gate.is_packed else gate.bias
    return num_layers * rows * (shape.hidden_size + int(has_bias))


def num_gate_flops(gate: GateConfig, shape: AttentionShape, *, num_layers: int) -> int:
    """Floating-point operations a token that the gate adds to a forward pass.

    Counted: two a weight of the projection, one a gate value for its activation, one a gated channel for the product.
    """
    rows = gate.num_gate_rows(shape)
    projection = 0 if gate.input is GateInput.CONSTANT else 2 * rows * shape.hidden_size
    gated_channels = gate.num_gate_heads(shape) * max(gate.gate_width(shape), shape.head_dim)
    return num_layers * (projection + rows + gated_channels)


def num_attention_flops(shape: AttentionShape, *, num_layers: int, context_length: int) -> int:
    """Floating-point operations a token of scores and weighted sum over ``context_length`` cached tokens."""
    return num_layers * 4 * shape.num_query_rows * context_length
