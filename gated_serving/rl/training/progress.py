"""How a run shows where it is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)

WIDE = 150
"""Columns from which there is room for everything; below, the losses give way to the bar and the time left."""


class ProgressDisplay:
    """Shows environment steps, success and speed.

    Args:
        console: The terminal; None logs plain lines.
        total: Environment steps of the whole run.
        completed: Environment steps so far.
    """

    def __init__(self, console: Console | None, *, total: int, completed: int) -> None:
        self._total = total
        self._success: float | None = None
        self._bar: Progress | None = None
        if console is not None:
            self._bar = Progress(
                TextColumn("{task.description:8}"),
                BarColumn(bar_width=12 if console.width < WIDE else 40),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("start", total=total, completed=completed, text="")

    def advance(self, stage: str, completed: int) -> None:
        """Shows how far the run is."""
        if self._bar is not None:
            self._bar.update(self._task, description=stage, completed=completed)

    def show(self, stage: str, completed: int, values: Mapping[str, float]) -> None:
        """Shows what was logged.

        Args:
            stage: Name of the stage.
            completed: Environment steps so far.
            values: What was logged; ``training_success``, losses and speeds are shown where they are there.
        """
        parts = [f"success {self._success:.0%}"] if self._success is not None else []
        is_narrow = self._bar is not None and self._bar.console.width < WIDE
        if not is_narrow and "training_success" in values:
            parts.append(f"exploring {values['training_success']:.0%}")
        if not is_narrow and "critic_loss" in values:
            parts += [f"critic {values['critic_loss']:.3f}", f"actor {values['actor_loss']:.3f}"]
        parts.append(f"{values['environment_steps_per_s']:.0f} steps/s")
        if not is_narrow and "updates_per_s" in values:
            parts.append(f"{values['updates_per_s']:.1f} updates/s")
        text = ", ".join(parts)
        if self._bar is not None:
            self._bar.update(self._task, description=stage, completed=completed, text=text)
        else:
            logger.info("%s %s/%s steps: %s", stage, f"{completed:,}", f"{self._total:,}", text)

    def evaluated(self, success_rate: float) -> None:
        """Takes over the success that is shown from now on."""
        self._success = success_rate

    def __enter__(self) -> ProgressDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
