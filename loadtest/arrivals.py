"""When the requests of an open loop are meant to be sent, and how many users a closed loop has: functions of the time.

The load over time is the warm-up at its first value, then the shape. A stream of arrivals with rate r(t) is one of rate
1 seen through the inverse of R(t), the integral of r: even steps give constant arrivals, exponential ones a Poisson
process (Lewis and Shedler 1979, section 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from loadtest.settings import LoadSettings


class Segment(NamedTuple):
    """A stretch of time on which the load changes linearly.

    Attributes:
        begin: When it begins, seconds.
        end: When it ends.
        first: The load at its begin.
        last: The load at its end.
    """

    begin: float
    end: float
    first: float
    last: float


@lru_cache(maxsize=16)
def segments(settings: LoadSettings) -> tuple[Segment, ...]:
    """The load over the whole run, warm-up included: users, or requests a second."""
    full, start = settings.full, settings.start
    begin, end = settings.warmup_s, settings.warmup_s + settings.duration_s
    if settings.shape == "ramp":
        shaped = [Segment(begin, end, start, full)]
    elif settings.shape == "steps":
        number = settings.num_steps
        loads = [full] if number == 1 else [start + (full - start) * step / (number - 1) for step in range(number)]
        length = settings.duration_s / number
        shaped = [
            Segment(begin + step * length, begin + (step + 1) * length, load, load) for step, load in enumerate(loads)
        ]
    else:
        shaped = [Segment(begin, end, full, full)]
    warm = [Segment(0.0, begin, shaped[0].first, shaped[0].first)] if begin else []
    return (*warm, *shaped)


def load_at(settings: LoadSettings, time_s: float) -> float:
    """Users or requests a second at a time; 0 after the end."""
    for segment in segments(settings):
        if time_s < segment.end:
            share = (time_s - segment.begin) / (segment.end - segment.begin)
            return segment.first + (segment.last - segment.first) * share
    return 0.0


def users_at(settings: LoadSettings, time_s: float) -> int:
    """Users of a closed loop at a time, at least one before the end."""
    load = load_at(settings, time_s)
    return max(1, round(load)) if load > 0 else 0


def intended_times(settings: LoadSettings, *, process: int = 0, num_processes: int = 1) -> Iterator[float]:
    """When one process is to send its requests, seconds from the start of the run, rising.

    Together the processes send the whole load. Constant arrivals are dealt out in turn; Poisson arrivals of 1/n of the
    rate each add up to a Poisson process of the whole rate.

    Args:
        settings: Of an open loop.
        process: Which process.
        num_processes: Of how many.
    """
    generator = np.random.default_rng((settings.seed, process, 0xA221))
    stretches = segments(settings)
    index, passed = 0, 0.0  # passed: the integral of the load up to the stretch's begin
    if settings.arrival == "constant":
        expected, step = float(process), float(num_processes)
    else:
        expected, step = generator.exponential() * num_processes, 0.0
    while index < len(stretches):
        stretch = stretches[index]
        area = (stretch.first + stretch.last) / 2 * (stretch.end - stretch.begin)
        if expected >= passed + area:
            passed += area
            index += 1
            continue
        yield stretch.begin + _time_of(expected - passed, stretch)
        expected += step or generator.exponential() * num_processes


def _time_of(area: float, stretch: Segment) -> float:
    """After which time within the stretch the load has added up to ``area``."""
    slope = (stretch.last - stretch.first) / (stretch.end - stretch.begin)
    if not slope:
        return area / stretch.first
    # The larger root of slope/2 t^2 + first t = area, in the form that does not cancel.
    return 2 * area / (stretch.first + math.sqrt(max(stretch.first**2 + 2 * slope * area, 0.0)))
