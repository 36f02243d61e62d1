"""Converting a gated checkpoint into the project's own format, or into another packing.

The result grows in ``TARGET.partial`` beside a journal of finished shards, and takes its name by one rename when all
of it is there: TARGET is whole or does not exist. A killed conversion goes on where it stopped when started again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gated_serving.attention.config import Packing
from gated_serving.llm.checkpoints.doctor import OWN_FORMATS, examine
from gated_serving.llm.checkpoints.errors import ConversionError
from gated_serving.llm.checkpoints.folder import find_folder, read_config
from gated_serving.llm.checkpoints.formats import Format, recognise
from gated_serving.llm.checkpoints.headers import read_headers
from gated_serving.llm.checkpoints.layout import Layout
from gated_serving.llm.checkpoints.repacking import make_tensor, plan_outputs, repacked_layout
from gated_serving.llm.checkpoints.shards import (
    Shard,
    TensorReader,
    file_digest,
    plan_shards,
    write_shard,
    write_text_durably,
)
from gated_serving.llm.models.official import translate_official

DEFAULT_MAX_SHARD_BYTES = 2_000_000_000
JOURNAL = ".conversion.json"
JOURNAL_VERSION = 1

_COMPANIONS = (
    "tokenizer*", "vocab*", "merges.txt", "*.tiktoken", "*.model", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "generation_config.json", "LICENSE*",
)  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB|KIB|MIB|GIB|TIB)?", re.IGNORECASE)
_UNITS = {"B": 1} | {f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)}
_UNITS |= {f"{unit}IB": 1024**power for power, unit in enumerate("KMGT", 1)}

ProgressCallback = Callable[[int, int], None]
"""Told the bytes written (or found finished) so far, and of the whole."""


def parse_size(text: str) -> int:
    """Bytes from a size such as ``2GB`` or ``500MiB``.

    Raises:
        ValueError: Not such a size, zero, or beyond any disk's.
    """
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * _UNITS[(match[2] or "B").upper()] if match else 0.0
    num_bytes = int(size) if size < math.inf else 0
    if num_bytes < 1:
        raise ValueError(f"max shard size {text!r}: must be a size such as 2GB or 500MiB")
    return num_bytes


def convert(
    source: str | Path,
    target: str | Path,
    *,
    packing: Packing | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    on_progress: ProgressCallback | None = None,
) -> Path:
    """Writes a gated checkpoint in the project's own format, bit for bit the same weights.

    Args:
        source: A checkpoint folder in the released format or the project's own, or a repository on the hub.
        target: The folder to make; must not exist, or be empty.
        packing: Where the gate's rows shall lie; None keeps them where they are.
        max_shard_bytes: Bytes of data in a file at most, unless a single tensor is larger.
        on_progress: Told after every tensor.

    Returns:
        The target folder.

    Raises:
        ConversionError: The source is ungated, damaged or changed meanwhile, the target is taken, or the disk is full.
        UnreadableCheckpoint: The source cannot be read.
    """
    folder = find_folder(source, download=True)
    target = _check_target(folder, Path(target))
    job = _plan(folder, packing, max_shard_bytes)
    partial = target.with_name(target.name + ".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _own_partial(partial):
            _write(job, partial, on_progress or (lambda done, total: None))
            if job.current_fingerprint() != job.fingerprint:
                raise ConversionError(
                    f"{folder}: its files changed while they were converted, so what was written may be a mixture; "
                    "the same command starts afresh once they stay as they are"
                )
            partial.rename(target)
            _sync_folder(target.parent)
            (target / JOURNAL).unlink()
    except OSError as error:
        raise ConversionError(
            f"{target}: not written ({error}); what is finished lies in {partial}, and the same command goes on from "
            "there once the cause is mended"
        ) from error
    return target


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One conversion, settled before anything is written."""

    folder: Path
    config: dict[str, Any]
    source: Layout
    target: Layout
    shards: list[Shard]
    max_shard_bytes: int
    source_files: tuple[Path, ...]
    fingerprint: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", self.current_fingerprint())

    def current_fingerprint(self) -> dict[str, Any]:
        """What must be the same for finished shards to be kept."""
        assert self.target.gate is not None
        stats = {path.name: path.stat() for path in self.source_files}
        return {
            "version": JOURNAL_VERSION,
            "packing": str(self.target.gate.packing),
            "max_shard_bytes": self.max_shard_bytes,
            "source": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        }

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)


def _check_target(source: Path, target: Path) -> Path:
    """Where the target lies, links followed, once it is known to be free."""
    try:
        target = target.resolve()
        source = source.resolve()
        is_taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, a loop of links, a NUL in it
        raise ConversionError(f"{target}: cannot be a folder here: {error}") from error
    if target == source:
        raise ConversionError(f"{target}: is the source itself; name another folder")
    if is_taken:
        raise ConversionError(f"{target}: already there and not an empty folder; name another, or remove it first")
    return target


def _plan(folder: Path, packing: Packing | None, max_shard_bytes: int) -> _Job:
    diagnosis = examine(folder)
    if diagnosis.format not in (Format.OFFICIAL, *OWN_FORMATS):
        found = diagnosis.problems[0].message if diagnosis.problems else f"its format is {diagnosis.format}"
        raise ConversionError(f"{folder}: no gated checkpoint that can be converted: {found}")
    if not diagnosis.servable:
        listed = "; ".join(problem.message for problem in diagnosis.problems[:3])
        raise ConversionError(f"{folder}: damaged, see `gated-serving doctor {folder}`: {listed}")
    config, headers = read_config(folder), read_headers(folder)
    if config.get("quantization_config"):
        raise ConversionError(
            f"{folder}: quantization_config is set, and the rows of quantised weights cannot be moved; convert the "
            "unquantised checkpoint, or serve this one as it is"
        )
    source = recognise(config).layout
    assert source is not None
    assert source.gate is not None
    target = repacked_layout(source, packing or source.gate.packing)
    return _Job(
        folder=folder,
        config=_converted_config(config, target),
        source=source,
        target=target,
        shards=plan_shards(plan_outputs(headers, source, target), max_shard_bytes),
        max_shard_bytes=max_shard_bytes,
        source_files=tuple(sorted({header.file for header in headers.values()} | {folder / "config.json"})),
    )


def _converted_config(config: dict[str, Any], target: Layout) -> dict[str, Any]:
    assert target.gate is not None
    if config["model_type"] not in OWN_FORMATS:
        config = translate_official(config)
    # Code that came with the source describes the source's format.
    return {name: value for name, value in config.items() if name != "auto_map"} | target.gate.to_fields()


@contextlib.contextmanager
def _own_partial(partial: Path) -> Iterator[None]:
    """Makes the partial folder, and keeps a second conversion out of it; the lock ends with the process."""
    if partial.exists() and any(partial.iterdir()) and not (partial / JOURNAL).is_file():
        raise ConversionError(f"{partial}: in the way and not left by a conversion; move or remove it")
    partial.mkdir(exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConversionError(f"{partial}: another conversion is writing here; wait for it to end") from None
        yield
    finally:
        os.close(handle)


def _write(job: _Job, partial: Path, on_progress: ProgressCallback) -> None:
    finished = _resume(job, partial)
    missing_bytes = job.num_bytes - sum(shard.num_bytes for shard in job.shards if shard.file in finished)
    free_bytes = shutil.disk_usage(partial).free
    if missing_bytes > free_bytes:
        if not finished:
            shutil.rmtree(partial)
        raise ConversionError(
            f"{partial}: {missing_bytes / 1e9:.2f} GB are still to be written but only "
            f"{free_bytes / 1e9:.2f} GB are free"
        )
    reader, done = TensorReader(), 0

    def wrote(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        on_progress(done, job.num_bytes)

    for shard in job.shards:
        if shard.file in finished:
            wrote(shard.num_bytes)
            continue
        finished[shard.file] = write_shard(
            partial / shard.file,
            shard,
            lambda output: make_tensor(output, reader.read, job.source, job.target),
            wrote,
        )
        reader.release()
        _write_journal(job, partial, finished)
    _write_companions(job, partial)
    _sync_folder(partial)


def _resume(job: _Job, partial: Path) -> dict[str, str]:
    """Files that are finished and unharmed, with their digests; everything else in the folder is removed."""
    finished: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        journal = json.loads((partial / JOURNAL).read_text())
        if journal["fingerprint"] == job.fingerprint:
            finished = {
                shard.file: journal["finished"][shard.file]
                for shard in job.shards
                if shard.file in journal["finished"]
                and (partial / shard.file).is_file()
                and file_digest(partial / shard.file) == journal["finished"][shard.file]
            }
    _write_journal(job, partial, finished)
    for file in partial.iterdir():
        if file.name not in finished and file.name != JOURNAL:
            file.unlink()
    return finished


def _write_journal(job: _Job, partial: Path, finished: dict[str, str]) -> None:
    write_text_durably(partial / JOURNAL, json.dumps({"fingerprint": job.fingerprint, "finished": finished}))


def _write_companions(job: _Job, partial: Path) -> None:
    if len(job.shards) > 1:
        weight_map = {output.name: shard.file for shard in job.shards for output in shard.outputs}
        index = {"metadata": {"total_size": job.num_bytes}, "weight_map": weight_map}
        write_text_durably(partial / "model.safetensors.index.json", json.dumps(index, indent=2))
    for pattern in _COMPANIONS:
        for file in job.folder.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, partial / file.name)
    write_text_durably(partial / "config.json", json.dumps(job.config, indent=2) + "\n")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
