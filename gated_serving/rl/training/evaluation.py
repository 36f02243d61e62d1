"""Success of a policy over whole episodes, each with a seed that no training episode has.

Legend: ``E`` environments, ``O`` observation size, ``G`` goal size, ``A`` action size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gated_serving.rl.environments import GoalVectorEnvironment
from gated_serving.rl.settings import MAX_SEED

EVALUATION_SEED = MAX_SEED + 1
"""Seed of the episodes on which the best checkpoint is chosen: beyond all that a training can have."""
FINAL_SEED = MAX_SEED + 2
"""Seed of the episodes that choose nothing and are reported."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a policy reached.

    Args:
        success_rate: Share of the episodes that succeeded, as ``success`` says.
        success: ``end`` or ``any``.
        success_rate_end: Share of the episodes that were at the goal after their last step.
        success_rate_any: Share of the episodes that were at the goal after any step.
        time_at_goal: Share of all steps that were at the goal.
        final_distance: Mean Euclidean distance between achieved and desired goal after the last step, in their unit.
        num_episodes: Episodes.
        seed: Of the episodes.
    """

    success_rate: float
    success: str
    success_rate_end: float
    success_rate_any: float
    time_at_goal: float
    final_distance: float
    num_episodes: int
    seed: int

    @property
    def rank(self) -> tuple[float, float]:
        """The larger, the better: success, and among equals the longer time at the goal."""
        return self.success_rate, self.time_at_goal


def evaluate(
    act: Callable[[Tensor, Tensor], Tensor],
    environments: GoalVectorEnvironment,
    *,
    num_episodes: int,
    seed: int,
    success: Literal["end", "any"],
) -> Evaluation:
    """Runs episodes to their ends; the same policy, seed and number of environments give the same figures.

    Args:
        act: From observations [E, O] and desired goals [E, G] to actions [E, A].
        environments: Are begun anew with ``seed``.
        num_episodes: Spread evenly over the environments, so that short episodes do not count more often.
        seed: Of the episodes.
        success: When an episode counts as successful.
    """
    observation = environments.reset(seed)
    size = environments.num_environments
    wanted = np.full(size, num_episodes // size) + (np.arange(size) < num_episodes % size)
    counted, at_goal, any_success = np.zeros(size, int), np.zeros(size, int), np.zeros(size, bool)
    num_steps = np.zeros(size, int)
    ends: list[bool] = []
    anys: list[bool] = []
    distances: list[float] = []
    steps_at_goal = steps = 0
    while (counted < wanted).any():
        actions = act(torch.from_numpy(observation.observation), torch.from_numpy(observation.desired_goal))
        step = environments.step(actions.numpy())
        any_success |= step.success
        at_goal += step.success
        num_steps += 1
        for n in np.flatnonzero(step.done):
            if counted[n] < wanted[n]:
                ends.append(bool(step.success[n]))
                anys.append(bool(any_success[n]))
                distances.append(_distance(step.final.achieved_goal[n], step.final.desired_goal[n]))
                steps_at_goal += int(at_goal[n])
                steps += int(num_steps[n])
            counted[n] += 1
            any_success[n], at_goal[n], num_steps[n] = False, 0, 0
        observation = step.observation
    rates = {"end": float(np.mean(ends)), "any": float(np.mean(anys))}
    return Evaluation(
        success_rate=rates[success],
        success=success,
        success_rate_end=rates["end"],
        success_rate_any=rates["any"],
        time_at_goal=steps_at_goal / steps,
        final_distance=float(np.mean(distances)),
        num_episodes=num_episodes,
        seed=seed,
    )


def _distance(achieved: npt.NDArray[np.float32], desired: npt.NDArray[np.float32]) -> float:
    return float(np.linalg.norm(achieved.astype(np.float64) - desired.astype(np.float64)))
