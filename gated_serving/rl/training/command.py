"""What ``gated-serving train-rl`` does once its arguments are parsed."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from gated_serving.rl.recipes import RECIPES, find_recipe
from gated_serving.rl.settings import TrainingRun
from gated_serving.run_settings import apply_overrides, read_settings, sections

_FAILED = 1
_USAGE_ERROR = 2
_SIGNALLED = 128
_INTERRUPTED = 130


def run_command(
    recipe: str | None, overrides: Sequence[str], *, output: Path | None, resume: bool, list_recipes: bool
) -> int:
    """Runs a recipe and returns the exit code.

    Args:
        recipe: Name of the recipe.
        overrides: Each ``section.field=value``.
        output: The run's folder; ``runs/RECIPE`` if None.
        resume: Go on with a run that was stopped.
        list_recipes: Only list the recipes.

    Returns:
        0 when done, 1 when the training failed, 2 when what was asked for cannot be done, 130 and 143 when it was
        stopped by Ctrl-C and SIGTERM.
    """
    console = Console(stderr=True)
    if list_recipes:
        _list(Console())
        return 0
    if recipe is None:
        console.print("train-rl: name a recipe; --list shows them", markup=False)
        return _USAGE_ERROR
    folder = output or Path("runs") / recipe
    try:
        base = find_recipe(recipe)
        if resume and (settings := read_settings(folder, TrainingRun)) is not None and settings.name == base.name:
            base = settings  # so that a resumed run needs none of its overrides again
        run = apply_overrides(base, overrides)
    except (ValueError, OSError) as error:
        _complain(console, error)
        return _USAGE_ERROR
    _set_up_logging(console)

    # Only now, so that a mistyped recipe is answered at once.
    from gated_serving.rl.environments import GoalEnvironmentError, UnusableEnvironmentError
    from gated_serving.rl.training.session import RESULT, UnusableInputError, train
    from gated_serving.rl.training.stopping import TrainingStoppedError
    from gated_serving.rl.training.trainer import TrainingDivergedError
    from gated_serving.run_folder import OutputFolderError

    again = f"gated-serving train-rl {recipe} --output {folder} --resume"
    try:
        train(run, folder, resume=resume, console=console if console.is_terminal else None)
    except (OutputFolderError, UnusableInputError, UnusableEnvironmentError) as error:
        _complain(console, error)
        return _USAGE_ERROR
    except (TrainingDivergedError, GoalEnvironmentError) as error:
        _complain(console, error)
        return _FAILED
    except TrainingStoppedError as error:
        console.print(f"train-rl: {error}; go on with: {again}", markup=False, soft_wrap=True)
        return _SIGNALLED + error.signal_number
    except KeyboardInterrupt:
        console.print(f"train-rl: stopped; go on from the last checkpoint with: {again}", markup=False, soft_wrap=True)
        return _INTERRUPTED
    result = json.loads((folder / RESULT).read_text())
    final, untrained = result["final"], result["untrained"]
    console.print(
        f"success {final['success_rate']:.1%} of {final['num_episodes']} unseen episodes (untrained "
        f"{untrained['success_rate']:.1%}), in {result['seconds']:.0f} s and {result['num_environment_steps']:,} steps",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(f"the policy is in {folder / 'checkpoints' / 'best'}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _complain(console: Console, error: Exception) -> None:
    console.print(f"train-rl: {error}", markup=False, highlight=False, soft_wrap=True)


def _set_up_logging(console: Console) -> None:
    if console.is_terminal:
        # Through the console that shows the bar, so that a line does not tear it.
        handler: logging.Handler = RichHandler(console=console, show_path=False, show_level=False)
        logging.basicConfig(level=logging.INFO, format="%(message)s", datefmt="[%X]", handlers=[handler])
    else:
        form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)
    for name in ("matplotlib", "imageio", "imageio_ffmpeg", "tensorboard", "tensorflow", "OpenGL"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Gymnasium and the simulators warn of their own old names at every start.
    warnings.filterwarnings("ignore", module=r"gymnasium.*|gymnasium_robotics.*|metaworld.*|tensorboard.*")


def _list(console: Console) -> None:
    for name, make in RECIPES.items():
        summary = (make.__doc__ or "").strip().splitlines()[0].replace("``", "")
        console.print(f"{name:24} {summary}", markup=False, soft_wrap=True, highlight=False)
    console.print(
        f"Sections of an override: {', '.join(sections(TrainingRun))}", markup=False, soft_wrap=True, highlight=False
    )
