"""The gate written as the paper says it, one token and one head at a time: slow, and meant to be read.

Tests compare ``gate.py`` and every model with this. Legend: T tokens, N gate heads, W gate width, D head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gated_serving.attention.config import Activation, AttentionShape, GateConfig, Operation, Packing, Sharing


def reference_gate(gated: Tensor, logits: Tensor, gate: GateConfig) -> Tensor:
    """Gates Y head by head.

    Args:
        gated: Y, ``[T, N, D]``.
        logits: ``[T, N, W]``.
        gate: The gate.

    Returns:
        ``[T, N, D]``.
    """
    num_tokens, num_heads, _ = gated.shape
    rows: list[Tensor] = []
    for token in range(num_tokens):
        scores = [_score(logits[token, head], gate.activation) for head in range(num_heads)]
        if gate.sharing is Sharing.SHARED:
            mean = torch.stack(scores).sum(0) / num_heads
            scores = [mean] * num_heads
        if gate.top_k_share is not None:
            distinct = scores[:1] if gate.sharing is Sharing.SHARED else scores
            ranked = torch.cat(distinct).sort(descending=True).values
            smallest_kept = ranked[math.ceil(gate.top_k_share * len(ranked)) - 1]
            scores = [torch.where(score >= smallest_kept, score, 0.0) for score in scores]
        for head in range(num_heads):
            y = gated[token, head]
            rows.append(y + scores[head] if gate.operation is Operation.ADD else y * scores[head])
    return torch.stack(rows).view_as(gated)


def reference_split(packed: Tensor, gate: GateConfig, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Finds the queries' and the gate's rows of a packed ``q_proj`` by walking over it block by block.

    Args:
        packed: ``[rows, ...]``.
        gate: The gate, packed.
        shape: The layer's sizes.

    Returns:
        Queries ``[N*D, ...]`` and gate rows ``[gate heads * W, ...]``, in head order.
    """
    num_blocks = shape.num_kv_heads if gate.packing is Packing.KV_GROUP else shape.num_heads
    queries_in_block = shape.num_heads // num_blocks * shape.head_dim
    gates_in_block = gate.num_gate_heads(shape) // num_blocks * gate.gate_width(shape)
    queries: list[Tensor] = []
    gates: list[Tensor] = []
    row = 0
    for _ in range(num_blocks):
        queries.append(packed[row : row + queries_in_block])
        row += queries_in_block
        gates.append(packed[row : row + gates_in_block])
        row += gates_in_block
    return torch.cat(queries), torch.cat(gates)


def _score(logit: Tensor, activation: Activation) -> Tensor:
    sigmoid = 1 / (1 + torch.exp(-logit))
    if activation is Activation.SIGMOID:
        return sigmoid
    if activation is Activation.SILU:
        return logit * sigmoid
    if activation is Activation.SOFTPLUS:
        return torch.log(1 + torch.exp(logit))
    return 0.5 + 0.5 * sigmoid
