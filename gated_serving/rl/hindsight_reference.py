"""Plain form of the hindsight distribution, for tests: one loop over steps, one over later moments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def goal_probabilities(episode_lengths: Sequence[int], gamma: float) -> npt.NDArray[np.float64]:
    """Probability that a step gets the goal achieved after another step, for episodes that follow one another.

    The goal achieved after step k is the episode's moment k + 1, so the row of step i has gamma^(k + 1 - i) for
    k = i ... the episode's last step, divided by their sum, and zero elsewhere.

    Args:
        episode_lengths: Steps of each episode, in order.
        gamma: Discount.

    Returns:
        Rows are steps, columns the steps after which the goal was achieved, [sum of lengths, sum of lengths].
    """
    num_steps = sum(episode_lengths)
    probabilities = np.zeros((num_steps, num_steps))
    first = 0
    for length in episode_lengths:
        for i in range(first, first + length):
            weights = [gamma ** (k + 1 - i) for k in range(i, first + length)]
            for k, weight in enumerate(weights, start=i):
                probabilities[i, k] = weight / sum(weights)
        first += length
    return probabilities
