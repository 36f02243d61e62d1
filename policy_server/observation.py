"""Observations as clients send them, checked against the manifest and turned into the graph's inputs.

Every protocol ends here: nested lists from JSON, arrays from binary tensors and msgpack.

Legend: n rows of a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, chain
from typing import Any, cast

import numpy as np

from policy_server.engines.base import Array
from policy_server.errors import InvalidRequestError, PayloadTooLargeError
from policy_server.manifest import Manifest, ObservationField

_NUMBERS = frozenset({int, float})
_INTEGERS = frozenset({int})
_LARGEST_PLAIN = 3.4e38  # a little below the largest float32
_SHOWN = 40
_LARGEST_INT64 = (1 << 63) - 1
_LARGEST_EXACT = 1 << 53  # among the integers that float64 holds


class ObservationParser:
    """Turns one policy's observations into arrays; knows its fields, and how many rows a request may have.

    Args:
        manifest: Names, shapes, types and bounds.
        max_rows: Rows of one request.
    """

    def __init__(self, manifest: Manifest, *, max_rows: int) -> None:
        self._fields = {field.name: field for field in manifest.observation}
        self._order = tuple(self._fields)
        self._sizes = [field.size for field in manifest.observation]
        self._total = sum(self._sizes)
        self._max_rows = max_rows
        self._only = manifest.observation[0] if len(manifest.observation) == 1 else None
        self._vector = ObservationField(name="vector", shape=(self._total,))
        mixed = any(field.dtype != "float32" for field in manifest.observation)
        self._vector_dtype = "float64" if mixed else "float32"  # holds every integer up to 2^53
        self._plain = all(field.dtype == "float32" and len(field.shape) == 1 for field in manifest.observation)
        ends = list(accumulate(self._sizes))
        self._spans = [slice(end - size, end) for size, end in zip(self._sizes, ends, strict=True)]

    def from_json(self, value: Any) -> tuple[dict[str, Array], int, bool]:
        """An observation, or a batch of them, as JSON has it: named fields, or one flat vector in their order.

        Returns:
            The fields as arrays [n, *shape]; n; whether it came as a batch.

        Raises:
            InvalidRequestError: A field is missing, unknown, of the wrong shape or type, or not finite.
            PayloadTooLargeError: More rows than are allowed.
        """
        if self._plain and (single := self._plain_single(value)) is not None:
            return single, 1, False
        if isinstance(value, dict):
            return self._named(cast("dict[str, Any]", value))
        if self._only is not None:
            array, rows, batched = self._field(self._only, value, "observation")
            return {self._only.name: array}, rows, batched
        return self._flat(value)

    def from_arrays(
        self, arrays: Mapping[str, Array], *, path: str = "observation"
    ) -> tuple[dict[str, Array], int, bool]:
        """An observation as named arrays, each ``shape`` or [n, *shape]; numbers of any width are converted.

        Returns:
            As ``from_json``.

        Raises:
            InvalidRequestError: As ``from_json``.
            PayloadTooLargeError: More rows than are allowed.
        """
        self._check_names(arrays, path)
        fields = self._fields
        parts = [(name, self._array(fields[name], arrays[name], f"{path}.{name}")) for name in self._order]
        return self._joined(parts, path)

    def _plain_single(self, value: Any) -> dict[str, Array] | None:
        """One observation without a fault, which is nearly every request; None for what has to be looked at closely."""
        if type(value) is list:
            if not _are_plain_numbers(cast("list[Any]", value), self._total):
                return None
            row = np.array((value,), np.float32)
            return {name: row[:, span] for name, span in zip(self._order, self._spans, strict=True)}
        if type(value) is not dict:
            return None
        named = cast("dict[str, Any]", value)
        if len(named) != len(self._order):
            return None
        fields: dict[str, Array] = {}
        for name, size in zip(self._order, self._sizes, strict=True):
            numbers = named.get(name)
            if type(numbers) is not list or not _are_plain_numbers(cast("list[Any]", numbers), size):
                return None
            fields[name] = np.array((numbers,), np.float32)
        return fields

    def _named(self, value: dict[str, Any]) -> tuple[dict[str, Array], int, bool]:
        self._check_names(value, "observation")
        fields = self._fields
        parts = [(name, self._field(fields[name], value[name], f"observation.{name}")) for name in self._order]
        return self._joined(parts, "observation")

    def _check_names(self, names: Iterable[str], path: str) -> None:
        if self._fields.keys() == (given := set(names)):
            return
        expected = ", ".join(self._order)
        for name in self._order:
            if name not in given:
                field = f"{path}.{name}"
                raise InvalidRequestError(f"{field}: is missing; the fields are {expected}", field=field)
        field = f"{path}.{shortened(min(given - self._fields.keys()))}"
        raise InvalidRequestError(f"{field}: the policy has no such field; the fields are {expected}", field=field)

    def _joined(
        self, parts: list[tuple[str, tuple[Array, int, bool]]], path: str
    ) -> tuple[dict[str, Array], int, bool]:
        first, (_, rows, batched) = parts[0]
        for name, (_, other_rows, other_batched) in parts[1:]:
            if (other_rows, other_batched) != (rows, batched):
                other, this = _counted(other_rows, other_batched), _counted(rows, batched)
                raise InvalidRequestError(f"{path}.{name}: {other}, but {path}.{first} {this}", field=f"{path}.{name}")
        return {name: array for name, (array, _, _) in parts}, rows, batched

    def _flat(self, value: Any) -> tuple[dict[str, Array], int, bool]:
        array, rows, batched = self._field(self._vector, value, "observation", dtype=self._vector_dtype)
        fields: dict[str, Array] = {}
        for field, span in zip(self._fields.values(), self._spans, strict=True):
            part = array[:, span].reshape(rows, *field.shape)
            path = f"observation.{field.name}"
            if field.dtype == "int64":
                part = _as_whole(part, path)
            fields[field.name] = self._array(field, part, path)[0]
        return fields, rows, batched

    def _field(
        self, field: ObservationField, value: Any, path: str, *, dtype: str | None = None
    ) -> tuple[Array, int, bool]:
        """One field out of JSON, as its own type or another."""
        depth = _depth(value)
        num_dimensions = len(field.shape)
        if depth not in (num_dimensions, num_dimensions + 1):
            raise InvalidRequestError(
                f"{path}: nested {depth} deep, a value of the shape {list(field.shape)} is {num_dimensions} deep, "
                f"and a batch {num_dimensions + 1}",
                field=path,
            )
        if depth > num_dimensions and len(value) > self._max_rows:
            raise self._too_many(len(value), path)
        allowed = _INTEGERS if field.dtype == "int64" else _NUMBERS
        types = _types(value, depth)
        if not types <= allowed:
            wrong = ", ".join(sorted(_json_name(kind) for kind in types - allowed))
            wanted = "integers" if field.dtype == "int64" else "numbers"
            raise InvalidRequestError(f"{path}: holds {wrong}, only {wanted} are allowed", field=path)
        try:
            with np.errstate(over="ignore"):  # becomes infinity, which is looked for below
                array = np.array(value, dtype or field.dtype)
        except (ValueError, TypeError):
            raise InvalidRequestError(f"{path}: its rows are not equally long", field=path) from None
        except OverflowError:
            raise InvalidRequestError(f"{path}: holds a number beyond {field.dtype}", field=path) from None
        return self._shaped(field, array, path)

    def _array(self, field: ObservationField, value: Array, path: str) -> tuple[Array, int, bool]:
        """One field as an array of any numeric type."""
        kinds = "iu" if field.dtype == "int64" else "iuf"
        if value.dtype.kind not in kinds:
            raise InvalidRequestError(f"{path}: is {value.dtype}, {field.dtype} is expected", field=path)
        if value.dtype.kind == "u" and field.dtype == "int64" and value.size and int(value.max()) > _LARGEST_INT64:
            raise InvalidRequestError(f"{path}: holds a number beyond int64", field=path)
        with np.errstate(over="ignore"):
            array = np.asarray(value, field.dtype, order="C")
        return self._shaped(field, array, path)

    def _shaped(self, field: ObservationField, array: Array, path: str) -> tuple[Array, int, bool]:
        shape = array.shape
        batched = shape != field.shape
        if batched:
            if shape[1:] != field.shape or not shape:
                raise InvalidRequestError(
                    f"{path}: has the shape {list(shape)}, {list(field.shape)} is expected, or one dimension more "
                    "for a batch",
                    field=path,
                )
            if shape[0] == 0:
                raise InvalidRequestError(f"{path}: an empty batch; send at least one observation", field=path)
            if shape[0] > self._max_rows:
                raise self._too_many(shape[0], path)
        else:
            array = array.reshape(1, *shape)
        if field.dtype == "float32":
            total = float(array.sum())
            # A sum is finite when its terms are, but for an overflow; so one number tells nearly always.
            if total - total != 0.0 and not np.isfinite(array).all():
                row = int(np.argmax(~np.isfinite(array).reshape(len(array), -1).all(axis=1)))
                where = f" in row {row}" if batched else ""
                raise InvalidRequestError(
                    f"{path}: holds NaN, infinity or a number beyond float32{where}; observations have to be finite",
                    field=path,
                )
        return array, len(array), batched

    def _too_many(self, rows: int, path: str) -> PayloadTooLargeError:
        return PayloadTooLargeError(
            f"{path}: {rows} observations in one request, at most {self._max_rows} are allowed (max_rows)",
            field=path,
        )


def _as_whole(values: Array, path: str) -> Array:
    if not np.all(np.abs(values) < _LARGEST_EXACT) or np.any(values != np.floor(values)):
        raise InvalidRequestError(
            f"{path}: holds fractions, or integers beyond 2^53, which a flat vector cannot; send named fields",
            field=path,
        )
    return values.astype(np.int64)


def _are_plain_numbers(values: list[Any], size: int) -> bool:
    return (
        len(values) == size
        and _NUMBERS.issuperset(map(type, values))
        and max(values) < _LARGEST_PLAIN
        and min(values) > -_LARGEST_PLAIN
    )


def shortened(text: str) -> str:
    """A text of a client's as messages show it: not longer than a line bears."""
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _counted(rows: int, batched: bool) -> str:
    return f"is a batch of {rows}" if batched else "is a single observation"


def _depth(value: Any) -> int:
    depth = 0
    while isinstance(value, list) and value:
        depth += 1
        value = cast("list[Any]", value)[0]
    return depth + 1 if isinstance(value, list) else depth


def _types(value: Any, depth: int) -> set[type]:
    """Types of the numbers, ``depth`` lists down; a list of other depth shows as ``list`` or as what it holds."""
    if depth == 0:
        return {type(value)}
    flat: Any = value
    for _ in range(depth - 1):
        try:
            flat = list(chain.from_iterable(flat))
        except TypeError:
            return {list}
    return set(map(type, flat))


def _json_name(kind: type) -> str:
    return _JSON_NAMES.get(kind, kind.__name__)


_JSON_NAMES: dict[type, str] = {
    str: "strings",
    bool: "booleans",
    type(None): "null",
    list: "lists of other depth",
    dict: "objects",
    float: "fractions",
}
