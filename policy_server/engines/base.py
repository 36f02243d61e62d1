"""What every engine can do.

Legend: B batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

Array = NDArray[Any]


class EngineError(Exception):
    """A model cannot be opened or run; the message is for the person who exported it."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor of the graph, as the file itself declares it.

    Attributes:
        name: Its name.
        dtype: numpy's name of its type, such as ``float32``.
        shape: Dimensions behind the batch; None where the file leaves one open.
        dynamic_batch: Whether the first dimension is open.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    dynamic_batch: bool


class Engine(Protocol):
    """Runs one model. One caller at a time; any thread."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    max_batch: int

    def run(self, inputs: Mapping[str, Array], /) -> dict[str, Array]:
        """Runs the model once.

        Args:
            inputs: Every input of the graph by name, each [B, ...] with B from 1 to ``max_batch``.

        Returns:
            Every output by name, each [B, ...]; the arrays are the caller's own.

        Raises:
            EngineError: The model raised, or was stopped.
        """
        ...

    def stop_run(self) -> None:
        """Makes a run that is under way in another thread raise; the engine is good for closing only afterwards."""
        ...

    def close(self) -> None:
        """Gives its memory back."""
        ...
