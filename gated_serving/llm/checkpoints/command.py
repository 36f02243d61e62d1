"""The verbs ``doctor`` and ``convert`` of the command line."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from gated_serving.attention.config import Packing
from gated_serving.llm.checkpoints.conversion import convert, parse_size
from gated_serving.llm.checkpoints.doctor import examine
from gated_serving.llm.checkpoints.errors import CheckpointError, UnreadableCheckpoint
from gated_serving.llm.checkpoints.report import render

RIGHT, NOT_RIGHT, UNREADABLE = 0, 1, 2
INTERRUPTED = 130


def run_doctor(model: str, *, as_json: bool) -> int:
    """Prints what a checkpoint is; 0 when it can be served right, 1 when not, 2 when it cannot be read."""
    out = Console(soft_wrap=True)
    try:
        diagnosis = examine(model)
    except UnreadableCheckpoint as error:
        if as_json:
            out.file.write(json.dumps({"error": str(error)}) + "\n")
        else:
            _print_error(error)
        return UNREADABLE
    if as_json:
        out.file.write(json.dumps(diagnosis.to_json(), indent=2) + "\n")
    else:
        out.print(render(diagnosis))
    return RIGHT if diagnosis.servable else NOT_RIGHT


def run_convert(source: str, target: Path, *, packing: str | None, max_shard_size: str) -> int:
    """Converts with a progress bar; 0 when done, 1 when refused or failed, 2 when source or option is unreadable."""
    try:
        wanted = _read_packing(packing) if packing is not None else None
        max_shard_bytes = parse_size(max_shard_size)
    except ValueError as error:
        _print_error(error)
        return UNREADABLE
    progress = Progress(
        TextColumn("converting"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    )
    task = progress.add_task("converting", total=None, visible=False)  # until the first tensor: it may be refused
    try:
        with progress:
            folder = convert(
                source,
                target,
                packing=wanted,
                max_shard_bytes=max_shard_bytes,
                on_progress=lambda done, total: progress.update(task, completed=done, total=total, visible=True),
            )
    except CheckpointError as error:
        _print_error(error)
        return UNREADABLE if isinstance(error, UnreadableCheckpoint) else NOT_RIGHT
    except KeyboardInterrupt:
        _print_error("interrupted; the same command goes on from the last finished shard")
        return INTERRUPTED
    Console(soft_wrap=True).print(
        f"wrote {escape(str(folder))}; serve it with: gated-serving serve {escape(str(folder))}"
    )
    return RIGHT


def _read_packing(text: str) -> Packing:
    try:
        return Packing(text)
    except ValueError:
        known = ", ".join(Packing)
        raise ValueError(f"--packing {text!r}: must be one of {known}") from None


def _print_error(error: object) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error[/]: {escape(str(error))}", highlight=False)
