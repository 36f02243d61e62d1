"""From what was typed as MODEL to a checkpoint folder that is known to be servable."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gated_serving.llm.checkpoints import folder as checkpoint_folder
from gated_serving.llm.checkpoints.errors import CheckpointNotFound
from gated_serving.llm.serving.errors import ModelRefusedError, UsageError
from gated_serving.llm.serving.options import ServeSettings

if TYPE_CHECKING:
    from gated_serving.llm.checkpoints import Diagnosis

DEFAULT_MODEL = "tiny-python"
MAX_PROBLEMS = 12
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A checkpoint that the doctor has passed.

    Attributes:
        folder: Where it lies.
        name: What clients call it.
        summary: One line for the reader: format, gate and size.
        config: Its ``config.json``.
        weights_bytes: Size of its weight files.
    """

    folder: Path
    name: str
    summary: str
    config: dict[str, Any]
    weights_bytes: int


def find_folder(model: str) -> Path:
    """The folder MODEL means: a folder, the short name of a shipped model, or a repository in the hub's local cache.

    Raises:
        UsageError: There is no such folder.
    """
    try:
        return checkpoint_folder.find_folder(Path(model).expanduser()).resolve()
    except (CheckpointNotFound, RuntimeError) as error:  # the latter from a ~name that is nobody's
        shipped = ", ".join(checkpoint_folder.shipped_models())
        raise UsageError(
            f"{error}. MODEL is a checkpoint folder on this machine or a shipped model ({shipped})"
        ) from None


def check_model(settings: ServeSettings) -> ServedModel:
    """Run the doctor over the model and look for its tokenizer.

    Raises:
        ModelRefusedError: It cannot be served right; the message lists every problem.
        UsageError: There is no such folder, or it cannot be read as a checkpoint.
    """
    from gated_serving.llm.checkpoints import CheckpointError, examine  # not needed in the server process
    from gated_serving.llm.checkpoints.problem_groups import problem_lines

    folder = find_folder(settings.model)
    try:
        diagnosis = examine(folder)
    except (CheckpointError, OSError) as error:
        raise UsageError(f"{settings.model}: cannot be read as a checkpoint: {error}") from error
    if not diagnosis.servable:
        problems = problem_lines(diagnosis.problems) or [diagnosis.project]
        listed = "".join(f"\n  - {problem}" for problem in problems[:MAX_PROBLEMS])
        if len(problems) > MAX_PROBLEMS:
            listed += f"\n  and {len(problems) - MAX_PROBLEMS} more; gated-serving doctor --json lists them all"
        raise ModelRefusedError(f"{settings.model} (format {diagnosis.format}) cannot be served right:{listed}")
    _check_tokenizer(folder, settings)
    config = json.loads((folder / "config.json").read_text())
    weights = [path for suffix in ("safetensors", "bin") for path in folder.glob(f"*.{suffix}")]
    return ServedModel(
        folder=folder,
        name=folder.name if Path(settings.model).expanduser().is_dir() else settings.model,
        summary=_summary(diagnosis),
        config=config,
        weights_bytes=sum(path.stat().st_size for path in weights),
    )


def _check_tokenizer(folder: Path, settings: ServeSettings) -> None:
    if settings.has("--tokenizer", "--skip-tokenizer-init"):
        return
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelRefusedError(
            f"{settings.model}: has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}). Save one into the folder "
            "with tokenizer.save_pretrained(folder), or name one with --tokenizer FOLDER"
        )


def _summary(diagnosis: Diagnosis) -> str:
    gate = diagnosis.gate
    described = "no gate" if gate is None else f"{gate.granularity} gate at {gate.position}"
    return f"{diagnosis.format}, {described}, {diagnosis.num_parameters / 1e6:.1f}M parameters"
