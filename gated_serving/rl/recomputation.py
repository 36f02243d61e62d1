"""Activation checkpointing of residual blocks: runs them without keeping activations and again in the backward pass.

``torch.utils.checkpoint`` does this on any device, and is used on a GPU. On a CPU it saves next to nothing with glibc's
allocator: torch asks for aligned blocks, a freed block is too short for the next aligned request of the same size, and
the activations of every layer, though freed, stay in the process (measured at depth 256, batch 1,024, width 256: 63 MB
alive, 985 MB resident). Giving large blocks back at once instead, by ``mallopt``, cures that and costs 70% in time. So
on a CPU a run of blocks is one autograd function with a workspace that is allocated once.

Legend: ``B`` batch, ``W`` width, ``K`` blocks in the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

LAYER_PARAMETERS = 4
"""Weight and bias of the Dense layer, scale and shift of the norm."""


class Workspace:
    """Memory for the activations of one run of blocks at a time: each block's input and its layers' products.

    It holds nothing between two calls, so all runs of a network share one.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, ...], list[Tensor]] = {}

    def take(self, count: int, like: Tensor) -> list[Tensor]:
        """``count`` tensors of the shape, type and device of ``like``, with whatever is in them."""
        buffers = self._buffers.get(tuple(like.shape), [])
        if len(buffers) < count or buffers[0].dtype != like.dtype:
            # Only the last shape is kept: evaluation and acting go without gradients and never come here.
            buffers = [like.new_empty(like.shape) for _ in range(count)]
            self._buffers = {tuple(like.shape): buffers}
        return buffers[:count]


def run_recomputed(x: Tensor, blocks: Sequence[nn.Sequential], workspace: Workspace) -> Tensor:
    """Runs blocks, keeping only their input for the backward pass.

    Args:
        x: ``[B, W]``.
        blocks: K blocks of layers, each with a ``linear`` and a ``norm`` (a LayerNorm) followed by swish; a block's
            input is added to its output.
        workspace: Used on a CPU.

    Returns:
        ``[B, W]``.
    """
    if x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return run_checkpointed(x, blocks)
    layers: list[Any] = [layer for block in blocks for layer in block]
    parameters = [
        parameter
        for layer in layers
        for parameter in (layer.linear.weight, layer.linear.bias, layer.norm.weight, layer.norm.bias)
    ]
    result = _RecomputedRun.apply(x, workspace, len(layers) // len(blocks), layers[0].norm.eps, *parameters)
    assert isinstance(result, Tensor)
    return result


def run_checkpointed(x: Tensor, blocks: Sequence[nn.Sequential]) -> Tensor:
    """The same through torch's own checkpointing, on any device and under autocast: ``[B, W] -> [B, W]``."""
    # Nothing in a block is random, so there is no random state to keep for the second run.
    return checkpoint(_run, x, blocks, use_reentrant=False, preserve_rng_state=False)


def _run(x: Tensor, blocks: Sequence[nn.Sequential]) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


class _RecomputedRun(torch.autograd.Function):
    """K blocks: in the backward pass their products are computed again, and the rest from the products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, workspace: Workspace, interval: int, eps: float, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.workspace, ctx.interval, ctx.eps = workspace, interval, eps
        output = x.clone()
        (product,) = workspace.take(1, x)
        hidden = output
        for layer, (weight, bias, scale, shift) in enumerate(_by_layer(parameters), 1):
            torch.addmm(bias, hidden, weight.T, out=product)
            hidden = F.silu(F.layer_norm(product, scale.shape, scale, shift, eps), inplace=True)
            if layer % interval == 0:
                output += hidden
                hidden = output
        return output

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the parameter's name
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        layers, interval, eps = _by_layer(parameters), ctx.interval, ctx.eps
        needed = _by_layer(ctx.needs_input_grad[4:])
        inputs, products, (hidden, scratch) = _recompute(x, layers, interval, eps, ctx.workspace)
        gradients: list[Tensor | None] = []
        grad_block, grad = grad_outputs[0], grad_outputs[0]
        normed, mean, rstd = _normalize(products[-1], layers[-1], eps)
        for layer in reversed(range(len(layers))):
            weight, _, scale, shift = layers[layer]
            needs_weight, needs_bias, *needs_norm = needed[layer]
            torch.ops.aten.silu_backward.grad_input(grad, normed, grad_input=scratch)
            grad_product, grad_scale, grad_shift = torch.ops.aten.native_layer_norm_backward(
                scratch, products[layer], scale.shape, mean, rstd, scale, shift, [True, *needs_norm]
            )
            if layer > 0:
                normed, mean, rstd = _normalize(products[layer - 1], layers[layer - 1], eps)
            is_first = layer % interval == 0
            grad_weight = None
            if needs_weight:
                layer_input = inputs[layer // interval] if is_first else torch.ops.aten.silu.out(normed, out=hidden)
                grad_weight = grad_product.T @ layer_input
            grad_bias = grad_product.sum(0) if needs_bias else None
            gradients += [grad_shift, grad_scale, grad_bias, grad_weight]
            if is_first:
                grad_block = grad = torch.addmm(grad_block, grad_product, weight)
            else:
                grad = torch.mm(grad_product, weight, out=hidden)  # the weight's gradient has read it
        return (grad, None, None, None, *reversed(gradients))


def _recompute(
    x: Tensor, layers: list[tuple[Tensor, ...]], interval: int, eps: float, workspace: Workspace
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The input of every block, every layer's product before its norm, and two tensors to work in."""
    buffers = workspace.take(len(layers) + len(layers) // interval + 2, x)
    products, inputs, scratch = buffers[: len(layers)], buffers[len(layers) : -2], buffers[-2:]
    inputs[0].copy_(x)
    hidden = inputs[0]
    for layer, (weight, bias, scale, shift) in enumerate(layers):
        torch.addmm(bias, hidden, weight.T, out=products[layer])
        if layer + 1 == len(layers):
            break  # what follows the last product is not needed: its gradient comes from the product
        hidden = F.silu(F.layer_norm(products[layer], scale.shape, scale, shift, eps), inplace=True)
        block, position = divmod(layer, interval)
        if position + 1 == interval:
            hidden = torch.add(inputs[block], hidden, out=inputs[block + 1])
    return inputs, products, scratch


def _normalize(product: Tensor, layer: tuple[Tensor, ...], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normed product, and the mean and the inverse standard deviation that the norm's gradient needs."""
    _, _, scale, shift = layer
    return torch.native_layer_norm(product, scale.shape, scale, shift, eps)


def _by_layer(values: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [tuple(values[start : start + LAYER_PARAMETERS]) for start in range(0, len(values), LAYER_PARAMETERS)]
