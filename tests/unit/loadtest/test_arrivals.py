"""When requests are meant to be sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loadtest.arrivals import intended_times, load_at, users_at
from loadtest.settings import LoadSettings


def open_loop(**fields: Any) -> LoadSettings:
    return LoadSettings(**({"mode": "open", "warmup_s": 0.0, "duration_s": 10.0, "rate_per_s": 50.0} | fields))


def test_constant_arrivals_are_even() -> None:
    times = list(intended_times(open_loop(arrival="constant")))
    np.testing.assert_allclose(times, np.arange(500) / 50)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", ["steady", "ramp", "steps"])
def test_processes_share_constant_arrivals(num_processes: int, shape: str) -> None:
    settings = open_loop(arrival="constant", shape=shape, start=5.0, warmup_s=1.0)
    alone = list(intended_times(settings))
    shared = [
        time
        for process in range(num_processes)
        for time in intended_times(settings, process=process, num_processes=num_processes)
    ]
    np.testing.assert_allclose(sorted(shared), alone)


def test_poisson_arrivals_are_poisson() -> None:
    times = np.array(list(intended_times(open_loop(duration_s=400.0))))
    assert abs(len(times) - 20_000) < 4 * np.sqrt(20_000)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)
    counts = np.histogram(times, np.arange(0, 401))[0]
    assert counts.var() == pytest.approx(50, rel=0.2)  # a Poisson count's variance is its mean


def test_poisson_processes_are_independent_and_add_up() -> None:
    settings = open_loop(duration_s=200.0)
    first, second = (set(intended_times(settings, process=process, num_processes=2)) for process in (0, 1))
    assert not first & second
    assert abs(len(first) + len(second) - 10_000) < 4 * 100
    assert set(intended_times(settings, process=0, num_processes=2)) == first


@pytest.mark.parametrize("arrival", ["constant", "poisson"])
def test_a_ramp_sends_as_its_rate_says(arrival: str) -> None:
    settings = open_loop(arrival=arrival, shape="ramp", start=10.0, rate_per_s=110.0, duration_s=100.0)
    times = np.array(list(intended_times(settings)))
    counts = np.histogram(times, [0, 25, 50, 75, 100])[0]
    expected = [25 * rate for rate in (22.5, 47.5, 72.5, 97.5)]
    tolerance = 1.01 if arrival == "constant" else 4 * np.sqrt(max(expected))
    assert np.abs(counts - expected).max() <= tolerance


def test_a_ramp_may_fall() -> None:
    settings = open_loop(arrival="constant", shape="ramp", start=100.0, rate_per_s=10.0)
    counts = np.histogram(list(intended_times(settings)), [0, 5, 10])[0]
    assert counts.tolist() == pytest.approx([5 * 77.5, 5 * 32.5], abs=1)


def test_steps_rise_to_the_full_load() -> None:
    settings = open_loop(arrival="constant", shape="steps", num_steps=3, start=10.0, rate_per_s=30.0, duration_s=9.0)
    counts = np.histogram(list(intended_times(settings)), [0, 3, 6, 9])[0]
    assert counts.tolist() == [30, 60, 90]


def test_the_warm_up_has_the_first_load() -> None:
    settings = open_loop(shape="ramp", start=10.0, warmup_s=5.0)
    assert [load_at(settings, time) for time in (0, 4.9, 5, 10, 15)] == pytest.approx([10, 10, 10, 30, 0])


def test_users_follow_the_shape() -> None:
    settings = LoadSettings(users=9, shape="ramp", start=1.0, warmup_s=1.0, duration_s=8.0)
    assert [users_at(settings, time) for time in (0, 1, 5, 8.99, 9)] == [1, 1, 5, 9, 0]
