"""A run's folder: that it goes on with the settings and the data it was started with."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
from accelerate import PartialState
from datasets import Dataset

from gated_serving.llm.training import checkpoints
from gated_serving.llm.training.settings import TrainingRun
from gated_serving.run_folder import RUN_SETTINGS, OutputFolderError, claim_folder, first_difference, write_json

logger = logging.getLogger(__name__)

DATA_RECORD = "data.json"
"""Where a run's folder keeps the digest of the sequences it trains on."""


class UnusableInputError(Exception):
    """The settings, the data or the machine cannot be used together; the message says what to change."""


def claim(run: TrainingRun, output: Path, *, resume: bool) -> bool:
    """Makes the output folder this run's own, and says whether it held nothing before.

    Raises:
        OutputFolderError: It holds a run and ``resume`` was not asked for, a run with other settings, or other things.
    """
    wanted = json.loads(json.dumps(dataclasses.asdict(run)))
    is_new = claim_folder(
        output, wanted, resume=resume, check=lambda found: _check_settings(run, found, wanted, output)
    )
    if not is_new:
        for broken in checkpoints.remove_incomplete(output / "checkpoints"):
            logger.warning("%s was not written to its end and is removed", broken)
    return is_new


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
    write_json(path, wanted)


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


def _check_settings(run: TrainingRun, found: dict[str, Any], wanted: dict[str, Any], output: Path) -> None:
    try:
        budget = found["optimisation"]["num_tokens"]
        found["optimisation"]["num_tokens"] = run.optimisation.num_tokens
    except (KeyError, TypeError) as error:
        raise OutputFolderError(
            f"{output / RUN_SETTINGS}: cannot be read ({error!r}); give another --output"
        ) from error
    _check_budget(run, budget, output)
    if difference := first_difference(found, wanted):
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
