"""Which round belongs to which stage, how many updates it has, and at which learning rate.

Everything follows from the number of a round, so that a resumed run needs nothing but that number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gated_serving.rl.settings import StageSettings, TrainingRun


@dataclass(frozen=True)
class Round:
    """What happens after a round's steps have been taken.

    Args:
        number: Of all rounds, from 0.
        stage: Name of its stage.
        batch_size: Steps drawn for each update.
        learning_rates: One for each update of the round.
    """

    number: int
    stage: str
    batch_size: int
    learning_rates: tuple[float, ...]


class Schedule:
    """The rounds of a run.

    Args:
        run: The settings.
    """

    def __init__(self, run: TrainingRun) -> None:
        steps = run.collection.num_steps_of_round
        self.num_steps_of_round = steps
        environments = run.collection.num_environments
        self.num_random_steps = math.ceil(run.collection.num_random_steps / environments) * environments
        self._stages = {name: stage for name, stage in run.stages.items() if stage.num_updates}
        self._lengths = {name: math.ceil(stage.num_environment_steps / steps) for name, stage in self._stages.items()}
        self.num_rounds = sum(self._lengths.values())
        self.num_updates = sum(stage.num_updates for stage in self._stages.values())
        self.num_environment_steps = self.num_random_steps + self.num_rounds * steps

    def round(self, number: int) -> Round:
        """The round with this number, from 0."""
        first = 0
        for name, length in self._lengths.items():
            if number < first + length:
                stage = self._stages[name]
                updates = range(
                    stage.num_updates * (number - first) // length, stage.num_updates * (number - first + 1) // length
                )
                rates = tuple(_learning_rate(stage, update) for update in updates)
                return Round(number, name, stage.batch_size, rates)
            first += length
        raise ValueError(f"there is no round {number}: the run has {self.num_rounds}")

    def stage_bounds(self) -> list[tuple[str, int, int]]:
        """Each stage with the environment steps at which it begins and ends."""
        bounds: list[tuple[str, int, int]] = []
        start = self.num_random_steps
        for name, length in self._lengths.items():
            bounds.append((name, start, start + length * self.num_steps_of_round))
            start = bounds[-1][2]
        return bounds

    def agrees_until(self, other: Schedule, num_rounds: int) -> bool:
        """Whether both are the same for so many rounds, so that a run may go over from one to the other there."""
        if num_rounds > min(self.num_rounds, other.num_rounds) or self.num_random_steps != other.num_random_steps:
            return False
        return all(self.round(number) == other.round(number) for number in range(num_rounds))


def _learning_rate(stage: StageSettings, update: int) -> float:
    num_warmup = stage.warmup_share * stage.num_updates
    return stage.learning_rate * min(1.0, (update + 1) / max(1.0, num_warmup))
