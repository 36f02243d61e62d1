"""Meta-World's tasks (v3) as goal environments: goal and achieved goal are taken from its observation of 39 numbers.

Entries of that observation: 0-2 the hand, 3 how far the gripper is open, 4-6 and 7-10 the first object's position and
orientation, 11-17 those of the second object (zeros where there is none), 18-35 the same 18 numbers one step ago, 36-38
the goal. All positions are in metres.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box, Dict
from gymnasium.utils import seeding

from gated_serving.rl.environments.errors import UnusableEnvironmentError
from gated_serving.rl.environments.simulators import import_simulator

Array = npt.NDArray[np.float64]

_STATE = slice(0, 36)
_HAND = slice(0, 3)
_FIRST_OBJECT = slice(4, 7)
_SECOND_OBJECT = slice(11, 14)
_GOAL = slice(36, 39)

_FINGERTIPS_FROM_HAND = np.array([0.0, 0.0, -0.045])
_ACHIEVED = {
    "reach-v3": _HAND,
    "reach-wall-v3": _HAND,
    "hammer-v3": _SECOND_OBJECT,
    "stick-push-v3": _SECOND_OBJECT,
    "stick-pull-v3": _SECOND_OBJECT,
}


class MetaWorldEnvironment(gymnasium.Env[Any, npt.NDArray[Any]]):
    """One task of Meta-World.

    ``observation`` is entries 0-35, ``desired_goal`` entries 36-38, and ``achieved_goal`` is what the task's success
    compares with its goal:

    - the first object, entries 4-6, in all tasks but these;
    - ``reach-v3``, ``reach-wall-v3``: the object plays no part; it is the middle of the fingertips, which is the hand
      (entries 0-2) and 4.5 cm below, as the gripper always points down;
    - ``hammer-v3``, ``stick-push-v3``, ``stick-pull-v3``: the first object is the tool; what has to reach the goal is
      the nail or the container, the second object, entries 11-13.

    Success is the task's own, from its info. When Meta-World's scripted policies succeed, the achieved goal is within
    12 cm of the desired one in every task but ``assembly-v3``, ``disassemble-v3`` and ``peg-insert-side-v3`` (11 to 20
    cm): there the goal is for a part of the object that the observation does not give, so a policy that brings the
    object itself to the goal does not succeed. In ``window-open-v3``, ``window-close-v3`` (10 cm beside) and
    ``door-open-v3`` only one axis counts, and the goal lies off the way of the handle.

    Goal and object are drawn anew at every reset, from the seed given there.

    Args:
        task: Name, such as ``push-v3``.
        render_mode: Gymnasium's.
        max_episode_steps: Truncates after so many steps.
        **kwargs: Passed on to the task.
    """

    def __init__(self, task: str, *, render_mode: str | None, max_episode_steps: int, **kwargs: Any) -> None:
        simulator = _tasks()[task](render_mode=render_mode, **kwargs)
        # What Meta-World's own goal-observable classes do: show the goal, and draw another at each reset. Those classes
        # freeze the first one drawn, so they cannot be used.
        simulator._partially_observable = False
        simulator._freeze_rand_vec = False
        simulator._set_task_called = True
        simulator.seeded_rand_vec = True
        vars(simulator).pop("sawyer_observation_space", None)
        simulator.max_path_length = max_episode_steps
        self._simulator = simulator
        self._achieved = _ACHIEVED.get(task, _FIRST_OBJECT)
        self.dt = float(simulator.dt)
        self.render_mode = render_mode
        self.metadata = dict(simulator.metadata)
        self.spec = EnvSpec(id=f"MetaWorld-{task}", max_episode_steps=max_episode_steps)
        self.action_space = simulator.action_space
        bounds = simulator.sawyer_observation_space
        goal = Box(-np.inf, np.inf, (3,), np.float64)
        self.observation_space = Dict(
            {
                "observation": Box(bounds.low[_STATE], bounds.high[_STATE], dtype=np.float64),
                "achieved_goal": goal,
                "desired_goal": goal,
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Draws object and goal; Meta-World's own reset would take no notice of the seed."""
        super().reset(seed=seed)
        if seed is not None:
            self._simulator.np_random, _ = seeding.np_random(seed)
        observation, info = self._simulator.reset()
        return self._split(observation), info

    def step(self, action: npt.NDArray[Any]) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        """Steps the task; ``info["success"]`` is its own."""
        observation, reward, terminated, truncated, info = self._simulator.step(action)
        return self._split(observation), float(reward), terminated, truncated, info

    def render(self) -> Any:
        """Renders a frame."""
        return self._simulator.render()

    def close(self) -> None:
        """Closes the simulator."""
        self._simulator.close()

    def _split(self, observation: Array) -> dict[str, Array]:
        achieved = observation[self._achieved]
        if self._achieved is _HAND:
            achieved = achieved + _FINGERTIPS_FROM_HAND
        return {"observation": observation[_STATE], "achieved_goal": achieved, "desired_goal": observation[_GOAL]}


def make_metaworld(
    task: str, *, render_mode: str | None = None, max_episode_steps: int | None = None, **kwargs: Any
) -> MetaWorldEnvironment:
    """Makes a task of Meta-World.

    Args:
        task: Name, such as ``push-v3``.
        render_mode: Gymnasium's.
        max_episode_steps: Truncates after so many steps; Meta-World's 500 if not given.
        **kwargs: Passed on to the task.

    Raises:
        UnusableEnvironmentError: There is no such task, or it cannot be made.
    """
    if task not in _tasks():
        raise UnusableEnvironmentError(f"metaworld:{task}: there is no such task; there are {', '.join(_tasks())}")
    try:
        return MetaWorldEnvironment(task, render_mode=render_mode, max_episode_steps=max_episode_steps or 500, **kwargs)
    except TypeError as error:
        raise UnusableEnvironmentError(
            f"metaworld:{task}: cannot be made with the arguments {kwargs!r} ({error})"
        ) from error


def _tasks() -> dict[str, Any]:
    return import_simulator("metaworld").ALL_V3_ENVIRONMENTS
