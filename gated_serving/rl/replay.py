"""Replay of the last steps of several environments, with hindsight goals, in memory or memory-mapped.

Legend: S slots of the ring, E environments, B batch, O observation size, G goal size, A action size.

A step is kept as (observation before it, action, goal achieved after it), so that the last step of an episode has a
future too and every step that is kept can be sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gated_serving.rl.hindsight import draw_offsets
from gated_serving.rl.replay_files import ReplayError, open_array

FORMAT_VERSION = 1


@dataclass(frozen=True)
class ReplayBatch:
    """Steps with hindsight goals; float32, in memory of its own.

    Args:
        observation: Observations before the action, [B, O].
        action: Actions, [B, A].
        goal: What was achieved at a later moment of the same episode, [B, G].
    """

    observation: torch.Tensor
    action: torch.Tensor
    goal: torch.Tensor


class EpisodeReplay:
    """The last steps of several environments that step together.

    Steps are drawn uniformly over all that are kept. The goal of a step at moment i of its episode is what was achieved
    at a moment j > i of the same episode, drawn with probability proportional to ``gamma ** (j - i)`` over the moments
    known so far (arXiv 2503.14858); see ``hindsight``. Goals never come from another episode, nor from what has been
    overwritten.

    How it outlives kill -9: with a folder the arrays are shared memory maps, so what was written is the kernel's and
    stays when the process dies. ``state`` writes them through to the disk and says how many steps there are;
    ``restore`` gives back exactly the replay of that moment, later steps do not show. The ring is longer than what can
    be sampled by twice ``max_unsaved_steps``, which keeps the steps of the last two states from being overwritten: two,
    because a process may die after it took a state and before it finished the checkpoint that this state is for.

    Simulators cannot be restored, so the first step ever and the first after ``restore`` must begin a new episode in
    every environment.

    Args:
        capacity_per_environment: Steps of each environment that can be sampled; older ones are forgotten.
        num_environments: E.
        observation_size: O.
        goal_size: G.
        action_size: A.
        gamma: Discount of the hindsight goals, above 0 and at most 1; 1 draws them uniformly.
        folder: Where the memory-mapped files lie; None keeps everything in memory, and then there is no state to keep.
        max_unsaved_steps: With a folder, the most steps of each environment between two calls of ``state``; as many as
            the capacity if not given.

    Raises:
        ValueError: A size or ``gamma`` is out of its range.
        ReplayError: The files cannot be made, or are those of another replay.
    """

    def __init__(
        self,
        *,
        capacity_per_environment: int,
        num_environments: int,
        observation_size: int,
        goal_size: int,
        action_size: int,
        gamma: float = 0.99,
        folder: Path | None = None,
        max_unsaved_steps: int | None = None,
    ) -> None:
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma={gamma!r}: must be above 0 and at most 1")
        self.gamma = gamma
        self.folder = folder
        self.layout = {
            "capacity_per_environment": capacity_per_environment,
            "num_environments": num_environments,
            "observation_size": observation_size,
            "goal_size": goal_size,
            "action_size": action_size,
            "max_unsaved_steps": capacity_per_environment if max_unsaved_steps is None else max_unsaved_steps,
        }
        for name, value in self.layout.items():
            if value < 1:
                raise ValueError(f"{name}={value!r}: must be at least 1")
        self._capacity = capacity_per_environment
        self._num_environments = num_environments
        self._num_slots = _num_slots(self.layout) if folder else capacity_per_environment
        self._num_taken = 0
        self._first_protected = self._taken_at_last_state = 0
        self._must_start = True
        arrays = {
            name: open_array(folder, name, (self._num_slots, *shape), dtype)
            for name, (shape, dtype) in _arrays(self.layout).items()
        }
        self._observation, self._action, self._achieved = (
            arrays[n] for n in ("observation", "action", "achieved_goal")
        )
        self._episode, self._last_step, self._step = (arrays[n] for n in ("episode", "last_step", "step"))
        self._flat = [array.reshape(-1, array.shape[-1]) for array in (self._observation, self._action, self._achieved)]

    @staticmethod
    def num_bytes(
        *,
        capacity_per_environment: int,
        num_environments: int,
        observation_size: int,
        goal_size: int,
        action_size: int,
        max_unsaved_steps: int | None = None,
    ) -> int:
        """Bytes that a replay of these sizes takes in its folder."""
        layout = {
            "capacity_per_environment": capacity_per_environment,
            "num_environments": num_environments,
            "observation_size": observation_size,
            "goal_size": goal_size,
            "action_size": action_size,
            "max_unsaved_steps": capacity_per_environment if max_unsaved_steps is None else max_unsaved_steps,
        }
        return sum(
            _num_slots(layout) * int(np.prod(shape)) * np.dtype(dtype).itemsize
            for shape, dtype in _arrays(layout).values()
        )

    @property
    def num_steps(self) -> int:
        """Steps that can be sampled, of all environments together."""
        return min(self._num_taken, self._capacity) * self._num_environments

    @property
    def num_steps_taken(self) -> int:
        """Steps of each environment since the beginning, forgotten ones included."""
        return self._num_taken

    @property
    def num_episodes(self) -> int:
        """Episodes of which at least one step can be sampled, of all environments together."""
        if not self._num_taken:
            return 0
        newest = self._episode[(self._num_taken - 1) % self._num_slots]
        oldest = self._episode[self._oldest_step % self._num_slots]
        return int((newest - oldest + 1).sum())

    @property
    def _oldest_step(self) -> int:
        return max(0, self._num_taken - self._capacity)

    def append(
        self,
        *,
        observation: npt.ArrayLike,
        action: npt.ArrayLike,
        next_achieved_goal: npt.ArrayLike,
        episode_start: npt.ArrayLike,
    ) -> None:
        """Keeps one step of every environment.

        Args:
            observation: Before the action, [E, O].
            action: [E, A].
            next_achieved_goal: Achieved after the action, [E, G]: where the step ended an episode, that of its final
                observation and not that of the next episode.
            episode_start: Whether this is the first step of an episode, [E], bool.

        Raises:
            ValueError: A shape is wrong, or the first step does not begin an episode everywhere.
            ReplayError: More than ``max_unsaved_steps`` were taken since the last state.
        """
        step, slot = self._num_taken, self._num_taken % self._num_slots
        starts = np.asarray(episode_start, dtype=bool)
        if starts.shape != (self._num_environments,):
            raise ValueError(f"episode_start has the shape {starts.shape}: must be ({self._num_environments},)")
        if self._must_start and not starts.all():
            raise ValueError(
                f"episode_start is False for environment {int(np.argmin(starts))}: the first step, or the first after "
                "restore, begins a new episode everywhere; reset the environments"
            )
        values = {"observation": observation, "action": action, "next_achieved_goal": next_achieved_goal}
        for (name, value), target in zip(
            values.items(), (self._observation, self._action, self._achieved), strict=True
        ):
            if np.shape(value) != target.shape[1:]:
                raise ValueError(f"{name} has the shape {np.shape(value)}: must be {target.shape[1:]}")
        if self.folder and self._first_protected <= step - self._num_slots < self._taken_at_last_state:
            raise ReplayError(
                f"step {step} of each environment would overwrite one that a state taken at step "
                f"{self._taken_at_last_state} or before it needs; take a state at least every "
                f"max_unsaved_steps={self.layout['max_unsaved_steps']} steps"
            )
        if self._must_start and not step:
            episode = np.zeros(self._num_environments, dtype=np.int64)
        else:
            episode = self._episode[slot - 1] + starts
        self._step[slot] = 0
        self._observation[slot] = observation
        self._action[slot] = action
        self._achieved[slot] = next_achieved_goal
        self._episode[slot] = episode
        self._last_step[episode % self._num_slots, np.arange(self._num_environments)] = step
        self._step[slot] = step + 1
        self._num_taken += 1
        self._must_start = False

    def sample(self, batch_size: int, rng: np.random.Generator) -> ReplayBatch:
        """Draws steps, with replacement, and a hindsight goal for each.

        Args:
            batch_size: B.
            rng: The only source of chance.

        Returns:
            The batch.

        Raises:
            ReplayError: Nothing was kept yet.
        """
        if not self._num_taken:
            raise ReplayError("the replay is empty: append steps before sampling")
        draws = rng.integers(self.num_steps, size=batch_size)
        step, environment = np.divmod(draws, self._num_environments)
        step += self._oldest_step
        slot = step % self._num_slots
        episode = self._episode[slot, environment]
        num_future = self._last_step[episode % self._num_slots, environment] - step + 1
        goal_step = step + draw_offsets(num_future, self.gamma, rng) - 1
        row = slot * self._num_environments + environment
        goal_row = goal_step % self._num_slots * self._num_environments + environment
        observations, actions, achieved = self._flat
        return ReplayBatch(
            observation=torch.from_numpy(observations.take(row, axis=0)),
            action=torch.from_numpy(actions.take(row, axis=0)),
            goal=torch.from_numpy(achieved.take(goal_row, axis=0)),
        )

    def flush(self) -> None:
        """Writes the files through to the disk, so that they outlive the machine's sudden end too."""
        for array in (self._observation, self._action, self._achieved, self._episode, self._last_step, self._step):
            if isinstance(array.base, np.memmap):
                array.base.flush()

    def state(self) -> dict[str, Any]:
        """Flushes, and says what ``restore`` needs to come back to this moment; plain JSON.

        Raises:
            ReplayError: The replay has no folder.
        """
        if not self.folder:
            raise ReplayError("the replay is kept in memory only: give it a folder to keep its state")
        self.flush()
        # The first state of all has none before it that could be gone back to.
        self._first_protected = max(0, (self._taken_at_last_state or self._num_taken) - self._capacity)
        self._taken_at_last_state = self._num_taken
        return {"format_version": FORMAT_VERSION, "num_steps_taken": self._num_taken, "layout": dict(self.layout)}

    def restore(self, state: dict[str, Any]) -> None:
        """Brings back the replay of one of the last two states; its files must lie in the folder.

        Args:
            state: What ``state`` returned.

        Raises:
            ReplayError: The state is that of another replay, or the files no longer hold its steps.
        """
        if not self.folder:
            raise ReplayError("the replay is kept in memory only: give it the folder of the state")
        if state.get("format_version") != FORMAT_VERSION:
            raise ReplayError(f"format_version={state.get('format_version')!r}: this replay reads {FORMAT_VERSION}")
        for name, value in self.layout.items():
            if state["layout"].get(name) != value:
                raise ReplayError(f"{name} is {state['layout'].get(name)!r} in the state and {value!r} here")
        num_taken = int(state["num_steps_taken"])
        steps = np.arange(max(0, num_taken - self._capacity), num_taken)
        if (lost := self._step[steps % self._num_slots] != steps + 1).any():
            raise ReplayError(
                f"{self.folder}: {int(lost.sum())} of the {len(steps)} steps of this state are not in its files any "
                "more; only the last two states can be restored"
            )
        self._num_taken = self._taken_at_last_state = num_taken
        self._first_protected = max(0, num_taken - self._capacity)
        self._must_start = True
        if num_taken:
            # The episode that was under way then may have gone on in the files.
            newest = self._episode[(num_taken - 1) % self._num_slots] % self._num_slots
            self._last_step[newest, np.arange(self._num_environments)] = num_taken - 1


def _num_slots(layout: dict[str, int]) -> int:
    return layout["capacity_per_environment"] + 2 * layout["max_unsaved_steps"]


def _arrays(layout: dict[str, int]) -> dict[str, tuple[tuple[int, ...], npt.DTypeLike]]:
    """Shape without the slots, and type, of each array.

    ``episode`` numbers the episodes of an environment; ``last_step`` says by that number (modulo S) which step is the
    episode's last one so far; ``step`` says which step a slot holds, plus one, and 0 for none.
    """
    num_environments = layout["num_environments"]
    return {
        "observation": ((num_environments, layout["observation_size"]), np.float32),
        "action": ((num_environments, layout["action_size"]), np.float32),
        "achieved_goal": ((num_environments, layout["goal_size"]), np.float32),
        "episode": ((num_environments,), np.int64),
        "last_step": ((num_environments,), np.int64),
        "step": ((), np.int64),
    }
