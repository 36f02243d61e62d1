"""Writes an ONNX model piece by piece, the weights one after the other.

Serializing a model at once needs its size once more, and with protobuf 6 about four times. The bytes are the same: the
fields of a message in the order of their numbers, a message inside another as tag, length and content.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO, cast

import onnx

_LARGEST_FILE = (1 << 31) - 1
_LENGTH_DELIMITED = 2
_GRAPH_FIELD = 7
_INITIALIZER_FIELD = 5


class TooLargeError(Exception):
    """The model is larger than protobuf allows in one file."""


def write_serialized(model: onnx.ModelProto, path: Path) -> None:
    """Writes what ``path.write_bytes(model.SerializeToString())`` would write.

    Raises:
        TooLargeError: It would be 2 GiB or more.
        OSError: The file cannot be written.
    """
    before, after = _split(model, _GRAPH_FIELD)
    first, last = _split(model.graph, _INITIALIZER_FIELD)
    initializers = cast("Any", model.graph.initializer)
    sizes = [cast("int", tensor.ByteSize()) for tensor in initializers]
    tag = _varint(_INITIALIZER_FIELD << 3 | _LENGTH_DELIMITED)
    graph_size = len(first) + len(last) + sum(len(tag) + len(_varint(size)) + size for size in sizes)
    if len(before) + len(after) + graph_size + 16 > _LARGEST_FILE:
        raise TooLargeError(f"{graph_size} bytes of graph, {_LARGEST_FILE} are allowed")
    with path.open("wb") as file:
        file.write(before)
        _write_head(file, _varint(_GRAPH_FIELD << 3 | _LENGTH_DELIMITED), graph_size)
        file.write(first)
        for tensor, size in zip(initializers, sizes, strict=True):
            _write_head(file, tag, size)
            file.write(tensor.SerializeToString())
        file.write(last)
        file.write(after)


def _write_head(file: BinaryIO, tag: bytes, size: int) -> None:
    file.write(tag)
    file.write(_varint(size))


def _split(message: Any, field: int) -> tuple[bytes, bytes]:
    """The serialized fields with smaller numbers, and those with larger ones."""
    parts: list[bytes] = []
    for below in (True, False):
        part = type(message)()
        for descriptor, value in message.ListFields():
            if descriptor.number == field or (descriptor.number < field) is not below:
                continue
            if isinstance(value, str | bytes | int | float):
                setattr(part, descriptor.name, value)
            else:
                getattr(part, descriptor.name).MergeFrom(value)
        parts.append(part.SerializeToString())
    return parts[0], parts[1]


def _varint(value: int) -> bytes:
    content = bytearray()
    while value >= 0x80:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    content.append(value)
    return bytes(content)
