"""Reading tensors one at a time, and writing safetensors files tensor by tensor.

Neither side maps a file for longer than one shard takes, so a conversion's memory stays near one shard.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gated_serving.llm.checkpoints.errors import BrokenWeights
from gated_serving.llm.checkpoints.headers import TensorHeader, open_bin
from gated_serving.llm.checkpoints.repacking import OutputTensor

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT = 8
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Shard:
    """One file of the result and what goes into it, in order."""

    file: str
    outputs: tuple[OutputTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of data."""
        return sum(output.num_bytes for output in self.outputs)


def plan_shards(outputs: Iterable[OutputTensor], max_bytes: int) -> list[Shard]:
    """Fills shards in order; a tensor larger than ``max_bytes`` has a shard of its own."""
    groups: list[list[OutputTensor]] = [[]]
    size = 0
    for output in outputs:
        if groups[-1] and size + output.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size += output.num_bytes
    # Wide elements first, so that every tensor starts at a multiple of its element size.
    ordered = [tuple(sorted(group, key=lambda output: -output.item_size)) for group in groups]
    if len(ordered) == 1:
        return [Shard("model.safetensors", ordered[0])]
    return [
        Shard(f"model-{number:05d}-of-{len(ordered):05d}.safetensors", group) for number, group in enumerate(ordered, 1)
    ]


class TensorReader:
    """Gives tensors' data; remembers the last .bin file it opened until ``release``."""

    def __init__(self) -> None:
        self._bin_path: Path | None = None
        self._bin_tensors: dict[str, Tensor] = {}

    def read(self, header: TensorHeader) -> Tensor:
        """A tensor's data, ``header.shape``.

        Raises:
            BrokenWeights: The file is not what it was when its header was read.
        """
        if header.offset is None:
            if self._bin_path != header.file:
                self.release()
                self._bin_path, self._bin_tensors = header.file, open_bin(header.file)
            return self._bin_tensors[header.name]
        return _read_bytes(header, header.offset)

    def release(self) -> None:
        """Lets go of the .bin file."""
        self._bin_path, self._bin_tensors = None, {}


def write_shard(path: Path, shard: Shard, make: Callable[[OutputTensor], Tensor], wrote: Callable[[int], None]) -> str:
    """Writes a safetensors file; it has its name only once it is whole and on disk.

    Args:
        path: Where to.
        shard: What goes into it.
        make: Gives an output tensor's data.
        wrote: Told the bytes of every tensor written.

    Returns:
        The file's SHA-256, in hexadecimal.
    """
    digest = hashlib.sha256()
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        prefix = _header_bytes(shard.outputs)
        digest.update(prefix)
        file.write(prefix)
        for output in shard.outputs:
            data = _raw_bytes(make(output))
            digest.update(data)
            file.write(data)
            wrote(output.num_bytes)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text_durably(path: Path, text: str) -> None:
    """Replaces a small file in one step, on disk before it returns."""
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _header_bytes(outputs: Sequence[OutputTensor]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for output in outputs:
        offsets = [offset, offset + output.num_bytes]
        header[output.name] = {"dtype": output.dtype, "shape": list(output.shape), "data_offsets": offsets}
        offset += output.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _read_bytes(header: TensorHeader, offset: int) -> Tensor:
    import torch
    from safetensors.torch import _TYPES  # the one table of the two libraries' names

    buffer = bytearray(header.num_bytes)
    if not buffer:
        return torch.empty(header.shape, dtype=_TYPES[header.dtype])
    view, done = memoryview(buffer), 0
    with header.file.open("rb", buffering=0) as file:
        file.seek(offset)
        while done < len(buffer):
            count = file.readinto(view[done : done + _CHUNK_BYTES])
            if not count:
                raise BrokenWeights(f"{header.file}: ended inside {header.name}; did it change meanwhile?")
            done += count
    return torch.frombuffer(buffer, dtype=_TYPES[header.dtype]).view(header.shape)


def _raw_bytes(tensor: Tensor) -> memoryview:
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
