"""Which later moment of an episode becomes the goal of a step: a geometric distribution, cut off at the episode's end.

Legend: B batch.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def draw_offsets(num_future: npt.NDArray[np.int64], gamma: float, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draws how many steps ahead each goal lies, with P(d) proportional to ``gamma ** d`` for d = 1 ... ``num_future``.

    The distribution function is (1 - gamma^d) / (1 - gamma^n), which has a closed inverse, so a batch costs one random
    number and two logarithms a step however long the episodes are. ``hindsight_reference`` has the plain form.

    Args:
        num_future: Later moments that there are, [B], each at least 1.
        gamma: Above 0 and at most 1; 1 is the uniform distribution.
        rng: Source of the draws; B numbers are taken from it.

    Returns:
        Offsets d, [B], from 1 to ``num_future``.
    """
    uniform = rng.random(num_future.shape[0])
    if gamma == 1.0:
        offsets = 1.0 + np.floor(uniform * num_future)
    else:
        log_gamma = math.log(gamma)
        mass = -np.expm1(log_gamma * num_future)
        offsets = 1.0 + np.floor(np.log1p(-uniform * mass) / log_gamma)
    # Rounding can land on num_future + 1 where the uniform number is just below 1.
    return np.minimum(offsets.astype(np.int64), num_future)
