"""Goal environments with something wrong or unusual about them."""

from __future__ import annotations

import os
import signal

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from tiny_goal_environment import PointReach

gymnasium.register("FaultyTestPoint-v0", entry_point=PointReach, max_episode_steps=7)


class Echo(PointReach):
    """Shows the action that it got, whose bounds are not -1 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = Box(np.array([-3.0, 0.0]), np.array([5.0, 10.0]), dtype=np.float64)

    def step(self, action):
        observation, *rest = super().step(action)
        return {**observation, "observation": action}, *rest


class Endless(PointReach):
    """Does not say how long its episodes are."""

    max_episode_steps = None

    def step(self, action):
        self.max_episode_steps = 10**9
        return super().step(action)


class UnpicklableError(Exception):
    """Cannot be sent to another process."""

    def __init__(self, message: str, lock: object) -> None:
        super().__init__(message)
        self.lock = lock


class Raising(PointReach):
    def step(self, action):
        raise ValueError("the motor is stuck")


class RaisingUnpicklable(PointReach):
    def step(self, action):
        raise UnpicklableError("the motor is stuck", lambda: None)


class Silent(PointReach):
    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"distance": 1.0}


class Lost(PointReach):
    def step(self, action):
        observation, *rest = super().step(action)
        return {**observation, "achieved_goal": np.array([0.0, np.nan], np.float32)}, *rest


class Dying(PointReach):
    """Ends its process in the middle of a step."""

    def step(self, action):
        os.kill(os.getpid(), signal.SIGKILL)


class DyingAtTheStart(PointReach):
    """Ends its process while it is made there, but not where the environment is looked at first."""

    def __init__(self) -> None:
        import multiprocessing

        if multiprocessing.parent_process() is not None:
            os._exit(3)
        super().__init__()


class ThreadCount(PointReach):
    """Shows how many threads its process may take."""

    def step(self, action):
        observation, *rest = super().step(action)
        threads = np.full(2, float(os.environ.get("OMP_NUM_THREADS", "0")), np.float32)
        return {**observation, "observation": threads}, *rest


def not_an_environment() -> int:
    return 3


class Saying(PointReach):
    """Gives whatever it is told to: entries of the observation and of the info, by their names."""

    def __init__(self, observation: dict | None = None, info: dict | None = None) -> None:
        super().__init__()
        self.changed_observation, self.changed_info = observation or {}, info or {}

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        changed = {**observation, **self.changed_observation}
        return (
            {key: value for key, value in changed.items() if value is not None},
            reward, terminated, truncated, {**info, **self.changed_info},
        )  # fmt: skip


class Leaving(PointReach):
    """Wants to end the whole program in the middle of a step."""

    def step(self, action):
        raise SystemExit(0)


class WideActions(PointReach):
    """Its bounds are further apart than float32 can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = Box(-3e38, 3e38, (2,), np.float32)

    def step(self, action):
        observation, *rest = super().step(np.zeros(2))
        return {**observation, "observation": np.asarray(action / 3e38, np.float32)}, *rest
