"""A run's folder: whose it is, with which settings, and that one process at a time writes to it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RUN_SETTINGS = "run.json"
"""Where a run's folder keeps its settings."""

_held: set[int] = set()


class OutputFolderError(Exception):
    """The output folder cannot be written to, or holds something that this run must not overwrite."""


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Makes the folder and keeps every other training out of it; the lock ends with the process.

    Raises:
        OutputFolderError: The folder cannot be made, or another training has it.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        handle = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise OutputFolderError(f"{output}: cannot be the folder of a run ({error}); give another --output") from error
    _held.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise OutputFolderError(f"{output}: another training is writing here; wait for it to end") from None
            raise OutputFolderError(f"{output}: cannot be locked ({error}); give another --output") from error
        yield
    finally:
        _held.discard(handle)
        os.close(handle)


def _let_go_in_child() -> None:
    # A worker that outlives a killed parent would keep the lock through its copy of the handle.
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def claim_folder(
    output: Path, settings: dict[str, Any], *, resume: bool, check: Callable[[dict[str, Any]], None]
) -> bool:
    """Makes the output folder this run's own, and says whether it held nothing before.

    Args:
        output: The run's folder, which exists.
        settings: The run's settings as JSON has them.
        resume: Whether a run that it holds may go on.
        check: Is called with the settings that a run was started with, and raises where it cannot go on with these.

    Raises:
        OutputFolderError: It holds a run and ``resume`` was not asked for, or other things.
    """
    path = output / RUN_SETTINGS
    try:
        if path.exists():
            if not resume:
                raise OutputFolderError(f"{output} holds a run already: go on with --resume, or give another --output")
            try:
                found = json.loads(path.read_text())
                if not isinstance(found, dict):
                    raise ValueError("not an object")
            except ValueError as error:
                raise OutputFolderError(f"{path}: cannot be read ({error!r}); give another --output") from error
            check(found)
            write_json(path, settings)
            return False
        if any(output.iterdir()):
            raise OutputFolderError(f"{output} is not empty and holds no run: give another --output")
        write_json(path, settings)
    except OSError as error:
        path.with_suffix(".partial").unlink(missing_ok=True)
        raise OutputFolderError(f"{output}: cannot be the folder of a run ({error})") from error
    return True


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file that is whole or not there."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)


def first_difference(found: Any, wanted: Any, name: str = "") -> str | None:
    """The first setting that differs, with both its values, or None; both as JSON has them."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*wanted, *(key for key in found if key not in wanted)]:
            if difference := first_difference(found.get(key), wanted.get(key), f"{name}.{key}".lstrip(".")):
                return difference
        return None
    return None if found == wanted else f"{name} is {found!r} there and {wanted!r} here"
