"""What ``gated-serving train-llm`` does once its arguments are parsed."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from gated_serving.llm.recipes import RECIPES, find_recipe
from gated_serving.llm.training.overrides import apply_overrides, read_settings
from gated_serving.llm.training.settings import TrainingRun

_USAGE_ERROR = 2
_INTERRUPTED = 130


def run_command(
    recipe: str | None, overrides: Sequence[str], *, output: Path | None, resume: bool, list_recipes: bool
) -> int:
    """Runs a recipe and returns the exit code: 0 when done, 2 when what was asked for cannot be done.

    Args:
        recipe: Name of the recipe.
        overrides: Each ``section.field=value``.
        output: The run's folder; ``runs/RECIPE`` if None.
        resume: Go on with a run that was stopped.
        list_recipes: Only list the recipes.
    """
    console = Console(stderr=True)
    if list_recipes:
        _list(Console())
        return 0
    if recipe is None:
        console.print("train-llm: name a recipe; --list shows them", markup=False)
        return _USAGE_ERROR
    folder = output or Path("runs") / recipe
    try:
        base = find_recipe(recipe)
        if resume and (settings := read_settings(folder)) is not None and settings.name == base.name:
            base = settings  # so that a resumed run needs none of its overrides again
        run = apply_overrides(base, overrides)
    except (ValueError, OSError) as error:
        console.print(f"train-llm: {error}", markup=False, soft_wrap=True)
        return _USAGE_ERROR
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)

    # Only now, so that a mistyped recipe is answered at once.
    from gated_serving.llm.training.session import RECORD, UnusableInputError, train
    from gated_serving.run_folder import OutputFolderError

    try:
        train(run, folder, resume=resume, progress=sys.stderr.isatty())
    except (OutputFolderError, UnusableInputError) as error:
        console.print(f"train-llm: {error}", markup=False, soft_wrap=True)
        return _USAGE_ERROR
    except KeyboardInterrupt:
        again = f"gated-serving train-llm {recipe} --output {folder} --resume"
        console.print(f"train-llm: stopped; go on from the last checkpoint with: {again}", markup=False, soft_wrap=True)
        return _INTERRUPTED
    if int(os.environ.get("RANK", "0")) == 0:
        record = json.loads((folder / RECORD).read_text())
        console.print(f"held-out loss {record['held_out_loss']:.4f} nats a token", markup=False)
        console.print(
            f"the model is in {folder}; serve it with: gated-serving serve {folder}", markup=False, soft_wrap=True
        )
    return 0


def _list(console: Console) -> None:
    for name, make in RECIPES.items():
        summary = (make.__doc__ or "").strip().splitlines()[0].replace("``", "")
        console.print(f"{name:24} {summary}", markup=False, soft_wrap=True, highlight=False)
    sections = [field.name for field in fields(TrainingRun) if field.name != "name"]
    console.print(f"Sections of an override: {', '.join(sections)}", markup=False, soft_wrap=True, highlight=False)
