"""Making one goal environment from its name: Gymnasium's, Meta-World's, or the user's own."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box, Dict
from gymnasium.wrappers import TimeLimit

from gated_serving.rl.environments.errors import UnusableEnvironmentError
from gated_serving.rl.environments.simulators import import_simulator

Environment = gymnasium.Env[dict[str, npt.NDArray[Any]], npt.NDArray[Any]]


def make_goal_environment(
    environment_id: str,
    *,
    render_mode: str | None = None,
    max_episode_steps: int | None = None,
    achieved_goal_in_observation: bool | None = None,
    **kwargs: Any,
) -> Environment:
    """Makes a single goal environment.

    Args:
        environment_id: A Gymnasium id (``FetchReach-v4``, ``PointMaze_UMaze-v3``), ``metaworld:`` and a task
            (``metaworld:reach-v3``), or ``package.module:name`` of a class, a factory or a registered id of your own;
            modules in the current folder are found too.
        render_mode: Gymnasium's; None renders nothing.
        max_episode_steps: Truncates episodes after so many steps; the environment's own number if not given.
        achieved_goal_in_observation: Whether the achieved goal is put before the observation. A policy sees the
            observation and the desired goal only, so where the observation leaves out what the goal speaks of, it must
            be added. If not given: True for AntMaze, whose observation has no position, and False for all others.
        **kwargs: Passed on to the environment.

    Returns:
        An environment with a dictionary of observation, achieved_goal and desired_goal.

    Raises:
        UnusableEnvironmentError: There is no such environment, or it cannot be made.
    """
    environment = _make(environment_id, render_mode=render_mode, max_episode_steps=max_episode_steps, kwargs=kwargs)
    if achieved_goal_in_observation is None:
        achieved_goal_in_observation = environment_id.startswith("AntMaze")
    return _AchievedGoalFirst(environment) if achieved_goal_in_observation else environment


def _make(
    environment_id: str, *, render_mode: str | None, max_episode_steps: int | None, kwargs: dict[str, Any]
) -> Environment:
    if ":" not in environment_id:
        return _make_registered(
            environment_id, render_mode=render_mode, max_episode_steps=max_episode_steps, kwargs=kwargs
        )
    room, name = environment_id.split(":", 1)
    if room == "metaworld":
        from gated_serving.rl.environments.metaworld import make_metaworld

        return make_metaworld(name, render_mode=render_mode, max_episode_steps=max_episode_steps, **kwargs)
    module = _import_of_user(room, environment_id)
    factory = getattr(module, name, None)
    if factory is None and name in gymnasium.registry:
        return _make_registered(name, render_mode=render_mode, max_episode_steps=max_episode_steps, kwargs=kwargs)
    if not callable(factory):
        raise UnusableEnvironmentError(f"{environment_id}: {module.__file__ or room} has no class or function {name!r}")
    if render_mode is not None:
        kwargs = {**kwargs, "render_mode": render_mode}
    try:
        environment = factory(**kwargs)
    except Exception as error:
        raise UnusableEnvironmentError(
            f"{environment_id}: cannot be made with the arguments {kwargs!r} ({error!r})"
        ) from error
    if not isinstance(environment, gymnasium.Env):
        raise UnusableEnvironmentError(f"{environment_id}: made a {type(environment).__name__}, not a gymnasium.Env")
    return _with_length(environment, environment_id, max_episode_steps)


def _make_registered(
    environment_id: str, *, render_mode: str | None, max_episode_steps: int | None, kwargs: dict[str, Any]
) -> Environment:
    if render_mode is not None:
        kwargs = {**kwargs, "render_mode": render_mode}
    if environment_id not in gymnasium.registry:
        import_simulator("gymnasium_robotics")
    try:
        with warnings.catch_warnings():
            # That there is a newer version of what was asked for is said once for every copy that is made.
            warnings.simplefilter("ignore", DeprecationWarning)
            # Gymnasium's own checker only warns, and of much that is no fault; spec_of checks what matters here.
            environment = gymnasium.make(
                environment_id, max_episode_steps=max_episode_steps, disable_env_checker=True, **kwargs
            )
    except gymnasium.error.UnregisteredEnv as error:
        raise UnusableEnvironmentError(
            f"{environment_id}: no such environment ({error}); give a Gymnasium id, metaworld:TASK or "
            "package.module:name"
        ) from error
    except Exception as error:
        raise UnusableEnvironmentError(
            f"{environment_id}: cannot be made with the arguments {kwargs!r} ({error!r})"
        ) from error
    return _with_length(environment, environment_id, None)


def _import_of_user(module: str, environment_id: str) -> Any:
    # The console script's own folder comes first on the path, not the one the user stands in. Last, so that a file
    # there cannot hide an installed package.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise UnusableEnvironmentError(
            f"{environment_id}: there is no module {error.name!r}, neither installed nor in {here}; write "
            "package.module:name"
        ) from error


def _with_length(environment: Environment, environment_id: str, max_episode_steps: int | None) -> Environment:
    """Truncates as asked for, or as the environment says itself in its spec or in ``max_episode_steps``."""
    known = environment.spec.max_episode_steps if environment.spec is not None else None
    own = getattr(environment.unwrapped, "max_episode_steps", None)
    length = next((one for one in (max_episode_steps, known, own) if one is not None), None)
    if length is None:
        raise UnusableEnvironmentError(
            f"{environment_id}: the length of its episodes is not known; give max_episode_steps to it, and to "
            "train-rl as 'environment.kwargs={\"max_episode_steps\": 50}'"
        )
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise UnusableEnvironmentError(
            f"{environment_id}: max_episode_steps={length!r}: must be a whole number of at least 1"
        )
    if length == known:
        return environment
    environment.unwrapped.spec = environment.unwrapped.spec or EnvSpec(id="Goal-v0")
    return TimeLimit(environment, length)


class _AchievedGoalFirst(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Puts the achieved goal before the observation."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        space = environment.observation_space
        if not isinstance(space, Dict):
            return  # not a goal environment; the check of its spaces says so
        goal, rest = space["achieved_goal"], space["observation"]
        assert isinstance(goal, Box)
        assert isinstance(rest, Box)
        low, high = (
            np.concatenate(parts, dtype=np.float64) for parts in ((goal.low, rest.low), (goal.high, rest.high))
        )
        joined = Box(low, high, dtype=np.float64)
        self.observation_space = Dict({**space.spaces, "observation": joined})

    def observation(self, observation: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """The same with the longer observation."""
        return {
            **observation,
            "observation": np.concatenate([observation["achieved_goal"], observation["observation"]]),
        }
