"""The linear layers that make gate logits, and how their gate rows start.

They are classes of their own because transformers initialises a model outside its own package leaf by leaf: a layer
without parameters of its own, such as the attention layer, is never asked.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gated_serving.attention import AttentionShape, GateConfig, init_gate_rows, init_packed_rows


class QueryGateProjection(nn.Linear):
    """``q_proj`` with the gate's rows packed among the queries': ``[..., H]`` to ``[..., N*D + R]``."""

    def __init__(self, gate: GateConfig, shape: AttentionShape, *, bias: bool) -> None:
        super().__init__(shape.hidden_size, gate.num_query_rows(shape), bias=bias)
        self.gate = gate
        self.attention_shape = shape


class GateProjection(nn.Linear):
    """``g_proj``, a gate projection beside ``q_proj``: ``[..., H]`` to ``[..., R]``."""

    def __init__(self, gate: GateConfig, shape: AttentionShape) -> None:
        super().__init__(shape.hidden_size, gate.num_gate_rows(shape), bias=gate.bias)
        self.gate = gate


class ConstantGate(nn.Module):
    """The logits of a gate that does not look at its input, ``[gate heads, W]`` (Table 4, input-independent)."""

    def __init__(self, gate: GateConfig, shape: AttentionShape) -> None:
        super().__init__()
        self.gate = gate
        self.weight = nn.Parameter(torch.full((gate.num_gate_heads(shape), gate.gate_width(shape)), gate.init_bias))

    def forward(self) -> Tensor:
        """The logits, the same for every token."""
        return self.weight


@torch.no_grad()
def init_gate(module: nn.Module, *, initializer_range: float) -> None:
    """Starts the gate as its config says (``gate_init_scale``, ``gate_init_bias``), in place.

    To be called for every module after the model family's own initialisation. Modules without a gate and parameters
    that transformers has just loaded from a checkpoint are left alone.
    """
    if not isinstance(module, QueryGateProjection | GateProjection | ConstantGate) or _is_loaded(module.weight):
        return
    gate = module.gate
    if isinstance(module, QueryGateProjection):
        init_packed_rows(module.weight, module.bias, gate, module.attention_shape, initializer_range=initializer_range)
    elif isinstance(module, GateProjection):
        init_gate_rows(module.weight, gate, initializer_range=initializer_range)
        if module.bias is not None:
            module.bias.fill_(gate.init_bias)
    else:
        module.weight.fill_(gate.init_bias)


def _is_loaded(parameter: Tensor) -> bool:
    return getattr(parameter, "_is_hf_initialized", False)
