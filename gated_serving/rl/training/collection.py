"""Steps the environments and keeps what happened.

Legend: ``E`` environments, ``A`` action size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gated_serving.rl.environments import GoalObservation, GoalVectorEnvironment
from gated_serving.rl.replay import EpisodeReplay

_RECENT_EPISODES = 100


class Collector:
    """Experience of several environments that step together.

    Args:
        environments: Their episodes begin with ``begin_episodes``.
        replay: Where the steps go.
    """

    def __init__(self, environments: GoalVectorEnvironment, replay: EpisodeReplay) -> None:
        self._environments = environments
        self._replay = replay
        self._observation: GoalObservation | None = None
        self._starts = np.ones(environments.num_environments, dtype=bool)
        self.recent_success: deque[bool] = deque(maxlen=_RECENT_EPISODES)

    def begin_episodes(self) -> None:
        """Begins a new episode everywhere; those under way end here."""
        self._observation = self._environments.reset()
        self._starts[:] = True

    def take(self, num_steps: int, act: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Takes steps in every environment.

        Args:
            num_steps: Of each environment.
            act: From observations [E, O] and desired goals [E, G] to actions [E, A] in [-1, 1].
        """
        assert self._observation is not None
        for _ in range(num_steps):
            seen = self._observation
            actions = act(torch.from_numpy(seen.observation), torch.from_numpy(seen.desired_goal)).numpy()
            self._take_one(seen, actions)

    def take_random(self, num_steps: int, rng: np.random.Generator) -> tuple[npt.NDArray[np.float32], ...]:
        """Takes steps with random actions, uniform in [-1, 1].

        Args:
            num_steps: Of each environment.
            rng: The only source of chance.

        Returns:
            Observations [any, O], and goals achieved and desired [any, G].
        """
        assert self._observation is not None
        shape = (self._environments.num_environments, self._environments.spec.action_size)
        observations, goals = [], []
        for _ in range(num_steps):
            seen = self._observation
            observations.append(seen.observation)
            goals += [seen.achieved_goal, seen.desired_goal]
            self._take_one(seen, rng.uniform(-1, 1, shape).astype(np.float32))
        return np.concatenate(observations), np.concatenate(goals)

    def _take_one(self, seen: GoalObservation, actions: npt.NDArray[np.float32]) -> None:
        step = self._environments.step(actions)
        self._replay.append(
            observation=seen.observation,
            action=actions,
            next_achieved_goal=step.final.achieved_goal,
            episode_start=self._starts,
        )
        self.recent_success.extend(bool(success) for success in step.success[step.done])
        self._observation, self._starts = step.observation, step.done
