"""Searches the highest load that still meets the SLOs. Pure: it is told what each load showed."""

from __future__ import annotations

import math


class Sweep:
    """Doubles the load while the SLOs hold, then halves the gap between what held and what did not.

    Args:
        start: The first load, users or requests a second.
        limit: The highest load to try.
        precision: Stops when the gap is that share of the load that held.
        whole: Loads are whole numbers, as users are.
    """

    def __init__(self, *, start: float, limit: float, precision: float = 0.05, whole: bool = False) -> None:
        # A limit between two whole numbers is never reached, and the search would go on for ever.
        self._limit = max(1.0, float(math.floor(limit))) if whole else limit
        self._start = min(start, self._limit)
        self._precision = precision
        self._whole = whole
        self._held: float | None = None
        self._failed: float | None = None
        self._lowest = max(self._start / 64, 1.0 if whole else 0.0)

    @property
    def best(self) -> float | None:
        """The highest load that held; None if none did."""
        return self._held

    def next_load(self) -> float | None:
        """What to try next; None when the search is over."""
        if self._held is None and self._failed is None:
            return self._rounded(self._start)
        if self._held is None:
            assert self._failed is not None
            lower = self._rounded(self._failed / 2)
            return lower if self._lowest <= lower < self._failed else None
        if self._failed is None:
            return self._rounded(min(self._held * 2, self._limit)) if self._held < self._limit else None
        if self._failed - self._held <= self._precision * self._held:
            return None
        middle = self._rounded((self._held + self._failed) / 2)
        return middle if self._held < middle < self._failed else None

    def observe(self, load: float, *, holds: bool) -> None:
        """What a load showed."""
        if holds:
            self._held = load if self._held is None else max(load, self._held)
        else:
            self._failed = load if self._failed is None else min(load, self._failed)

    def _rounded(self, load: float) -> float:
        return float(round(load)) if self._whole else load
