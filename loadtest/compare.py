"""Two load tests side by side: what changed more than noise.

Each run is cut into blocks of time, as neighbouring requests are not independent. A figure is computed again and again
from blocks drawn with replacement (the block bootstrap: Künsch 1989); a change counts when the 95 % interval of the
difference excludes zero and it is at least ``smallest`` of the first run's value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadtest.errors import UsageError
from loadtest.record_file import read_records, write_whole
from loadtest.records import RequestRecord
from loadtest.report import charts
from loadtest.report.page import chart_html, environment, plotly_script
from loadtest.summary import Summary, read_summary

COMPARISON_FILE = "comparison.html"
_NUM_BLOCKS = 20
_NUM_DRAWS = 400
_MOST_VALUES_OF_A_BLOCK = 5_000

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One figure in both runs.

    Attributes:
        name: Such as ``p99 latency, ms``.
        before: Of the first run.
        after: Of the second.
        low: Lower end of the difference's 95 % interval.
        high: Upper end.
        is_real: Whether it is more than noise.
        is_worse: Whether it is real and for the worse.
    """

    name: str
    before: float
    after: float
    low: float
    high: float
    is_real: bool
    is_worse: bool

    @property
    def relative(self) -> float | None:
        """The difference in units of the first run's value; None if that is zero."""
        return (self.after - self.before) / self.before if self.before else None

    @property
    def verdict(self) -> str:
        """In words."""
        return "within noise" if not self.is_real else "worse" if self.is_worse else "better"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs side by side."""

    before: Summary
    after: Summary
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    latencies: tuple[Array, Array]

    @property
    def is_worse(self) -> bool:
        """Whether any figure is worse by more than noise."""
        return any(change.is_worse for change in self.changes)


def compare(before: Path, after: Path, *, smallest: float = 0.02, seed: int = 0) -> Comparison:
    """Compares two output folders.

    Args:
        before: The first run.
        after: The second.
        smallest: Changes below that share do not count, however certain.
        seed: Of the bootstrap.

    Raises:
        UsageError: A folder holds no load test, or they are of different kinds.
    """
    summaries = read_summary(before), read_summary(after)
    first, second = summaries
    if first.kind != second.kind:
        raise UsageError(
            f"{before} is a load test of kind {first.kind}, {after} of kind {second.kind}; compare alike ones"
        )
    records = tuple(_measured(folder, summary) for folder, summary in zip((before, after), summaries, strict=True))
    for folder, found in zip((before, after), records, strict=True):
        if not found:
            raise UsageError(f"{folder}: holds no measured request; there is nothing to compare")
    generator = np.random.default_rng(seed)
    changes: list[Change] = []
    for name, values_of, statistic in _DURATIONS:
        blocks = [_blocks(found, values_of) for found in records]
        if all(any(len(block) for block in side) for side in blocks):
            draws = [np.array(_draws(side, statistic, generator)) for side in blocks]
            exact = [statistic(np.concatenate(side)) for side in blocks]
            changes.append(_change(f"{name}, ms", exact, draws, smallest, higher_is_worse=True))
    for name, weigh in _RATES:
        per_block = [_rates(found, weigh) for found in records]
        if all(side.any() for side in per_block):
            draws = [generator.choice(side, (_NUM_DRAWS, len(side))).mean(axis=1) for side in per_block]
            exact = [float(side.mean()) for side in per_block]
            changes.append(_change(name, exact, draws, smallest, higher_is_worse=False))
    failures = [_block_errors(found) for found in records]
    draws = [generator.choice(side, (_NUM_DRAWS, len(side))).mean(axis=1) for side in failures]
    exact = [float(side.mean()) for side in failures]
    changes.append(_change("failed, share", exact, draws, smallest, higher_is_worse=True))
    first_latencies, second_latencies = (
        np.array([record.latency_ms for record in found if record.latency_ms is not None and record.error is None])
        for found in records
    )
    return Comparison(
        before=first,
        after=second,
        changes=tuple(changes),
        notes=tuple(_notes(first, second)),
        latencies=(first_latencies, second_latencies),
    )


def write_comparison(path: Path, comparison: Comparison, names: tuple[str, str]) -> None:
    """Writes the page.

    Args:
        path: Where to.
        comparison: What was found.
        names: Of the two runs, for people.
    """
    sides = [(name, values) for name, values in zip(names, comparison.latencies, strict=True) if len(values)]
    page = (
        environment()
        .get_template("comparison.html.jinja")
        .render(
            comparison=comparison,
            names=names,
            plotly=plotly_script(),
            chart=chart_html(charts.distributions_beside(sides)),
        )
    )
    write_whole(path, page)


def _measured(folder: Path, summary: Summary) -> list[RequestRecord]:
    records = [record for record in read_records(folder) if not record.warmup]
    if summary.stages and summary.best_load is not None:  # of a sweep the best load counts
        chosen = next(index for index, stage in enumerate(summary.stages) if stage.load == summary.best_load)
        records = [record for record in records if record.stage == chosen]
    return records


def _places(records: Sequence[RequestRecord], when: Callable[[RequestRecord], float]) -> NDArray[np.int64]:
    times = np.array([when(record) for record in records])
    span = float(times.max() - times.min()) or 1.0
    return np.minimum(((times - times.min()) / span * _NUM_BLOCKS).astype(np.int64), _NUM_BLOCKS - 1)


def _blocks(
    records: Sequence[RequestRecord], values_of: Callable[[RequestRecord], Sequence[float | None]]
) -> list[Array]:
    blocks: list[list[float]] = [[] for _ in range(_NUM_BLOCKS)]
    for record, place in zip(records, _places(records, lambda record: record.intended_s), strict=True):
        if record.error is None:
            blocks[place] += [value for value in values_of(record) if value is not None]
    thin = np.random.default_rng(0)
    return [
        np.array(block if len(block) <= _MOST_VALUES_OF_A_BLOCK else thin.choice(block, _MOST_VALUES_OF_A_BLOCK))
        for block in blocks
    ]


def _draws(blocks: Sequence[Array], statistic: Callable[[Array], float], generator: np.random.Generator) -> list[float]:
    filled = [block for block in blocks if len(block)]
    return [
        statistic(np.concatenate([filled[index] for index in generator.integers(len(filled), size=len(filled))]))
        for _ in range(_NUM_DRAWS)
    ]


def _rates(records: Sequence[RequestRecord], weigh: Callable[[RequestRecord], float]) -> Array:
    """A rate a second in each block of time."""
    ends = [record.ended_s for record in records]
    length_s = (max(ends) - min(ends)) / _NUM_BLOCKS or 1.0
    rates = np.zeros(_NUM_BLOCKS)
    for record, place in zip(records, _places(records, lambda record: record.ended_s), strict=True):
        if record.error is None:
            rates[place] += weigh(record)
    return rates / length_s


def _block_errors(records: Sequence[RequestRecord]) -> Array:
    failed, all_of = np.zeros(_NUM_BLOCKS), np.zeros(_NUM_BLOCKS)
    for record, place in zip(records, _places(records, lambda record: record.intended_s), strict=True):
        all_of[place] += 1
        failed[place] += record.error is not None
    return failed[all_of > 0] / all_of[all_of > 0]


def _change(
    name: str, exact: Sequence[float], draws: Sequence[Array], smallest: float, *, higher_is_worse: bool
) -> Change:
    before, after = exact
    low, high = (float(value) for value in np.percentile(draws[1] - draws[0], (2.5, 97.5)))
    is_real = (low > 0 or high < 0) and abs(after - before) >= smallest * abs(before)
    return Change(
        name=name,
        before=before,
        after=after,
        low=low,
        high=high,
        is_real=is_real,
        is_worse=is_real and (after > before) == higher_is_worse,
    )


def _notes(first: Summary, second: Summary) -> list[str]:
    notes = [
        f"{path}: {_at(first.settings, path)} in the first run, {_at(second.settings, path)} in the second"
        for path in _paths(first.settings) | _paths(second.settings)
        if not path.startswith(("output", "command")) and _at(first.settings, path) != _at(second.settings, path)
    ]
    for name, summary in (("first", first), ("second", second)):
        if summary.stopped_early is not None:
            notes.append(f"the {name} run ended before its time: {summary.stopped_early}")
        if summary.generator.is_limiting:
            notes.append(f"the {name} run was limited by its generator")
    return sorted(notes)


def _paths(settings: object, prefix: str = "") -> set[str]:
    if not isinstance(settings, dict):
        return {prefix}
    return {path for name, value in settings.items() for path in _paths(value, f"{prefix}.{name}" if prefix else name)}


def _at(settings: object, path: str) -> object:
    for name in path.split("."):
        settings = settings.get(name) if isinstance(settings, dict) else None
    return settings


def _quantile(share: float) -> Callable[[Array], float]:
    return lambda values: float(np.quantile(values, share))


def _mean(values: Array) -> float:
    return float(values.mean())


_DURATIONS: tuple[tuple[str, Callable[[RequestRecord], Sequence[float | None]], Callable[[Array], float]], ...] = tuple(
    (f"{label} {name}", values_of, statistic)
    for name, values_of in (
        ("TTFT", lambda record: (record.ttft_ms,)),
        ("ITL", lambda record: record.itl_ms),
        ("TPOT", lambda record: (record.tpot_ms,)),
        ("latency", lambda record: (record.latency_ms,)),
    )
    for label, statistic in (("mean", _mean), ("p50", _quantile(0.5)), ("p99", _quantile(0.99)))
)
_RATES: tuple[tuple[str, Callable[[RequestRecord], float]], ...] = (
    ("requests/s", lambda _: 1.0),
    ("output tokens/s", lambda record: float(record.output_tokens or 0)),
)
