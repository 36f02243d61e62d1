"""The networks written layer by layer from the paper's Figure 2 and the formulas it names: slow, and meant to be read.

Tests compare ``networks.py`` with this. Every function reads a ``state_dict`` by the names the networks give their
parameters. Legend: ``B`` batch, ``I`` input size, ``W`` width, ``A`` action size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

Parameters = Mapping[str, Tensor]


def reference_trunk(x: Tensor, parameters: Parameters, *, depth: int) -> Tensor:
    """Runs the trunk: an input layer, then ``depth`` layers with a residual around every four.

    Args:
        x: ``[B, I]``.
        parameters: Of a ``ResidualTrunk``.
        depth: Layers after the input layer.

    Returns:
        ``[B, W]``.
    """
    x = _layer(x, parameters, "input")
    residual = x
    for number in range(depth):
        block, layer = divmod(number, 4)
        x = _layer(x, parameters, f"blocks.{block}.{layer}")
        if layer == 3:
            x = x + residual
            residual = x
    return x


def reference_actor(x: Tensor, parameters: Parameters, *, depth: int) -> tuple[Tensor, Tensor]:
    """Runs the actor: two linear heads, the second squashed from (-1, 1) to [-5, 2].

    Args:
        x: ``[B, I]``.
        parameters: Of a ``GaussianActor``.
        depth: Of its trunk.

    Returns:
        Mean and log standard deviation, both ``[B, A]``.
    """
    trunk = {name.removeprefix("trunk."): value for name, value in parameters.items() if name.startswith("trunk.")}
    hidden = reference_trunk(x, trunk, depth=depth)
    mean = hidden @ parameters["mean.weight"].T + parameters["mean.bias"]
    share = (torch.tanh(hidden @ parameters["log_std.weight"].T + parameters["log_std.bias"]) + 1) / 2
    return mean, -5 + share * 7


def reference_log_prob(mean: Tensor, log_std: Tensor, unsquashed: Tensor) -> Tensor:
    """Log-density of ``tanh(unsquashed)`` by the change of variables, action component by component.

    ``log pi(a) = sum_i log N(u_i; mean_i, std_i) - log(1 - tanh(u_i)^2)`` (arXiv 1812.05905, appendix C).

    Args:
        mean: ``[B, A]``.
        log_std: ``[B, A]``.
        unsquashed: The action before tanh, ``[B, A]``.

    Returns:
        ``[B]``.
    """
    total = torch.zeros_like(mean[:, 0])
    for component in range(mean.shape[1]):
        u, std = unsquashed[:, component], torch.exp(log_std[:, component])
        density = torch.exp(-(((u - mean[:, component]) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))
        total = total + torch.log(density) - torch.log(1 - torch.tanh(u) ** 2)
    return total


def _layer(x: Tensor, parameters: Parameters, name: str) -> Tensor:
    """Dense, LayerNorm with epsilon 1e-6, and swish(z) = z * sigmoid(z)."""
    z = x @ parameters[f"{name}.linear.weight"].T + parameters[f"{name}.linear.bias"]
    mean = z.mean(1, keepdim=True)
    variance = ((z - mean) ** 2).mean(1, keepdim=True)
    z = (z - mean) / torch.sqrt(variance + 1e-6)
    z = z * parameters[f"{name}.norm.weight"] + parameters[f"{name}.norm.bias"]
    return z / (1 + torch.exp(-z))
