"""How a run shows itself in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from loadtest.compare import Comparison
from loadtest.figures import Figures
from loadtest.leader import News
from loadtest.summary import Summary


class ConsoleWatcher:
    """Live progress on standard error; lines for people between.

    Args:
        console: Where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._failed = 0

    def say(self, text: str) -> None:
        """See ``run.Watcher``."""
        self._console.print(text, highlight=False, markup=False)

    def begin(self, title: str, duration_s: float) -> None:
        """See ``run.Watcher``."""
        self._failed = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(title, total=duration_s, shown="")
        self._bar.start()

    def progress(self, done_s: float, news: Sequence[News]) -> None:
        """See ``run.Watcher``."""
        if self._bar is None or self._task is None:
            return
        self._failed += sum(item.num_failed for item in news)
        medians = [item.p50_ms for item in news if item.p50_ms is not None]
        if medians:
            number = sum(item.num_ok for item in news)
            shown = f"{number} answers, p50 {np.median(medians):.3g} ms, {self._failed} failed"
            self._bar.update(self._task, completed=done_s, shown=shown)
        else:
            self._bar.update(self._task, completed=done_s)

    def end(self) -> None:
        """See ``run.Watcher``."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def show_summary(console: Console, summary: Summary) -> None:
    """Prints what a run found."""
    for name, figures in (summary.parts or {"": summary.figures}).items():
        if name:
            console.print(f"[bold]{name}[/bold]")
        _show_figures(console, figures, name or summary.kind)
    if summary.stages:
        best = "none that was tried" if summary.best_load is None else f"{summary.best_load:g}"
        console.print(f"highest load that holds every SLO: {best}", highlight=False)
    for slo in summary.slos:
        value = "not measured" if slo.value is None else f"{slo.value:.4g}"
        word = "[green]holds[/green]" if slo.holds else "[red]does not hold[/red]"
        console.print(f"slo {slo.name}={slo.limit:g}: {value}, {word}", highlight=False)
    for note in summary.notes:
        console.print(f"[yellow]note:[/yellow] {note}", highlight=False)
    if summary.stopped_early is not None:
        console.print(f"[yellow]ended before its time:[/yellow] {summary.stopped_early}", highlight=False)


def _show_figures(console: Console, figures: Figures, kind: str) -> None:
    rates = [f"{figures.requests_per_s:.4g} requests/s"]
    if kind == "llm":
        rates.append(f"{figures.output_tokens_per_s:.4g} output tokens/s")
        rates.append(f"{figures.input_tokens_per_s:.4g} input tokens/s")
    if figures.goodput_per_s is not None:
        rates.append(f"goodput {figures.goodput_per_s:.4g} requests/s")
    if figures.missed_deadline_rate is not None:
        rates.append(f"{100 * figures.missed_deadline_rate:.3g} % missed deadlines")
    rates.append(f"{figures.num_ok} ok, {figures.num_failed} failed in {figures.duration_s:.1f} s")
    console.print(", ".join(rates), highlight=False, soft_wrap=True)
    for kind_of, number in figures.failures.items():
        console.print(f"  failed: {kind_of}: {number}", highlight=False)
    table = Table("ms", "mean", "p50", "p90", "p99", "max", box=None)
    for name, stats in (
        ("TTFT", figures.ttft_ms),
        ("ITL", figures.itl_ms),
        ("TPOT", figures.tpot_ms),
        ("latency", figures.latency_ms),
        ("service time", figures.service_ms if kind != "llm" else None),
    ):
        if stats is not None:
            values = (stats.mean, stats.p50, stats.p90, stats.p99, stats.max)
            table.add_row(name, *(f"{value:.4g}" for value in values))
    if table.row_count:
        console.print(table)


def show_comparison(console: Console, comparison: Comparison, names: tuple[str, str]) -> None:
    """Prints two runs side by side."""
    table = Table("", *names, "change", "95 % of the difference", "", box=None)
    for change in comparison.changes:
        relative = "" if change.relative is None else f"{100 * change.relative:+.1f} %"
        color = "red" if change.is_worse else "green" if change.is_real else "dim"
        table.add_row(
            change.name,
            f"{change.before:.4g}",
            f"{change.after:.4g}",
            relative,
            f"{change.low:.3g} to {change.high:.3g}",
            f"[{color}]{change.verdict}[/{color}]",
        )
    console.print(table)
    for note in comparison.notes:
        console.print(f"[yellow]note:[/yellow] {note}", highlight=False)
