"""What a goal environment is to a policy: its sizes, bounds and times; and the check that it is one.

Legend: O observation size, G goal size, A action size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Space

from gated_serving.rl.environments.errors import UnusableEnvironmentError

OBSERVATION_KEYS = ("observation", "achieved_goal", "desired_goal")


@dataclass(frozen=True, kw_only=True)
class GoalEnvironmentSpec:
    """Sizes, bounds and times of a goal environment.

    Args:
        id: As it was asked for.
        observation_size: O.
        goal_size: G, of the achieved and of the desired goal.
        action_size: A.
        action_low: Lower bounds of the environment's own actions, A numbers.
        action_high: Upper bounds, A numbers.
        control_period_s: Time between two actions, in seconds; None where the environment does not say.
        max_episode_steps: Steps after which an episode is truncated.
        num_environments: Copies that step together.
        observation_fields: What a policy sees, in the order in which it is concatenated.
    """

    id: str
    observation_size: int
    goal_size: int
    action_size: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    control_period_s: float | None
    max_episode_steps: int
    num_environments: int = 1
    observation_fields: tuple[str, ...] = ("observation", "desired_goal")


def spec_of(
    environment: gymnasium.Env[Any, Any], environment_id: str, *, num_environments: int = 1
) -> GoalEnvironmentSpec:
    """Checks that a policy can be trained here, and says what it has to fit.

    Args:
        environment: A single environment, with its episode length in ``spec.max_episode_steps``.
        environment_id: As it was asked for.
        num_environments: Copies that will step together.

    Raises:
        UnusableEnvironmentError: The spaces are not those of a goal environment with continuous, bounded actions, or
            the length of an episode is not known.
    """
    sizes = _observation_sizes(environment.observation_space, environment_id)
    if sizes["achieved_goal"] != sizes["desired_goal"]:
        raise UnusableEnvironmentError(
            f"{environment_id}: achieved_goal has {sizes['achieved_goal']} values and desired_goal "
            f"{sizes['desired_goal']}: they must be of one kind, or no goal that was achieved can be learned from"
        )
    action_space = _checked_actions(environment.action_space, environment_id)
    steps = environment.spec.max_episode_steps if environment.spec is not None else None
    if steps is None:
        raise UnusableEnvironmentError(
            f"{environment_id}: the length of its episodes is not known; give max_episode_steps to it, and to "
            "train-rl as 'environment.kwargs={\"max_episode_steps\": 50}'"
        )
    return GoalEnvironmentSpec(
        id=environment_id,
        observation_size=sizes["observation"],
        goal_size=sizes["desired_goal"],
        action_size=action_space.shape[0],
        action_low=tuple(float(x) for x in action_space.low),
        action_high=tuple(float(x) for x in action_space.high),
        control_period_s=_control_period_s(environment),
        max_episode_steps=steps,
        num_environments=num_environments,
    )


def _observation_sizes(space: Space[Any], environment_id: str) -> dict[str, int]:
    present = space.spaces if isinstance(space, Dict) else {}
    if missing := [key for key in OBSERVATION_KEYS if key not in present]:
        found = f"Dict without {missing}" if isinstance(space, Dict) else str(space)
        raise UnusableEnvironmentError(
            f"{environment_id}: its observation space is {found}; a goal environment has a Dict with "
            f"{list(OBSERVATION_KEYS)}"
        )
    sizes: dict[str, int] = {}
    for key in OBSERVATION_KEYS:
        part = present[key]
        if not isinstance(part, Box) or len(part.shape) != 1 or not np.issubdtype(part.dtype, np.floating):
            raise UnusableEnvironmentError(
                f"{environment_id}: {key} is {part}; it must be a Box of floats with one dimension"
            )
        if part.shape[0] < 1:
            raise UnusableEnvironmentError(f"{environment_id}: {key} has no values; it needs at least one")
        sizes[key] = part.shape[0]
    return sizes


def _checked_actions(space: Space[Any], environment_id: str) -> Box:
    if not isinstance(space, Box) or len(space.shape) != 1 or not np.issubdtype(space.dtype, np.floating):
        raise UnusableEnvironmentError(
            f"{environment_id}: its actions are {space}; only continuous ones are learned here: a Box of floats with "
            "one dimension"
        )
    if space.shape[0] < 1:
        raise UnusableEnvironmentError(f"{environment_id}: its actions have no values; they need at least one")
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all() and (space.low < space.high).all()):
        raise UnusableEnvironmentError(
            f"{environment_id}: its actions {space} are not bounded on both sides; wrap it in RescaleAction"
        )
    return space


def _control_period_s(environment: gymnasium.Env[Any, Any]) -> float | None:
    """The simulator's own step; mazes keep their simulator inside; else what the frames a second say."""
    unwrapped = environment.unwrapped
    holders = (unwrapped, *(getattr(unwrapped, name, None) for name in ("point_env", "ant_env")))
    for holder in holders:
        period = getattr(holder, "dt", None)
        if isinstance(period, int | float | np.floating) and 0 < period < math.inf:
            return float(period)
    frames = (unwrapped.metadata or {}).get("render_fps")
    if isinstance(frames, int | float) and 0 < frames < math.inf:
        return 1.0 / frames
    return None
