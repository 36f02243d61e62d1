"""How often an exported policy succeeds in its environment, played through the very file that will be served.

Several environments are stepped side by side in this process, so that the policy gets batches: a deep one takes far
longer than its simulator otherwise. Environments come from the caller, as this package knows none but Gymnasium's
interface.

Legend: B environments that are still playing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policy_server.export.policy import TrainedPolicy
from policy_server.export.verify import Session, load_session
from policy_server.manifest import ActionSpace, Outputs

FIRST_SEED = 2_000_000
"""Episode i is reset with this plus i: far from the seeds that training and its evaluation use."""

NUM_ENVIRONMENTS = 8

_SUCCESS_KEYS = ("is_success", "success")

MakeEnvironment = Callable[..., Any]
"""Takes an environment's id and its keyword arguments and gives a Gymnasium environment."""


class EnvironmentUnavailableError(Exception):
    """The environment cannot be made here, or does not say whether an episode succeeded."""


@dataclass
class _Episode:
    """One environment in the middle of an episode."""

    environment: Any
    observation: Any
    num_steps: int = 0
    reports_success: bool = False


def success_rate(
    path: Path,
    policy: TrainedPolicy,
    make_environment: MakeEnvironment,
    *,
    num_episodes: int,
    num_environments: int = NUM_ENVIRONMENTS,
) -> float:
    """Share of episodes that succeed, at their last step or at any as training counted it, by the best action.

    Args:
        path: The exported file.
        policy: What it was exported from; names the environment.
        make_environment: Makes it.
        num_episodes: How many episodes; the same ones each time, however many environments there are.
        num_environments: Environments side by side.

    Raises:
        EnvironmentUnavailableError: See there.
    """
    session, training = load_session(path), policy.training
    environments: list[Any] = []
    try:
        for _ in range(min(num_environments, num_episodes)):
            try:
                environments.append(make_environment(training.environment, **training.environment_kwargs))
            except Exception as error:  # whatever a simulator raises
                raise EnvironmentUnavailableError(f"{training.environment} cannot be made here ({error})") from error
        return _count_successes(environments, session, policy, num_episodes) / num_episodes
    finally:
        for environment in environments:
            environment.close()


def _count_successes(environments: list[Any], session: Session, policy: TrainedPolicy, num_episodes: int) -> int:
    seeds = iter(range(FIRST_SEED, FIRST_SEED + num_episodes))
    playing = [_begin(environment, seed) for environment, seed in zip(environments, seeds, strict=False)]
    num_successes = 0
    while playing:
        actions = _act(session, policy, [episode.observation for episode in playing])
        still_playing: list[_Episode] = []
        for episode, action in zip(playing, actions, strict=True):
            succeeded = _step(episode, action, policy)
            if succeeded is None:
                still_playing.append(episode)
                continue
            num_successes += succeeded
            still_playing += _next_episode(episode, seeds)
        playing = still_playing
    return num_successes


def _begin(environment: Any, seed: int) -> _Episode:
    return _Episode(environment, environment.reset(seed=seed)[0])


def _next_episode(ended: _Episode, seeds: Iterator[int]) -> list[_Episode]:
    seed = next(seeds, None)
    return [] if seed is None else [_begin(ended.environment, seed)]


def _step(episode: _Episode, action: Any, policy: TrainedPolicy) -> bool | None:
    """Takes one step; whether the episode succeeded, None while it goes on."""
    episode.observation, _, terminated, truncated, info = episode.environment.step(action)
    episode.num_steps += 1
    known = [_is_success(policy, key, info[key]) for key in _SUCCESS_KEYS if key in info]
    episode.reports_success |= bool(known)
    if any(known) and policy.training.success_at == "any":
        return True
    limit = policy.training.max_episode_steps
    if not (terminated or truncated or (limit is not None and episode.num_steps >= limit)):
        return None
    if not episode.reports_success:
        raise EnvironmentUnavailableError(
            f"{policy.training.environment} says in none of {_SUCCESS_KEYS} whether an episode succeeded"
        )
    return any(known)


def _is_success(policy: TrainedPolicy, key: str, value: Any) -> bool:
    if not np.isscalar(value) or value not in (0, 1):
        raise EnvironmentUnavailableError(
            f"{policy.training.environment}: its info's {key} is {value!r}; it must be True or False, or 1 or 0"
        )
    return bool(value)


def _act(session: Session, policy: TrainedPolicy, observations: list[Any]) -> list[Any]:
    """The deterministic action for each of B observations."""
    inputs = {
        field.name: _joined(observations, field.name).astype(field.dtype).reshape(len(observations), *field.shape)
        for field in policy.observation
    }
    if len(session.get_inputs()) > len(inputs):
        assert policy.distribution is not None
        inputs["noise"] = np.zeros((len(observations), policy.distribution.noise_size), np.float32)
    actions = session.run([Outputs.ACTION], inputs)[0]
    return [_as_environment_action(action, policy.action) for action in actions]


def _joined(observations: list[Any], name: str) -> NDArray[np.generic]:
    """One field of all observations: [B, ...]; an environment with a single field gives it bare."""
    fields: list[Any] = [one[name] if isinstance(one, Mapping) else one for one in observations]
    return np.stack([np.asarray(one) for one in fields])


def _as_environment_action(action: Any, space: ActionSpace) -> Any:
    return int(action) if space.kind == "discrete" and not space.shape else action
