"""Shifts and scales a policy's input by fixed statistics of the first, random steps.

Legend: ``B`` batch, ``I`` input size (observation and goal), ``O`` observation size, ``G`` goal size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

SMALLEST_STD = 1e-3
"""Numbers that hardly vary are not blown up beyond this."""


class InputNormalizer(nn.Module):
    """``(x - mean) / std`` for the actor's input; its two parts serve the critic. It changes nothing until it is set.

    A deviation from the paper, whose networks take inputs as they are; fixed, because statistics that move would make
    every representation that is learned so far mean something else.

    Args:
        observation_size: O.
        goal_size: G.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, observation_size: int, goal_size: int) -> None:
        super().__init__()
        self.observation_size = observation_size
        self.register_buffer("mean", torch.zeros(observation_size + goal_size))
        self.register_buffer("std", torch.ones(observation_size + goal_size))

    @torch.no_grad()
    def set_from(self, observations: npt.NDArray[np.float32], goals: npt.NDArray[np.float32]) -> None:
        """Takes the statistics of these observations [any, O] and goals [any, G], in float64."""
        parts = [np.asarray(part, dtype=np.float64).reshape(-1, part.shape[-1]) for part in (observations, goals)]
        mean = np.concatenate([part.mean(0) for part in parts])
        std = np.concatenate([part.std(0) for part in parts]).clip(SMALLEST_STD)
        self.mean.copy_(torch.from_numpy(mean))
        self.std.copy_(torch.from_numpy(std))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the actor's input ``[B, I]``."""
        return (x - self.mean) / self.std

    def observation(self, x: Tensor) -> Tensor:
        """Normalises observations ``[B, O]``."""
        return (x - self.mean[: self.observation_size]) / self.std[: self.observation_size]

    def goal(self, x: Tensor) -> Tensor:
        """Normalises goals ``[B, G]``."""
        return (x - self.mean[self.observation_size :]) / self.std[self.observation_size :]
