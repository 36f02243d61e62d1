"""Checkpoints that are whole or not there, and a final model that is whole or not there.

The Trainer writes a checkpoint file by file. A process that is killed meanwhile leaves a folder that looks like a
checkpoint. So a marker file is written last, and only folders with a marker are resumed from.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

MARKER = "complete"
_NAME = re.compile(r"checkpoint-(\d+)")
_CONFIG = "config.json"


def mark_complete(checkpoint: Path) -> None:
    """Says that everything of a checkpoint has been written."""
    (checkpoint / MARKER).touch()


def last_complete(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end, or None."""
    complete = [(step, path) for step, path in _checkpoints(folder) if (path / MARKER).exists()]
    return max(complete)[1] if complete else None


def step_of(checkpoint: Path) -> int:
    """The optimiser step at which a checkpoint was written."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint}: not named checkpoint-STEP")
    return int(match[1])


def remove_incomplete(folder: Path) -> list[Path]:
    """Deletes checkpoints that were not written to their end, and returns their paths."""
    broken = [path for _, path in _checkpoints(folder) if not (path / MARKER).exists()]
    for path in broken:
        shutil.rmtree(path)
    return broken


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a finished model: its config is written last."""
    return (folder / _CONFIG).is_file()


def publish_files(staging: Path, folder: Path) -> None:
    """Moves a finished model's files into ``folder``, the config last: without it, nothing loads the rest.

    Both must lie on one file system. ``staging`` is gone afterwards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _CONFIG).unlink(missing_ok=True)
    for path in sorted(staging.iterdir(), key=lambda path: path.name == _CONFIG):
        path.replace(folder / path.name)
    staging.rmdir()


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    return [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
