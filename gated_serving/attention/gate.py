"""The gate as the models run it: plain tensor operations that torch.compile fuses on CPU and GPU.

Legend: B batch, T tokens, N gate heads, W gate width, D width of the gated tensor's heads (W or, headwise, any).

There is no hand-written kernel: sigmoid, product and the cast fuse into their neighbours under torch.compile, so a
kernel of our own would have to read and write Y once more than the fused form does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from gated_serving.attention.config import Activation, GateConfig, Operation, Sharing


def gate_scores(logits: Tensor, gate: GateConfig) -> Tensor:
    """Turns gate logits into scores: activation, then the mean over heads if shared, then the top-k share.

    Args:
        logits: ``[..., N, W]``; the computation stays in their dtype, as in the released models.
        gate: The gate.

    Returns:
        ``[..., N, W]``, or ``[..., 1, W]`` when the heads share their gate.
    """
    scores = _activate(logits, gate.activation)
    if gate.sharing is Sharing.SHARED:
        scores = scores.mean(dim=-2, keepdim=True)
    if gate.top_k_share is not None:
        scores = _keep_largest(scores, gate.top_k_share)
    return scores


def apply_gate(gated: Tensor, logits: Tensor, gate: GateConfig) -> Tensor:
    """``Y * act(logits)``, or ``Y + act(logits)`` (arXiv 2505.06708, equation 5 and Table 1).

    Args:
        gated: Y, ``[..., N, D]``; at G5 ``[..., 1, H]``.
        logits: ``[..., N, W]`` or, for a constant gate, ``[N, W]``; W is D or, headwise, 1.
        gate: The gate.

    Returns:
        The gated tensor, in the shape and dtype of ``gated``.
    """
    scores = gate_scores(logits, gate).to(gated.dtype)
    return gated + scores if gate.operation is Operation.ADD else gated * scores


def _activate(logits: Tensor, activation: Activation) -> Tensor:
    if activation is Activation.SIGMOID:
        return torch.sigmoid(logits)
    if activation is Activation.SILU:
        return F.silu(logits)
    if activation is Activation.SOFTPLUS:
        return F.softplus(logits)
    return 0.5 + 0.5 * torch.sigmoid(logits)


def _keep_largest(scores: Tensor, share: float) -> Tensor:
    """Keeps a token's largest ``ceil(share * N * W)`` scores, and any that tie with the last one kept."""
    flat = scores.flatten(-2)
    num_kept = math.ceil(share * flat.shape[-1])
    if num_kept == flat.shape[-1]:
        return scores
    threshold = flat.topk(num_kept, dim=-1).values[..., -1:]
    return torch.where(flat >= threshold, flat, torch.zeros_like(flat)).view_as(scores)
