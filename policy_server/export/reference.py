"""The checkpoint's actor once more, as plain as it can be said: torch in float64, straight from the file.

It shares nothing with the graph but the checkpoint's reader: what is compared with it was written another way.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from policy_server.export.checkpoint import LAYERS_PER_BLOCK, Checkpoint
from policy_server.export.policy import Arrays


def residual_actor(checkpoint: Checkpoint, low: Tensor, high: Tensor, inputs: Arrays) -> Arrays:
    """One forward pass; a tensor is read when its layer is reached.

    Architecture: arXiv 2503.14858: linear, LayerNorm and swish throughout, blocks of four with a residual connection.

    Args:
        checkpoint: Where the weights are.
        low: Lower bounds of the action, [A].
        high: Upper bounds, [A].
        inputs: The fields, [B, *shape], and ``noise`` [B, A] if the action is to be sampled.

    Returns:
        ``action`` [B, *shape], ``mean`` and ``log_std`` [B, A], in float64.
    """
    record, actor = checkpoint.record, checkpoint.record.actor
    tensors = checkpoint.tensors()

    def take() -> Tensor:
        return torch.as_tensor(next(tensors)[1]).double()

    def layer(x: Tensor) -> Tensor:
        x = F.linear(x, take(), take())
        return F.silu(F.layer_norm(x, (actor.width,), take(), take(), actor.layer_norm_eps))

    given = [torch.as_tensor(np.asarray(inputs[field.name], np.float64)) for field in record.observation_fields]
    x = torch.cat([one.reshape(len(one), -1) for one in given], dim=1)
    if checkpoint.has_normalizer:
        x = (x - take()) / take()
    x = layer(x)
    for _ in range(actor.depth // LAYERS_PER_BLOCK):
        skip = x
        for _ in range(LAYERS_PER_BLOCK):
            x = layer(x)
        x = x + skip
    mean, log_std = F.linear(x, take(), take()), torch.tanh(F.linear(x, take(), take()))
    log_std = actor.log_std_min + 0.5 * (actor.log_std_max - actor.log_std_min) * (log_std + 1)
    noise = torch.as_tensor(np.asarray(inputs.get("noise", np.zeros(mean.shape)), np.float64))
    action = low + (torch.tanh(mean + log_std.exp() * noise) + 1) * (high - low) / 2
    shaped = action.reshape(-1, *record.action.shape)
    return {"action": shaped.numpy(), "mean": mean.numpy(), "log_std": log_std.numpy()}
