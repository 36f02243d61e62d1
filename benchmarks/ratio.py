"""How two sides compare that were measured in turn, round by round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """One side over the other.

    Attributes:
        mean: Geometric mean of the rounds' ratios.
        error: Its standard error, relative; NaN for a single round.
    """

    mean: float
    error: float

    def verdict(self, aim: float) -> str:
        """The difference in percent, what it is worth, and whether it is within the aim."""
        reached = "reached" if abs(self.mean - 1) <= aim else "missed"
        return (
            f"{100 * (self.mean - 1):+.1f} %, standard error {100 * self.error:.1f} % "
            f"(aim within {100 * aim:g} %: {reached})"
        )


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ours over theirs.

    Args:
        ours: A figure of each round.
        theirs: The same of the other side, in the same rounds.
    """
    logs = [math.log(own / other) for own, other in zip(ours, theirs, strict=True)]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return Ratio(math.exp(statistics.mean(logs)), error)
