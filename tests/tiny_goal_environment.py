"""A goal environment that costs nothing: a point in a square that has to come to rest near a goal."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Dict

Array = npt.NDArray[np.float32]


class PointReach(gymnasium.Env[dict[str, Array], Array]):
    """A point in the square [-1, 1]^2 is moved by at most 0.2 a step and axis, and must be within 0.1 of the goal.

    Start and goal are drawn uniformly; a policy that does nothing, or goes anywhere at random, seldom succeeds.
    """

    max_episode_steps = 20
    step_size = 0.2
    radius = 0.1

    def __init__(self, num_axes: int = 2) -> None:
        box = Box(-1.0, 1.0, (num_axes,), np.float32)
        self.observation_space = Dict({"observation": box, "achieved_goal": box, "desired_goal": box})
        self.action_space = Box(-1.0, 1.0, (num_axes,), np.float32)
        self.position = np.zeros(num_axes, np.float32)
        self.goal = np.zeros(num_axes, np.float32)
        self.num_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Array], dict]:
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-1, 1, (2, len(self.position))).astype(np.float32)
        self.num_steps = 0
        return self._observation(), {}

    def step(self, action: Array) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        self.position = np.clip(self.position + self.step_size * np.asarray(action, np.float32), -1, 1)
        self.num_steps += 1
        success = bool(np.linalg.norm(self.position - self.goal) <= self.radius)
        truncated = self.num_steps >= self.max_episode_steps
        return self._observation(), float(success), False, truncated, {"is_success": success}

    def _observation(self) -> dict[str, Array]:
        return {"observation": self.position, "achieved_goal": self.position, "desired_goal": self.goal}
