"""How a gate starts."""

from __future__ import annotations

import torch
from torch import Tensor

from gated_serving.attention.config import AttentionShape, GateConfig
from gated_serving.attention.packing import join_rows, split_rows


@torch.no_grad()
def init_gate_rows(weight: Tensor, gate: GateConfig, *, initializer_range: float) -> None:
    """Draws a separate gate projection's weight ``[R, H]`` in place from N(0, (init_scale * initializer_range)^2)."""
    weight.normal_(mean=0.0, std=gate.init_scale * initializer_range)


@torch.no_grad()
def init_packed_rows(
    weight: Tensor, bias: Tensor | None, gate: GateConfig, shape: AttentionShape, *, initializer_range: float
) -> None:
    """Redraws only the gate's rows of a packed ``q_proj``, in place.

    Args:
        weight: ``[N*D + R, H]``, already initialised; the queries' rows keep their values.
        bias: ``[N*D + R]`` or None; its gate rows become ``gate.init_bias``.
        gate: The gate, packed.
        shape: The layer's sizes.
        initializer_range: The model's standard deviation.
    """
    queries, gates = split_rows(weight, gate, shape)
    gates = torch.empty_like(gates)
    init_gate_rows(gates, gate, initializer_range=initializer_range)
    weight.copy_(join_rows(queries, gates, gate, shape))
    if bias is not None:
        queries, gates = split_rows(bias, gate, shape)
        bias.copy_(join_rows(queries, torch.full_like(gates, gate.init_bias), gate, shape))
