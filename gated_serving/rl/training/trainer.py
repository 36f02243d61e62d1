"""The loop: rounds of steps and updates, with logs, evaluations and checkpoints at their ends.

A run goes on after a kill as if nothing had happened, bit by bit on one machine with the same number of threads. What
cannot be kept is a simulator in the middle of an episode, so every checkpoint ends the episodes under way, in a run
that goes on as in one that is resumed.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gated_serving.rl.environments import GoalVectorEnvironment
from gated_serving.rl.replay import EpisodeReplay
from gated_serving.rl.settings import TrainingRun
from gated_serving.rl.training import checkpoints
from gated_serving.rl.training.collection import Collector
from gated_serving.rl.training.curve import CURVE, draw_curve
from gated_serving.rl.training.evaluation import EVALUATION_SEED, FINAL_SEED, Evaluation, evaluate
from gated_serving.rl.training.learner import Learner
from gated_serving.rl.training.progress import ProgressDisplay
from gated_serving.rl.training.schedule import Round, Schedule
from gated_serving.rl.training.stopping import StopRequest, TrainingStoppedError
from gated_serving.rl.training.telemetry import MetricsLog, read_metrics

logger = logging.getLogger(__name__)

STATE_VERSION = 1
_ADVICE = "training diverged; try a lower learning_rate or optimisation.max_grad_norm=1, in another --output"


class TrainingDivergedError(Exception):
    """A loss or a parameter is no finite number any more."""


@dataclass
class Position:
    """How far a run is.

    Args:
        round: Rounds done.
        environment_steps: Steps of all environments together, random ones included.
        updates: Updates done.
        updates_in_round: Updates done of a round that was stopped amid; its steps have been taken. 0 between rounds.
        measured_round: Round after which the policy was last measured.
        seconds: Time spent, evaluations included, breaks between a stop and its resumption left out.
        untrained: What the policy of before the first update reached on the two sets of episodes.
        best: What the best policy reached so far, with its ``environment_steps`` and ``updates``.
    """

    round: int = 0
    environment_steps: int = 0
    updates: int = 0
    updates_in_round: int = 0
    measured_round: int = -1
    seconds: float = 0.0
    untrained: dict[str, dict[str, Any]] = field(default_factory=dict)
    best: dict[str, Any] | None = None


class Trainer:
    """One run in progress.

    Args:
        run: The settings.
        folder: The run's folder.
        learner: What learns.
        environments: Where it acts.
        evaluations: Where it is measured.
        replay: What is kept.
    """

    def __init__(
        self,
        run: TrainingRun,
        folder: Path,
        *,
        learner: Learner,
        environments: GoalVectorEnvironment,
        evaluations: GoalVectorEnvironment,
        replay: EpisodeReplay,
    ) -> None:
        self.run = run
        self.folder = folder
        self.learner = learner
        self.position = Position()
        self.schedule = Schedule(run)
        self._environments = environments
        self._evaluations = evaluations
        self._replay = replay
        self._collector = Collector(environments, replay)
        self._rng = np.random.default_rng(run.optimisation.seed)
        self._record = checkpoints.describe(run, environments.spec)
        self._started = time.perf_counter()
        self._since_log = _SinceLog()

    @property
    def is_done(self) -> bool:
        """Whether every round is done."""
        return self.position.round >= self.schedule.num_rounds

    @property
    def seconds(self) -> float:
        """Time spent so far; see ``Position``."""
        return time.perf_counter() - self._started

    def restore(self, last: Path) -> None:
        """Goes back to where a checkpoint was written.

        Raises:
            DamagedCheckpointError: It cannot be gone on from.
            ReplayError: The replay's files are not those of the checkpoint.
        """
        state = checkpoints.restore_learner(last, self.learner)
        try:
            if state["format_version"] != STATE_VERSION:
                raise ValueError(f"format_version={state['format_version']!r}: this trainer reads {STATE_VERSION}")
            self._rng.bit_generator.state = state["numpy_generator"]
            self._environments.restore(state["environments"])
            self._collector.recent_success = deque(state["recent_success"], self._collector.recent_success.maxlen)
            self.position = Position(**state["position"])
        except (ValueError, KeyError, TypeError) as error:
            raise checkpoints.DamagedCheckpointError(f"{last / checkpoints.STATE}: {error!r}") from error
        self._replay.restore(state["replay"])

    def train(self, log: MetricsLog, display: ProgressDisplay, stop: StopRequest) -> None:
        """Takes every round that is left.

        Raises:
            TrainingDivergedError: A loss or a parameter is not finite; the last checkpoint is from before.
            TrainingStoppedError: A stop was asked for; the checkpoint is of now, unless not even the random steps were
                done.
        """
        self._started = time.perf_counter() - self.position.seconds
        if self.position.environment_steps == 0:
            self._begin(log, display, stop)
        else:
            self._collector.begin_episodes()
            if self.position.best is not None:
                display.evaluated(self.position.best["success_rate"])
        self._since_log = _SinceLog()
        self._measure_if_due(log, display, stop)  # where a stop came in between
        while not self.is_done:
            self._take_round(self.schedule.round(self.position.round), log, display, stop)
            # Before the checkpoint, so that what is logged at one moment is in it as a whole or not at all.
            self._measure_if_due(log, display, stop)
            if self.position.round % self.run.runtime.save_rounds == 0 or self.is_done:
                log.flush()
                self._save()

    def evaluate_best(self, stop: StopRequest) -> Evaluation:
        """The best policy on the episodes that chose nothing; its checkpoint says so from now on.

        Raises:
            TrainingStoppedError: A stop was asked for.
            DamagedCheckpointError: Its checkpoint cannot be read.
        """
        found = self._evaluate(self.best_policy(), FINAL_SEED, self.run.evaluation.num_final_episodes, stop)
        checkpoints.add_final_evaluation(self.folder / "checkpoints" / "best", dataclasses.asdict(found))
        return found

    def best_policy(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The best policy so far, on the CPU and deterministic."""
        return policy_of(checkpoints.load_actor(self.folder / "checkpoints" / "best"))

    def _begin(self, log: MetricsLog, display: ProgressDisplay, stop: StopRequest) -> None:
        """What the policy is worth before it has learned anything, and the random steps."""
        final = self._evaluate(self._act, FINAL_SEED, self.run.evaluation.num_final_episodes, stop)
        self.position.untrained["final"] = dataclasses.asdict(final)
        chosen = self._measure("random", log, display, stop)
        self.position.untrained["evaluation"] = dataclasses.asdict(chosen)
        logger.info("untrained: success %.1f%% of %d episodes", 100 * final.success_rate, final.num_episodes)
        self._collector.begin_episodes()
        began = time.perf_counter()
        num_steps = self.schedule.num_random_steps // self.run.collection.num_environments
        observations, goals = self._collector.take_random(num_steps, self._rng)
        if self.run.networks.normalize_inputs:
            self.learner.normalizer.set_from(observations, goals)
        self.position.environment_steps = self.schedule.num_random_steps
        rate = self.schedule.num_random_steps / (time.perf_counter() - began)
        display.show("random", self.position.environment_steps, {"environment_steps_per_s": rate})
        self._save()

    def _take_round(self, this: Round, log: MetricsLog, display: ProgressDisplay, stop: StopRequest) -> None:
        position, since = self.position, self._since_log
        began = time.perf_counter()
        if position.updates_in_round == 0:
            self._collector.take(self.run.collection.round_length, self._explore)
            position.environment_steps += self.schedule.num_steps_of_round
            since.environment_steps += self.schedule.num_steps_of_round
        collected = time.perf_counter()
        for learning_rate in this.learning_rates[position.updates_in_round :]:
            batch = self._replay.sample(this.batch_size, self._rng)
            since.add(self.learner.update(batch, learning_rate))
            position.updates += 1
            position.updates_in_round += 1
            if stop.signal_number is not None:
                break
        self._check_finite(this)
        since.collecting_s += collected - began
        since.updating_s += time.perf_counter() - collected
        if position.updates_in_round == len(this.learning_rates):
            position.round += 1
            position.updates_in_round = 0
            display.advance(this.stage, position.environment_steps)
            if position.round % self.run.runtime.log_rounds == 0 or self.is_done:
                self._log(this, log, display)
        if stop.signal_number is not None:
            self._save_and_stop(log, stop.signal_number)

    def _save_and_stop(self, log: MetricsLog, signal_number: int) -> None:
        log.flush()
        self._save()
        raise TrainingStoppedError(signal_number)

    def _log(self, this: Round, log: MetricsLog, display: ProgressDisplay) -> None:
        values = self._since_log.means()
        if self._collector.recent_success:
            values["training_success"] = float(np.mean(self._collector.recent_success))
        if this.learning_rates:
            values["learning_rate"] = this.learning_rates[-1]
        values["replay_steps"] = self._replay.num_steps
        log.write(self._where(this.stage), values, group="train")
        display.show(this.stage, self.position.environment_steps, values)
        self._since_log = _SinceLog()

    def _measure_if_due(self, log: MetricsLog, display: ProgressDisplay, stop: StopRequest) -> None:
        position = self.position
        due = position.round % self.run.evaluation.eval_rounds == 0 or self.is_done
        if not due or position.measured_round == position.round or position.updates_in_round:
            return
        try:
            self._measure(self.schedule.round(position.round - 1).stage, log, display, stop)
        except TrainingStoppedError as error:
            self._save_and_stop(log, error.signal_number)  # the resumed run measures first

    def _measure(self, stage: str, log: MetricsLog, display: ProgressDisplay, stop: StopRequest) -> Evaluation:
        """Evaluates the present policy, keeps it if none before was better, and draws the curve."""
        found = self._evaluate(self._act, EVALUATION_SEED, self.run.evaluation.num_episodes, stop)
        self.position.measured_round = self.position.round
        where = self._where(stage)
        values = dataclasses.asdict(found)
        log.write(where, values, group="evaluation")
        display.evaluated(found.success_rate)
        logger.info(
            "%s steps, %s updates: success %.1f%% of %d episodes (any step %.1f%%), distance at the end %.3g",
            f"{self.position.environment_steps:,}", f"{self.position.updates:,}", 100 * found.success_rate,
            found.num_episodes, 100 * found.success_rate_any, found.final_distance,
        )  # fmt: skip
        best = self.position.best
        if best is None or found.rank >= (best["success_rate"], best["time_at_goal"]):
            steps, updates = self.position.environment_steps, self.position.updates
            self.position.best = {**values, "num_environment_steps": steps, "num_updates": updates}
            checkpoints.write_checkpoint(
                self.folder / "checkpoints" / "best", self._record_of_now(self.position.best), self.learner
            )
        draw_curve(
            self.folder / CURVE, read_metrics(log.path), self.schedule.stage_bounds(),
            title=f"{self.run.name} ({self._environments.spec.id}), seed {self.run.optimisation.seed}",
        )  # fmt: skip
        return found

    def _evaluate(
        self, act: Callable[[Tensor, Tensor], Tensor], seed: int, num_episodes: int, stop: StopRequest
    ) -> Evaluation:
        def stoppable(observation: Tensor, goal: Tensor) -> Tensor:
            if stop.signal_number is not None:
                raise TrainingStoppedError(stop.signal_number)
            return act(observation, goal)

        return evaluate(
            stoppable, self._evaluations, num_episodes=num_episodes, seed=seed, success=self.run.evaluation.success
        )

    def _act(self, observation: Tensor, goal: Tensor) -> Tensor:
        return self._checked(self.learner.act(observation, goal, explore=False))

    def _explore(self, observation: Tensor, goal: Tensor) -> Tensor:
        return self._checked(self.learner.act(observation, goal, explore=True))

    def _checked(self, actions: Tensor) -> Tensor:
        if not actions.isfinite().all():
            raise TrainingDivergedError(
                f"the actor's actions are no finite numbers after update {self.position.updates}: {_ADVICE}"
            )
        return actions

    def _save(self) -> None:
        self.position.seconds = self.seconds
        state = {
            "format_version": STATE_VERSION,
            "position": dataclasses.asdict(self.position),
            "numpy_generator": self._rng.bit_generator.state,
            "environments": self._environments.state(),
            "recent_success": list(self._collector.recent_success),
            "replay": self._replay.state(),
        }
        last = self.folder / "checkpoints" / "last"
        checkpoints.write_checkpoint(last, self._record_of_now(None), self.learner, state=state)
        self._collector.begin_episodes()

    def _record_of_now(self, evaluation: dict[str, Any] | None) -> dict[str, Any]:
        steps, updates = self.position.environment_steps, self.position.updates
        return {**self._record, "num_environment_steps": steps, "num_updates": updates, "evaluation": evaluation}

    def _where(self, stage: str) -> dict[str, Any]:
        return {
            "environment_steps": self.position.environment_steps,
            "updates": self.position.updates,
            "round": self.position.round,
            "stage": stage,
            "seconds": round(self.seconds, 2),
        }

    def _check_finite(self, this: Round) -> None:
        values = self._since_log.means()
        values["parameter_norm"] = self.learner.parameter_norm().item()
        for name, value in values.items():
            if not math.isfinite(value):
                where = f"round {this.number} ({this.stage}, update {self.position.updates})"
                raise TrainingDivergedError(f"{name} is {value} in {where}: {_ADVICE}")


@dataclass
class _SinceLog:
    """Sums since the last line of the logs."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    updates: int = 0
    environment_steps: int = 0
    collecting_s: float = 0.0
    updating_s: float = 0.0

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.updates += 1

    def means(self) -> dict[str, float]:
        """Means over updates, and speeds: over all the time, evaluations and checkpoints left out."""
        names = list(self.sums)
        # One transfer for all of them, where they lie on a GPU.
        sums = torch.stack([self.sums[name].double() for name in names]).tolist() if names else []
        values = {name: value / self.updates for name, value in zip(names, sums, strict=True)}
        if seconds := self.collecting_s + self.updating_s:
            values["environment_steps_per_s"] = round(self.environment_steps / seconds, 2)
            values["updates_per_s"] = round(self.updates / seconds, 3)
            values["collecting_s"] = round(self.collecting_s, 3)
            values["updating_s"] = round(self.updating_s, 3)
        return values


def policy_of(loaded: checkpoints.LoadedActor) -> Callable[[Tensor, Tensor], Tensor]:
    """Deterministic actions of a policy that was read: from observations [B, O] and goals [B, G] to [B, A]."""

    def act(observation: Tensor, goal: Tensor) -> Tensor:
        with torch.no_grad():
            x = torch.cat([observation, goal], dim=-1)
            return loaded.actor.act(x if loaded.normalizer is None else loaded.normalizer(x))

    return act
