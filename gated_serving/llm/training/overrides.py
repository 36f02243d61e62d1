"""A run's settings from text: overrides ``section.field=value`` of the command line, and a run's own ``run.json``."""

from __future__ import annotations

from pathlib import Path

from gated_serving import run_settings
from gated_serving.llm.training.settings import TrainingRun
from gated_serving.run_settings import apply_overrides

__all__ = ["apply_overrides", "read_settings"]


def read_settings(folder: Path) -> TrainingRun | None:
    """The settings that a run's folder was started with, or None where it holds no run.

    Raises:
        ValueError: Its ``run.json`` cannot be read.
    """
    return run_settings.read_settings(folder, TrainingRun)
