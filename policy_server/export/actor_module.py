"""Any actor as one torch module with named inputs and outputs, ready to be traced and to be its own float64 reference.

Legend: B batch, A action values, C choices in all (the sum over several discrete actions).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from policy_server.export.errors import ExportError, UnreadableSourceError
from policy_server.export.policy import Arrays
from policy_server.manifest import ActionSpace, ObservationField, Outputs


class Normalizer(nn.Module):
    """(x - mean) / std, clipped if asked for; x is [B, size].

    The mean is subtracted in two parts: in float32 alone, a mean that is large beside the standard deviation would cost
    most digits of what is left.
    """

    coarse_mean: Tensor
    fine_mean: Tensor
    std: Tensor

    def __init__(self, mean: ArrayLike, std: ArrayLike, *, clip: float | None = None) -> None:
        super().__init__()
        exact = np.asarray(mean, np.float64).reshape(-1)
        coarse = exact.astype(np.float32)
        self.register_buffer("coarse_mean", torch.as_tensor(coarse.astype(np.float64)))
        self.register_buffer("fine_mean", torch.as_tensor(exact - coarse))
        self.register_buffer("std", torch.as_tensor(np.asarray(std, np.float64).reshape(-1)))
        self.clip = clip

    def forward(self, x: Tensor) -> Tensor:
        """Normalises [B, size]."""
        scaled = ((x - self.coarse_mean) - self.fine_mean) / self.std
        return scaled if self.clip is None else scaled.clamp(-self.clip, self.clip)


class ContinuousHead(nn.Module):
    """From the network's (mean, log_std) or (action,) to the action inside its bounds.

    Args:
        space: The action's shape and bounds.
        squash: "tanh" squashes here, "done" if the network gives values in [-1, 1] already, None for values in the
            action's own unit. The former two are scaled to the bounds.
    """

    low: Tensor
    high: Tensor

    def __init__(self, space: ActionSpace, squash: str | None) -> None:
        super().__init__()
        low, high = (_limits(side, space.size, absent) for side, absent in ((space.low, -np.inf), (space.high, np.inf)))
        if squash is not None and not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ExportError("a squashed action needs finite bounds on every value")
        self.register_buffer("low", torch.as_tensor(low))
        self.register_buffer("high", torch.as_tensor(high))
        self.squash = squash
        self.shape = space.shape
        self.is_bounded = bool(np.isfinite(low).any() or np.isfinite(high).any())

    def forward(self, parameters: tuple[Tensor, ...], noise: Tensor | None) -> Tensor:
        """The action, [B, *shape]."""
        raw = parameters[0].flatten(1)
        if noise is not None:
            raw = raw + parameters[1].exp() * noise
        if self.squash is not None:
            half, centre = (self.high - self.low) / 2, (self.high + self.low) / 2
            raw = (torch.tanh(raw) if self.squash == "tanh" else raw) * half + centre
        if self.is_bounded:
            raw = torch.maximum(torch.minimum(raw, self.high), self.low)
        return raw if len(self.shape) == 1 else raw.reshape(-1, *self.shape)


class DiscreteHead(nn.Module):
    """From logits or values [B, C] to the best choice, or with Gumbel noise a sampled one."""

    def __init__(self, space: ActionSpace) -> None:
        super().__init__()
        assert space.num_choices is not None
        self.num_choices = space.num_choices
        self.shape = space.shape

    def forward(self, parameters: tuple[Tensor, ...], noise: Tensor | None) -> Tensor:
        """The action, [B, *shape] int64."""
        scores = parameters[0] if noise is None else parameters[0] + noise
        chosen = [part.argmax(dim=1) for part in torch.split(scores, list(self.num_choices), dim=1)]
        return torch.stack(chosen, dim=1).reshape(-1, *self.shape) if self.shape else chosen[0]


class ActorModule(nn.Module):
    """Network and head together: ``forward(*fields, noise)`` gives ``(action, *parameters)``.

    Args:
        network: Takes the fields in order, gives a tuple of tensors.
        head: Makes the action out of them.
        outputs: With ``distribution``, noise is the last input and the parameters are outputs too.
    """

    def __init__(self, network: nn.Module, head: nn.Module, outputs: Outputs) -> None:
        super().__init__()
        self.network = network
        self.head = head
        self.outputs = outputs

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Takes the fields and, if sampled, the noise."""
        sampled = self.outputs == Outputs.DISTRIBUTION
        parameters: tuple[Tensor, ...] = self.network(*(inputs[:-1] if sampled else inputs))
        action: Tensor = self.head(parameters, inputs[-1] if sampled else None)
        return (action, *parameters) if sampled else (action,)


def float64_reference(
    network: nn.Module, head: nn.Module, fields: tuple[ObservationField, ...], parameter_names: tuple[str, ...]
) -> Callable[[Arrays], Arrays]:
    """The same network and head in float64, run by torch itself.

    Args:
        network: See ``ActorModule``; copied.
        head: See ``ActorModule``; copied.
        fields: The inputs in order.
        parameter_names: What the network's outputs are called; given beside ``action``.
    """
    exact_network, exact_head = copy.deepcopy(network).double().eval(), copy.deepcopy(head).double().eval()

    def run(inputs: Arrays) -> Arrays:
        given = [_as_float64(inputs[field.name]) for field in fields]
        noise = torch.as_tensor(np.asarray(inputs["noise"], np.float64)) if "noise" in inputs else None
        try:
            with torch.no_grad():
                parameters: tuple[Tensor, ...] = exact_network(*given)
                action: Tensor = exact_head(parameters, noise)
        except Exception as error:  # the network may be the user's own code
            raise ExportError(
                f"torch cannot run this module in float64 on a batch of {len(given[0])}: {error}; it must take any "
                "batch, and make its constants in its inputs' dtype"
            ) from error
        named = zip(parameter_names, parameters, strict=False)
        return {"action": action.detach().numpy(), **{name: value.detach().numpy() for name, value in named}}

    return run


def check_weights(module: nn.Module, origin: str) -> int:
    """Counts the parameters.

    Raises:
        UnreadableSourceError: One holds NaN or infinity.
    """
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UnreadableSourceError(
                f"{origin}: {name} holds NaN or infinity; the training diverged, take an earlier checkpoint"
            )
    return sum(parameter.numel() for parameter in module.parameters())


def _as_float64(values: NDArray[np.generic]) -> Tensor:
    return torch.as_tensor(np.asarray(values, np.int64 if values.dtype.kind in "iub" else np.float64))


def _limits(side: tuple[float | None, ...] | None, size: int, absent: float) -> NDArray[np.float64]:
    return np.array([absent if bound is None else bound for bound in side or [None] * size], np.float64)
