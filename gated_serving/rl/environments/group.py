"""Several environments that step one after the other in one process, each episode with a seed of its own.

Legend: N environments of the group, O observation size, G goal size, A action size.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

from gated_serving.rl.environments.errors import EnvironmentFailedError
from gated_serving.rl.environments.spec import OBSERVATION_KEYS, GoalEnvironmentSpec

logger = logging.getLogger(__name__)

Array = npt.NDArray[np.float32]
_SUCCESS_KEYS = ("is_success", "success")
_FLAGS = ("terminated", "truncated", "success")


def episode_seed(seed: int, environment: int, episode: int) -> int:
    """The seed that an episode's reset gets: of its own for every run, environment and episode.

    Args:
        seed: The run's.
        environment: Number of the environment among all.
        episode: Number of the episode in that environment.
    """
    return int(np.random.SeedSequence(entropy=seed, spawn_key=(environment, episode)).generate_state(1)[0])


@dataclass(frozen=True)
class PackedLayout:
    """Where everything lies in the one row that an environment gives per step.

    One array a group, because every further one costs a copy through shared memory of its own.

    Args:
        observation_size: O.
        goal_size: G.
    """

    observation_size: int
    goal_size: int

    @property
    def width(self) -> int:
        """Length of a row: the observation to go on from, the one the step led to, and three flags."""
        return 2 * self._moment + len(_FLAGS)

    @property
    def _moment(self) -> int:
        return self.observation_size + 2 * self.goal_size

    def parts(self, rows: Array, *, final: bool) -> tuple[Array, Array, Array]:
        """Observation, achieved goal and desired goal, as views; ``final`` takes those the step itself led to."""
        moment = rows[..., self._moment : 2 * self._moment] if final else rows[..., : self._moment]
        first, second = self.observation_size, self.observation_size + self.goal_size
        return moment[..., :first], moment[..., first:second], moment[..., second:]

    def flags(self, rows: Array) -> tuple[npt.NDArray[np.bool_], ...]:
        """Terminated, truncated and success."""
        return tuple(rows[..., 2 * self._moment + i] > 0.5 for i in range(len(_FLAGS)))

    def write_moment(self, row: Array, observation: Mapping[str, npt.ArrayLike], *, final: bool) -> None:
        """Writes a dictionary observation into a row."""
        for key, part in zip(OBSERVATION_KEYS, self.parts(row, final=final), strict=True):
            part[:] = observation[key]

    def write_flags(self, row: Array, *flags: bool) -> None:
        """Writes terminated, truncated and success into a row."""
        row[2 * self._moment :] = flags


def raise_failure(info: Mapping[str, Any]) -> None:
    """Raises what a group, or the first of several that failed, tells in its info.

    Raises:
        EnvironmentFailedError: There was a failure.
    """
    if "failure" in info:
        raise EnvironmentFailedError(next(message for message in np.atleast_1d(info["failure"]) if message))


class EnvironmentGroup(gymnasium.Env[Array, Array]):
    """Environments that a process steps one after the other; an episode that ends is followed by the next at once.

    To Gymnasium it is one environment that never ends, with a row per environment as its observation
    (``PackedLayout``). The environments are made at the first reset. What they raise is not raised but told in the
    info, as ``failure`` with the whole traceback: not every exception survives being sent to another process.
    ``raise_failure`` raises it.

    Args:
        make: Makes one environment.
        spec: What it must be.
        first: Number of the group's first environment among all.
        num_environments: N.
    """

    def __init__(
        self, make: Callable[[], gymnasium.Env[Any, Any]], spec: GoalEnvironmentSpec, first: int, num_environments: int
    ) -> None:
        self._make = make
        self._spec = spec
        self._numbers = range(first, first + num_environments)
        self._environments: list[gymnasium.Env[Any, Any]] = []
        self._seed = 0
        self._next_episodes = [0] * num_environments
        self._layout = PackedLayout(spec.observation_size, spec.goal_size)
        self._rows = np.zeros((num_environments, self._layout.width), dtype=np.float32)
        self._sizes = dict(zip(OBSERVATION_KEYS, (spec.observation_size, spec.goal_size, spec.goal_size), strict=True))
        self._low = np.asarray(spec.action_low, dtype=np.float64)  # their distance may not fit into 32 bits
        self._high = np.asarray(spec.action_high, dtype=np.float64)
        self.observation_space = Box(-np.inf, np.inf, self._rows.shape, np.float32)
        self.action_space = Box(-1.0, 1.0, (num_environments, spec.action_size), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begins an episode in every environment.

        Args:
            seed: Not used; Gymnasium would give every group another one.
            options: ``seed`` of the run and ``episodes``, the number of the episode to begin in each environment of
            all.
        """
        assert options is not None
        self._seed = options["seed"]
        self._next_episodes = [options["episodes"][number] for number in self._numbers]
        try:
            if not self._environments:
                self._environments = [self._make_one() for _ in self._numbers]
            for n, row in enumerate(self._rows):
                observation = self._begin_episode(n)
                self._layout.write_moment(row, observation, final=False)
                self._layout.write_moment(row, observation, final=True)
                self._layout.write_flags(row, False, False, False)
        except EnvironmentFailedError as error:
            return self._rows.copy(), {"failure": str(error)}
        return self._rows.copy(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Steps every environment.

        Args:
            action: In [-1, 1], [N, A]; clipped, and scaled to each environment's own bounds.
        """
        clipped = np.clip(action, -1.0, 1.0)
        actions = (self._low + (clipped + 1.0) * (0.5 * (self._high - self._low))).astype(np.float32)
        try:
            for n, row in enumerate(self._rows):
                observation, terminated, truncated, success = self._step_one(n, actions[n])
                self._layout.write_moment(row, observation, final=True)
                self._layout.write_flags(row, terminated, truncated, success)
                if terminated or truncated:
                    observation = self._begin_episode(n)
                self._layout.write_moment(row, observation, final=False)
        except EnvironmentFailedError as error:
            return self._rows.copy(), 0.0, False, False, {"failure": str(error)}
        return self._rows.copy(), 0.0, False, False, {}

    def close(self) -> None:
        """Closes the environments."""
        for environment in self._environments:
            try:
                environment.close()
            except Exception:
                logger.exception("%s: an environment failed to close", self._spec.id)
        self._environments = []

    def _make_one(self) -> gymnasium.Env[Any, Any]:
        try:
            return self._make()
        except (Exception, SystemExit):
            raise self._failed("could not be made", self._numbers[0]) from None

    def _begin_episode(self, n: int) -> dict[str, Array]:
        number, episode = self._numbers[n], self._next_episodes[n]
        self._next_episodes[n] += 1
        try:
            observation, _ = self._environments[n].reset(seed=episode_seed(self._seed, number, episode))
        except (Exception, SystemExit):
            raise self._failed("failed in reset", number) from None
        return self._checked(observation, number)

    def _step_one(self, n: int, action: Array) -> tuple[dict[str, Array], bool, bool, bool]:
        number = self._numbers[n]
        try:
            observation, _, terminated, truncated, info = self._environments[n].step(action)
        except (Exception, SystemExit):
            raise self._failed("failed in step", number) from None
        checked = self._checked(observation, number)
        for key in _SUCCESS_KEYS:
            if key in info:
                return checked, bool(terminated), bool(truncated), self._success(key, info[key])
        raise EnvironmentFailedError(
            f"{self._spec.id}: its info has neither of {list(_SUCCESS_KEYS)}, only {sorted(info)}; whether the goal is "
            "reached must be said there at every step"
        )

    def _success(self, key: str, value: Any) -> bool:
        if not np.isscalar(value) or value not in (0, 1):
            raise EnvironmentFailedError(
                f"{self._spec.id}: its info's {key} is {value!r}; it must be True or False, or 1 or 0"
            )
        return bool(value)

    def _checked(self, observation: Any, number: int) -> dict[str, Array]:
        """The three parts in float32, each a row of finite numbers as long as the spec says."""
        checked: dict[str, Array] = {}
        for key, size in self._sizes.items():
            try:
                with np.errstate(over="ignore"):  # what does not fit is infinite, and refused below
                    row = np.asarray(observation[key], dtype=np.float32)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise EnvironmentFailedError(
                    f"{self._spec.id}: environment {number} gave no {key} of {size} numbers: {error!r}"
                ) from None
            if row.shape != (size,):
                raise EnvironmentFailedError(
                    f"{self._spec.id}: {key} has shape {row.shape} in environment {number}, its space says ({size},)"
                )
            if not np.isfinite(row).all():
                raise EnvironmentFailedError(
                    f"{self._spec.id}: {key} is {observation[key]} in environment {number}: not a finite number in "
                    "float32"
                )
            checked[key] = row
        return checked

    def _failed(self, what: str, number: int) -> EnvironmentFailedError:
        return EnvironmentFailedError(
            f"{self._spec.id}: environment {number} {what}:\n{traceback.format_exc().rstrip()}"
        )
