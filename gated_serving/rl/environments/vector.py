"""Many copies of a goal environment that step together, in this process or spread over several.

Legend: E environments, P processes, O observation size, G goal size, A action size.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gated_serving.rl.environments.errors import UnusableEnvironmentError
from gated_serving.rl.environments.group import EnvironmentGroup, PackedLayout, raise_failure
from gated_serving.rl.environments.making import make_goal_environment
from gated_serving.rl.environments.spec import GoalEnvironmentSpec, spec_of
from gated_serving.rl.environments.worker_pool import WorkerPool

Array = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class GoalObservation:
    """What all environments show.

    Args:
        observation: [E, O].
        achieved_goal: [E, G].
        desired_goal: [E, G].
    """

    observation: Array
    achieved_goal: Array
    desired_goal: Array


@dataclass(frozen=True)
class GoalStep:
    """What a step led to.

    Args:
        observation: What to act on next: where an episode ended, the first observation of the next one.
        final: What the step itself led to; the same except where an episode ended.
        terminated: Whether the environment ended the episode, [E].
        truncated: Whether its length ended the episode, [E].
        success: Whether the goal is reached, as the environment's info says, [E].
    """

    observation: GoalObservation
    final: GoalObservation
    terminated: Flags
    truncated: Flags
    success: Flags

    @property
    def done(self) -> Flags:
        """Whether the episode ended, [E]."""
        return self.terminated | self.truncated


class GoalVectorEnvironment:
    """Copies of a goal environment that step together; made by ``make_vector_environment``.

    An episode that ends is followed by the next one in the same step. Every episode is reset with a seed that follows
    from the run's seed, the environment's number and the episode's, so trajectories do not depend on how many processes
    there are. ``spec`` says what a policy has to fit.

    Args:
        spec: Checked description; ``num_environments`` is E.
        kwargs: Arguments of the environment.
        num_processes: P; 0 steps all of them here. Divides E.
        seed: Of the run.

    Raises:
        EnvironmentFailedError: A process ended while it started.
    """

    def __init__(self, spec: GoalEnvironmentSpec, kwargs: Mapping[str, Any], *, num_processes: int, seed: int) -> None:
        self.spec = spec
        self.num_environments = spec.num_environments
        self.num_processes = num_processes
        self._layout = PackedLayout(spec.observation_size, spec.goal_size)
        self._seed = seed
        self._next_episodes = np.zeros(self.num_environments, dtype=np.int64)
        self._started = False
        num_groups = max(1, num_processes)
        size = self.num_environments // num_groups
        make = functools.partial(make_goal_environment, spec.id, **kwargs)
        make_groups = [functools.partial(EnvironmentGroup, make, spec, i * size, size) for i in range(num_groups)]
        self._group = make_groups[0]() if num_processes == 0 else None
        self._pool = WorkerPool(make_groups, spec.id) if num_processes else None

    def reset(self, seed: int | None = None) -> GoalObservation:
        """Begins a new episode in every environment.

        Args:
            seed: Begins anew with this seed and the first episodes; None goes on with the next ones.

        Raises:
            EnvironmentFailedError: An environment raised, or its process ended.
        """
        if seed is not None:
            self._seed = seed
            self._next_episodes[:] = 0
        options = {"seed": self._seed, "episodes": self._next_episodes.tolist()}
        if self._pool is not None:
            rows = self._flat(self._pool.reset(options))
        else:
            assert self._group is not None
            rows, info = self._group.reset(options=options)
            raise_failure(info)
        self._next_episodes += 1
        self._started = True
        return GoalObservation(*self._layout.parts(rows, final=False))

    def step(self, actions: npt.ArrayLike) -> GoalStep:
        """Steps every environment.

        Args:
            actions: In [-1, 1], [E, A]; clipped, and scaled to the environment's own bounds.

        Raises:
            ValueError: The shape is wrong, a value is not finite, or ``reset`` was not called first.
            EnvironmentFailedError: An environment raised, or its process ended.
        """
        if not self._started:
            raise ValueError("step was called before reset")
        wanted = np.asarray(actions, dtype=np.float32)
        if wanted.shape != (self.num_environments, self.spec.action_size):
            raise ValueError(
                f"actions have the shape {wanted.shape}: must be ({self.num_environments}, {self.spec.action_size})"
            )
        if not np.isfinite(wanted).all():
            raise ValueError(f"actions hold values that are not finite, such as {wanted[~np.isfinite(wanted)][0]}")
        if self._pool is not None:
            rows = self._flat(self._pool.step(wanted.reshape(self.num_processes, -1, self.spec.action_size)))
        else:
            assert self._group is not None
            rows, *_, info = self._group.step(wanted)
            raise_failure(info)
        terminated, truncated, success = self._layout.flags(rows)
        self._next_episodes += terminated | truncated
        return GoalStep(
            observation=GoalObservation(*self._layout.parts(rows, final=False)),
            final=GoalObservation(*self._layout.parts(rows, final=True)),
            terminated=terminated,
            truncated=truncated,
            success=success,
        )

    def state(self) -> dict[str, Any]:
        """Which episode comes next in every environment; plain JSON.

        Simulators are not kept: after ``restore`` a ``reset`` begins the episodes that come after the present ones.
        """
        return {"seed": self._seed, "next_episodes": self._next_episodes.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state`` returned; ``reset`` must come next.

        Raises:
            ValueError: The state is of another number of environments.
        """
        episodes = state["next_episodes"]
        if len(episodes) != self.num_environments:
            raise ValueError(f"next_episodes is of {len(episodes)} environments: here are {self.num_environments}")
        self._seed = int(state["seed"])
        self._next_episodes[:] = episodes
        self._started = False

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes that step the environments; none where they step here."""
        return self._pool.process_ids if self._pool is not None else []

    def close(self) -> None:
        """Closes the environments and ends their processes; may be called again."""
        if self._pool is not None:
            self._pool.close()
        if self._group is not None:
            self._group.close()

    def __enter__(self) -> GoalVectorEnvironment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _flat(self, rows: Array) -> Array:
        return rows.reshape(self.num_environments, -1)


def make_vector_environment(
    environment_id: str,
    *,
    num_environments: int,
    num_processes: int = 0,
    seed: int = 0,
    kwargs: Mapping[str, Any] | None = None,
) -> GoalVectorEnvironment:
    """Makes copies of a goal environment that step together.

    Args:
        environment_id: See ``make_goal_environment``.
        num_environments: E.
        num_processes: Processes over which they are spread, each with as many; 0 steps all of them in this process.
        seed: Of the run.
        kwargs: Arguments of the environment.

    Raises:
        ValueError: The numbers do not fit together.
        UnusableEnvironmentError: The environment cannot be made, or a policy cannot be trained in it.
        EnvironmentFailedError: A process ended while it started.
    """
    if num_environments < 1:
        raise ValueError(f"num_environments={num_environments!r}: must be at least 1")
    if num_processes < 0 or (num_processes and num_environments % num_processes):
        raise ValueError(f"num_processes={num_processes!r}: must be 0, or divide num_environments={num_environments}")
    if seed < 0:
        raise ValueError(f"seed={seed!r}: must be at least 0")
    kwargs = dict(kwargs or {})
    if "render_mode" in kwargs:
        raise UnusableEnvironmentError(
            f"{environment_id}: render_mode={kwargs['render_mode']!r}: training renders nothing; leave it out"
        )
    probe = make_goal_environment(environment_id, **kwargs)
    try:
        spec = replace(spec_of(probe, environment_id), num_environments=num_environments)
    finally:
        probe.close()
    return GoalVectorEnvironment(spec, kwargs, num_processes=num_processes, seed=seed)
