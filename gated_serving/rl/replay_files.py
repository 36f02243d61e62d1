"""The arrays of a replay: plain memory, or shared memory maps over ``.npy`` files that are allocated whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


class ReplayError(Exception):
    """The replay cannot do what was asked for; the message says why and what to do."""


def open_array(folder: Path | None, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns the array of that name, zeros where it is new.

    Args:
        folder: Where its file ``NAME.npy`` lies or is made; None takes plain memory.
        name: Name of the array.
        shape: Its shape.
        dtype: Its type.

    Returns:
        The array; with a folder its ``base`` is the ``numpy.memmap``.

    Raises:
        ReplayError: The file cannot be made or read, or holds an array of another shape or type.
    """
    if folder is None:
        return np.zeros(shape, dtype)
    path = folder / f"{name}.npy"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _allocate(path, shape, dtype)
        found = np.lib.format.open_memmap(path, mode="r+")
    except (OSError, ValueError) as error:
        raise ReplayError(
            f"{path}: cannot hold the replay ({error}); give another folder or a smaller capacity"
        ) from error
    if found.shape != shape or found.dtype != dtype:
        raise ReplayError(
            f"{path} holds {found.dtype}{list(found.shape)} and not {np.dtype(dtype)}{list(shape)}: it is that of "
            "another replay; give another folder"
        )
    # As a plain array: indexing a memmap makes a memmap of every result, which costs more than the indexing.
    return found.view(np.ndarray)


def _allocate(path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
    partial = path.with_suffix(".partial")
    np.lib.format.open_memmap(partial, mode="w+", dtype=np.dtype(dtype), shape=shape)
    if hasattr(os, "posix_fallocate"):
        # Writing to a hole of a memory-mapped file kills the process when the disk is full; this fails now instead.
        with partial.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)
    partial.replace(path)
