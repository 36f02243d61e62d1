"""Reading what a checkpoint holds without reading its weights: names, shapes, dtypes and places of its tensors.

safetensors headers are read here rather than by the safetensors library, because the byte offsets in them let
conversion stream tensors with plain file reads, whose memory use is known. .bin files are opened by torch's
weights-only unpickler with their data left on disk.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gated_serving.llm.checkpoints.errors import BrokenWeights, PickledObjects

if TYPE_CHECKING:
    from torch import Tensor

ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes an element by safetensors' name of the dtype. Sub-byte dtypes are not listed."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """One tensor on disk.

    Args:
        name: As in the checkpoint.
        shape: Sizes; empty for a scalar.
        dtype: safetensors' name, such as "BF16".
        file: The file that holds it.
        offset: Where its data starts in the file, in bytes; None in a .bin file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int | None = None

    @property
    def num_elements(self) -> int:
        """Elements in the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of data."""
        return self.num_elements * ITEM_SIZES[self.dtype]


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Every tensor of a checkpoint folder, by name, in the files' order.

    safetensors win over .bin and an index over a single file, as in transformers.

    Raises:
        BrokenWeights: No weights, a file that is named but absent, or one that is truncated or broken.
        PickledObjects: A .bin file with more than tensors in it.
    """
    weight_map = None
    for single in _SINGLE_FILES:
        if (folder / single).is_file():
            return read_file_headers(folder / single)
        if (index := folder / f"{single}.index.json").is_file():
            weight_map = _read_index(index)
            break
    if weight_map is None:
        raise BrokenWeights(f"{folder}: no weights found; expected {' or '.join(_SINGLE_FILES)}, or one's .index.json")
    found: dict[str, TensorHeader] = {}
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            members = [name for name, place in weight_map.items() if place == file]
            raise BrokenWeights(
                f"{folder / file}: the index names this file for {len(members)} tensors, among them {members[0]}, "
                "but it is not there; fetch it again"
            )
        found |= read_file_headers(folder / file)
    absent = [name for name in weight_map if name not in found or found[name].file.name != weight_map[name]]
    if absent:
        file = weight_map[absent[0]]
        raise BrokenWeights(f"{folder / file}: the index says that {absent[0]} is in this file, but it is not")
    return {name: header for name, header in found.items() if name in weight_map}


def read_file_headers(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one .safetensors or .bin file, by name.

    Raises:
        BrokenWeights: The file is truncated or broken.
        PickledObjects: A .bin file with more than tensors in it.
    """
    if path.suffix == ".bin":
        return {
            name: TensorHeader(name=name, shape=tuple(tensor.shape), dtype=_dtype_name(tensor, path, name), file=path)
            for name, tensor in open_bin(path).items()
        }
    return _read_safetensors(path)


def open_bin(path: Path) -> dict[str, Tensor]:
    """The tensors of a .bin file, with their data on disk until they are used (where the file's age allows).

    Raises:
        BrokenWeights: The file is truncated or broken.
        PickledObjects: The file holds more than tensors.
    """
    import torch

    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        # Files from before torch 1.6 are no zip archives and cannot be mapped: those are read whole.
        loaded: object = torch.load(path, weights_only=True, mmap=is_zip, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise PickledObjects(
            f"{path}: holds pickled objects other than tensors, which could run code when loaded, or is no weight "
            "file at all; save the state dict's tensors only, best as safetensors"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise BrokenWeights(f"{path}: broken or truncated ({_first_line(error)}); fetch it again") from error
    if not isinstance(loaded, Mapping):
        raise BrokenWeights(f"{path}: holds a {type(loaded).__name__}, expected a mapping of names to tensors")
    tensors: dict[str, Tensor] = {}
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise BrokenWeights(
                f"{path}: {name!r} is a {type(value).__name__}, expected a tensor; a training checkpoint keeps its "
                "weights deeper inside: save the model's state dict alone"
            )
        tensors[name] = value
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        names_are_plain = all(Path(file).name == file for file in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenWeights(f"{path}: not an index of weights ({_first_line(error)}); fetch it again") from error
    if not weight_map or not names_are_plain:
        raise BrokenWeights(f"{path}: weight_map is empty or names files outside its folder")
    return weight_map


def _read_safetensors(path: Path) -> dict[str, TensorHeader]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length_bytes = file.read(_LENGTH_BYTES)
            if len(length_bytes) < _LENGTH_BYTES:
                raise BrokenWeights(f"{path}: only {size} bytes, too short for a safetensors header; fetch it again")
            (length,) = struct.unpack("<Q", length_bytes)
            if length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise BrokenWeights(
                    f"{path}: its header should take {length} bytes but the file has {size}: truncated, or no "
                    "safetensors file; fetch it again"
                )
            header = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        data_start = _LENGTH_BYTES + length
        end = data_start
        tensors: dict[str, TensorHeader] = {}
        for name, entry in entries.items():
            begin, stop = entry["data_offsets"]
            end = max(end, data_start + stop)
            tensor = TensorHeader(
                name=name, shape=tuple(entry["shape"]), dtype=entry["dtype"], file=path, offset=data_start + begin
            )
            if not all(isinstance(extent, int) and extent >= 0 for extent in tensor.shape):
                raise BrokenWeights(f"{path}: {name} has the shape {list(tensor.shape)}")
            if tensor.dtype in ITEM_SIZES and (begin < 0 or stop - begin != tensor.num_bytes):
                raise BrokenWeights(
                    f"{path}: {name} has {stop - begin} bytes, expected {tensor.num_bytes} for {list(tensor.shape)} "
                    f"of {tensor.dtype}"
                )
            tensors[name] = tensor
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenWeights(f"{path}: broken safetensors header ({_first_line(error)}); fetch it again") from error
    if end != size:
        raise BrokenWeights(
            f"{path}: {size} bytes, expected {end}: {'truncated' if size < end else 'bytes left over'}; fetch it again"
        )
    return tensors


def _dtype_name(tensor: Tensor, path: Path, name: str) -> str:
    from safetensors.torch import _TYPES  # the one table of the two libraries' names

    names = {dtype: label for label, dtype in _TYPES.items()}
    if tensor.dtype not in names:
        raise BrokenWeights(f"{path}: {name} has the dtype {tensor.dtype}, which safetensors cannot hold")
    return names[tensor.dtype]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
