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
from typing import TYPE_CHECKING, Any

from gated_serving.llm.checkpoints.errors import BrokenWeights, PickledObjects
from gated_serving.llm.checkpoints.layout import is_derived
from gated_serving.llm.checkpoints.weight_files import find_weight_files

if TYPE_CHECKING:
    from torch import Tensor

ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes an element by safetensors' name of the dtype. Sub-byte dtypes are not listed."""

_SUB_BYTE_DTYPES = frozenset({"F4", "F6_E2M3", "F6_E3M2"})

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit


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

    Raises:
        BrokenWeights: No weights, weight files that are absent, broken or too many, or an index that does not say
            what the files hold.
        PickledObjects: A .bin file with more than tensors in it.
    """
    files = find_weight_files(folder)
    found: dict[str, TensorHeader] = {}
    for path in files.paths:
        for name, header in read_file_headers(path).items():
            if name in found:
                raise BrokenWeights(
                    f"{path}: holds {name}, which {found[name].file.name} holds too; which of them is loaded would "
                    "depend on the loader: fetch both files again"
                )
            found[name] = header
    return found if files.places is None else _check_places(folder, found, files.places)


def _check_places(
    folder: Path, found: Mapping[str, TensorHeader], places: Mapping[str, str]
) -> dict[str, TensorHeader]:
    """Holds what the files hold against the index. vLLM loads whatever its files hold, listed or not."""
    for name, place in places.items():
        if name not in found:
            raise BrokenWeights(f"{folder / place}: the index says that {name} is in this file, but it is not")
        if found[name].file.name != place:
            raise BrokenWeights(
                f"{found[name].file}: holds {name}, which the index says is in {place}; fetch the index and both files "
                "again"
            )
    for name, header in found.items():
        if name not in places and not is_derived(name):
            raise BrokenWeights(
                f"{header.file}: holds {name}, of which the index says nothing; fetch the index and the file again"
            )
    return {name: header for name, header in found.items() if name in places}


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
    except Exception as error:  # a damaged pickle raises whatever the instruction it stops at raises
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
        is_lazy = value.is_meta or value.is_conj() or value.is_neg()
        if is_lazy or value.is_quantized or value.layout is not torch.strided:
            raise BrokenWeights(
                f"{path}: {name} is not stored as plain numbers (it is sparse, quantised, conjugate or without data); "
                "save it as an ordinary tensor"
            )
        tensors[name] = value
    return tensors


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
            tensors[name], stop = _read_entry(path, name, entry, data_start)
            end = max(end, stop)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenWeights(f"{path}: broken safetensors header ({_first_line(error)}); fetch it again") from error
    if end != size:
        raise BrokenWeights(
            f"{path}: {size} bytes, expected {end}: {'truncated' if size < end else 'bytes left over'}; fetch it again"
        )
    return tensors


def _read_entry(path: Path, name: str, entry: Mapping[str, Any], data_start: int) -> tuple[TensorHeader, int]:
    """One tensor of a safetensors header, and where its data ends in the file, in bytes."""
    begin, stop = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise BrokenWeights(f"{path}: {name} has the shape {list(shape)}")
    if not type(begin) is type(stop) is int or not 0 <= begin <= stop:
        raise BrokenWeights(f"{path}: {name} has the data_offsets {entry['data_offsets']}; fetch it again")
    if dtype not in ITEM_SIZES and dtype not in _SUB_BYTE_DTYPES:
        raise BrokenWeights(f"{path}: {name} has the dtype {dtype!r}, which safetensors does not know; fetch it again")
    tensor = TensorHeader(name=name, shape=shape, dtype=dtype, file=path, offset=data_start + begin)
    if dtype in ITEM_SIZES and stop - begin != tensor.num_bytes:
        raise BrokenWeights(
            f"{path}: {name} has {stop - begin} bytes, expected {tensor.num_bytes} for {list(shape)} of {dtype}"
        )
    return tensor, data_start + stop


def _dtype_name(tensor: Tensor, path: Path, name: str) -> str:
    from safetensors.torch import _TYPES  # the one table of the two libraries' names

    names = {dtype: label for label, dtype in _TYPES.items()}
    if tensor.dtype not in names:
        raise BrokenWeights(f"{path}: {name} has the dtype {tensor.dtype}, which safetensors cannot hold")
    return names[tensor.dtype]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
