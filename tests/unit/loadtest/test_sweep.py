"""The search for the highest load."""

from __future__ import annotations

import pytest

from loadtest.sweep import Sweep


def search(sweep: Sweep, highest: float) -> list[float]:
    tried: list[float] = []
    while (load := sweep.next_load()) is not None:
        tried.append(load)
        assert len(tried) < 60
        sweep.observe(load, holds=load <= highest)
    return tried


@pytest.mark.parametrize("highest", [0.7, 1.0, 3.3, 97.0, 12_345.0])
def test_it_finds_the_highest_load_within_its_precision(highest: float) -> None:
    sweep = Sweep(start=1.0, limit=1e6)
    search(sweep, highest)
    assert sweep.best is not None
    assert sweep.best <= highest <= sweep.best * 1.05


@pytest.mark.parametrize("highest", [1, 2, 3, 7, 40, 41])
def test_users_are_whole(highest: int) -> None:
    sweep = Sweep(start=8, limit=1000, whole=True)
    tried = search(sweep, highest)
    assert all(load == round(load) for load in tried)
    assert len(set(tried)) == len(tried)
    assert sweep.best is not None
    assert sweep.best <= highest
    assert highest - sweep.best <= max(1, 0.05 * sweep.best)


def test_it_ends_at_its_limit() -> None:
    sweep = Sweep(start=10.0, limit=35.0)
    assert search(sweep, 1e9) == [10.0, 20.0, 35.0]
    assert sweep.best == 35.0


def test_it_ends_when_nothing_holds() -> None:
    sweep = Sweep(start=64.0, limit=1e6)
    tried = search(sweep, 0.0)
    assert sweep.best is None
    assert tried == [64.0 / 2**step for step in range(7)]


def test_a_limit_below_the_start_is_the_first_load() -> None:
    assert search(Sweep(start=100.0, limit=30.0), 1e9) == [30.0]


@pytest.mark.parametrize("start", [4.0, 50.0])
def test_users_stop_at_the_whole_number_below_the_limit(start: float) -> None:
    sweep = Sweep(start=start, limit=10.4, whole=True)
    tried = search(sweep, 1e9)
    assert tried[-1] == sweep.best == 10.0
    assert len(tried) == len(set(tried))
