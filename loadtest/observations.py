"""What policies are asked with: observations drawn within the policy's bounds, or the user's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.errors import UsageError

NUM_DRAWN = 64
"""Observations that are drawn for a run; users take turns."""
_WIDEST = 10.0


@dataclass(frozen=True, kw_only=True)
class ObservationField:
    """A field of the policy's observation, as the server describes it.

    Attributes:
        name: Its name.
        shape: Of one observation.
        dtype: ``float32`` or ``int64``.
        low: Lower bounds by value, None where open; None for all open.
        high: Upper bounds.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    low: tuple[float | None, ...] | None = None
    high: tuple[float | None, ...] | None = None

    @property
    def size(self) -> int:
        """Values of one observation."""
        return int(np.prod(self.shape, dtype=np.int64))


def fields_of(manifest: Mapping[str, Any]) -> tuple[ObservationField, ...]:
    """The fields of a manifest as ``GET /v1/policies/NAME`` gives it."""
    return tuple(
        ObservationField(
            name=str(field["name"]),
            shape=tuple(field["shape"]),
            dtype=str(field.get("dtype", "float32")),
            low=tuple(field["low"]) if field.get("low") is not None else None,
            high=tuple(field["high"]) if field.get("high") is not None else None,
        )
        for field in manifest["observation"]
    )


def drawn_observations(
    fields: Sequence[ObservationField], *, rows: int, seed: int, number: int = NUM_DRAWN
) -> list[dict[str, NDArray[Any]]]:
    """Observations, uniform within the bounds; between -1 and 1 where there are none, and at most 10 off the middle.

    Args:
        fields: The policy's.
        rows: Of each; every field is [rows, *shape].
        seed: The same seed draws the same.
        number: How many.
    """
    generator = np.random.default_rng(seed)
    return [{field.name: _draw(field, rows, generator) for field in fields} for _ in range(number)]


def _draw(field: ObservationField, rows: int, generator: np.random.Generator) -> NDArray[Any]:
    lows, highs = field.low or (None,) * field.size, field.high or (None,) * field.size
    ranges = np.array([_range(low, high) for low, high in zip(lows, highs, strict=True)]).reshape(field.size, 2)
    values = generator.uniform(ranges[:, 0], ranges[:, 1], (rows, field.size))
    if field.dtype == "int64":
        values = np.clip(np.rint(values), np.ceil(ranges[:, 0]), np.floor(ranges[:, 1]))
    return values.reshape(rows, *field.shape).astype(field.dtype)


def _range(low: float | None, high: float | None) -> tuple[float, float]:
    """What to draw from; bounds that are far apart say nothing of what a policy meets."""
    if low is None or high is None:
        low, high = (-1.0, 1.0) if low is None and high is None else _beside(low, high)
    middle, half = (low + high) / 2, min((high - low) / 2, _WIDEST)
    return middle - half, middle + half


def _beside(low: float | None, high: float | None) -> tuple[float, float]:
    """Within 2 of the one bound that there is."""
    return (low, low + 2) if low is not None else ((high or 0.0) - 2, high or 0.0)


def read_observations(path: Path, fields: Sequence[ObservationField], *, rows: int) -> list[dict[str, NDArray[Any]]]:
    """The user's observations, a JSON line each: a list for a policy with one field, or an object with every field.

    Args:
        path: The file.
        fields: The policy's.
        rows: Observations of one request: that many lines in turn.

    Raises:
        UsageError: The file cannot be read, or a line is not an observation of this policy; names line and field.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"observations={str(path)!r}: cannot be read ({error})") from None
    read = [
        _observation_of(line, fields, f"observations={str(path)!r}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not read:
        raise UsageError(f"observations={str(path)!r}: holds no observation; write one a line, as JSON")
    return [
        {field.name: np.stack([read[(first + row) % len(read)][field.name] for row in range(rows)]) for field in fields}
        for first in range(len(read))
    ]


def _observation_of(line: str, fields: Sequence[ObservationField], where: str) -> dict[str, NDArray[Any]]:
    try:
        content: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: is not JSON ({error})") from None
    if not isinstance(content, dict):
        if len(fields) != 1:
            names = ", ".join(field.name for field in fields)
            raise UsageError(f"{where}: has to be an object with the fields {names}")
        content = {fields[0].name: content}
    names = {field.name for field in fields}
    if set(content) != names:
        raise UsageError(f"{where}: has the fields {sorted(content)}, the policy takes {sorted(names)}")
    found: dict[str, NDArray[Any]] = {}
    for field in fields:
        try:
            values = np.asarray(content[field.name], field.dtype)
        except (TypeError, ValueError, OverflowError):
            raise UsageError(f"{where}: {field.name} does not hold numbers only") from None
        if values.shape != field.shape:
            raise UsageError(f"{where}: {field.name} has the shape {list(values.shape)}, not {list(field.shape)}")
        if not np.isfinite(values).all():
            raise UsageError(f"{where}: {field.name} is not finite")
        found[field.name] = values
    return found
