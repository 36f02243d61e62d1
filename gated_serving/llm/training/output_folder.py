"""A run's folder: whose it is, with which settings and which data, and that one process at a time writes to it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
from accelerate import PartialState
from datasets import Dataset

from gated_serving.llm.training import checkpoints
from gated_serving.llm.training.overrides import RUN_SETTINGS
from gated_serving.llm.training.settings import TrainingRun

logger = logging.getLogger(__name__)

DATA_RECORD = "data.json"
"""Where a run's folder keeps the digest of the sequences it trains on."""

_held: set[int] = set()


class OutputFolderError(Exception):
    """The output folder cannot be written to, or holds something that this run must not overwrite."""


class UnusableInputError(Exception):
    """The settings, the data or the machine cannot be used together; the message says what to change."""


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


def claim(run: TrainingRun, output: Path, *, resume: bool) -> bool:
    """Makes the output folder this run's own, and says whether it held nothing before.

    Raises:
        OutputFolderError: It holds a run and ``resume`` was not asked for, a run with other settings, or other things.
    """
    wanted = json.loads(json.dumps(dataclasses.asdict(run)))
    path = output / RUN_SETTINGS
    try:
        if path.exists():
            if not resume:
                raise OutputFolderError(f"{output} holds a run already: go on with --resume, or give another --output")
            _check_settings(run, wanted, output)
            _write(path, wanted)
            for broken in checkpoints.remove_incomplete(output / "checkpoints"):
                logger.warning("%s was not written to its end and is removed", broken)
            return False
        if any(output.iterdir()):
            raise OutputFolderError(f"{output} is not empty and holds no run: give another --output")
        _write(path, wanted)
    except OSError as error:
        path.with_suffix(".partial").unlink(missing_ok=True)
        raise OutputFolderError(f"{output}: cannot be the folder of a run ({error})") from error
    return True


def check_data(output: Path, sequences: dict[str, Dataset]) -> None:
    """Keeps a digest of the packed sequences at the first start, and compares with it later.

    Args:
        output: The run's folder.
        sequences: Packed sequences of each side.

    Raises:
        OutputFolderError: They are not those that the run began with.
    """
    path = output / DATA_RECORD
    wanted = {side: {"sha256": _digest(found), "num_sequences": len(found)} for side, found in sequences.items()}
    if path.exists():
        found = json.loads(path.read_text())
        for side in wanted:
            if found.get(side) != wanted[side]:
                raise OutputFolderError(
                    f"{output} holds a run on other data: its {side} sequences ({found.get(side)}) are not those of "
                    f"now ({wanted[side]}); bring back the documents and the tokenizer it began with, or give another "
                    "--output"
                )
        return
    if checkpoints.last_complete(output / "checkpoints") is not None:
        logger.warning("%s does not say which data it began with; that they are the same is not checked", output)
    _write(path, wanted)


def discard(output: Path) -> None:
    """Removes a new run that has no whole checkpoint, so that the same command works once what is wrong is mended."""
    if checkpoints.last_complete(output / "checkpoints") is None:
        shutil.rmtree(output, ignore_errors=True)


def _digest(sequences: Dataset) -> str:
    """SHA-256 of the token ids in order; labels and positions follow from them and the settings."""
    digest = hashlib.sha256()
    for batch in sequences.with_format("numpy").iter(batch_size=1000):
        ids = cast("dict[str, Any]", batch)["input_ids"]
        digest.update(np.ascontiguousarray(ids, dtype="<i8").tobytes())
    return digest.hexdigest()


def _write(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)


def _check_settings(run: TrainingRun, wanted: dict[str, Any], output: Path) -> None:
    try:
        found = json.loads((output / RUN_SETTINGS).read_text())
        budget = found["optimisation"]["num_tokens"]
        found["optimisation"]["num_tokens"] = run.optimisation.num_tokens
    except (ValueError, KeyError, TypeError) as error:
        raise OutputFolderError(
            f"{output / RUN_SETTINGS}: cannot be read ({error!r}); give another --output"
        ) from error
    _check_budget(run, budget, output)
    if difference := _first_difference(found, wanted):
        raise OutputFolderError(f"{output} holds a run with other settings: {difference}; give another --output")


def _check_budget(run: TrainingRun, before: int, output: Path) -> None:
    """A resumed run may have another token budget as long as its learning rate has not begun to decay.

    With ``wsd`` the steps before the decay do not depend on the budget, once the warm-up is over.
    """
    after = run.optimisation.num_tokens
    last = checkpoints.last_complete(output / "checkpoints")
    if before == after or last is None:
        return
    step = run.optimisation
    share = checkpoints.step_of(last) / run.num_steps(PartialState().num_processes)
    share_before = share * after / before
    constant = all(step.warmup_share <= done <= 1 - step.decay_share for done in (share, share_before))
    if step.schedule != "wsd" or not constant:
        raise OutputFolderError(
            f"{output} holds a run with optimisation.num_tokens={before}, not {after}: the budget can change only with "
            "schedule='wsd' and between warm-up and decay; give another --output"
        )


def _first_difference(found: Any, wanted: Any, name: str = "") -> str | None:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*wanted, *(key for key in found if key not in wanted)]:
            if difference := _first_difference(found.get(key), wanted.get(key), f"{name}.{key}".lstrip(".")):
                return difference
        return None
    return None if found == wanted else f"{name} is {found!r} there and {wanted!r} here"
