"""openpi's messages: msgpack with arrays in it, both ways. Pure functions.

An array is a map ``{b"__ndarray__": true, b"data": bytes, b"dtype": text, b"shape": [..]}``, a number of numpy's
``{b"__npgeneric__": true, b"data": number, b"dtype": text}``. Types that hold Python objects are refused, so nothing is
ever unpickled.
"""

from __future__ import annotations

import math
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from policy_server.engines.base import Array
from policy_server.errors import InvalidRequestError

_KINDS = frozenset("biuf")
_MAX_DIMENSIONS = 16
_PACKER = cast("Any", msgpack)  # it has no types
_Content = dict[Any, Any]


def unpack(frame: bytes) -> Any:
    """A message as Python objects and arrays.

    Raises:
        InvalidRequestError: No msgpack, or an array in it that makes no sense.
    """
    try:
        return _PACKER.unpackb(frame, object_hook=_array_of, strict_map_key=False)
    except InvalidRequestError:
        raise
    except Exception as error:  # msgpack raises a dozen kinds, and more from C
        reason = f"{type(error).__name__}: {error}"[:200]
        raise InvalidRequestError(f"the frame is not msgpack: {reason}", field="frame") from None


def pack(content: Any) -> bytes:
    """Python objects and arrays as a message."""
    return _PACKER.packb(content, default=_map_of)


def _array_of(content: _Content) -> Any:
    if b"__ndarray__" in content or "__ndarray__" in content:
        dtype = _dtype(_get(content, "dtype"))
        shape, data = _get(content, "shape"), _get(content, "data")
        return _build(dtype, shape, data)
    if b"__npgeneric__" in content or "__npgeneric__" in content:
        value = _get(content, "data")
        if not isinstance(value, bool | int | float):
            raise InvalidRequestError("a number's data: a number is expected", field="frame")
        dtype = _dtype(_get(content, "dtype"))
        try:
            return np.array(value, dtype)
        except (OverflowError, ValueError):
            raise InvalidRequestError(f"a number's data: does not fit {dtype}", field="frame") from None
    return content


def _build(dtype: np.dtype[Any], shape: object, data: object) -> Array:
    sizes = list(cast("list[Any]", shape)) if isinstance(shape, list | tuple) else None
    if sizes is None or len(sizes) > _MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in sizes):
        raise InvalidRequestError(
            f"an array's shape: {repr(cast('object', shape))[:60]}, a list of sizes is expected", field="frame"
        )
    if not isinstance(data, bytes) or len(data) != math.prod(sizes) * dtype.itemsize:
        found = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise InvalidRequestError(
            f"an array's data: {found}, {list(sizes)} of {dtype} are {math.prod(sizes) * dtype.itemsize} bytes",
            field="frame",
        )
    return np.frombuffer(data, dtype).reshape(sizes)


def _dtype(name: object) -> np.dtype[Any]:
    text = name.decode("latin-1") if isinstance(name, bytes) else name
    try:
        dtype = np.dtype(text) if isinstance(text, str) and len(text) <= 16 else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind not in _KINDS or dtype.shape:
        raise InvalidRequestError(f"an array's dtype: {str(text)[:40]!r}, a type of numbers is expected", field="frame")
    return dtype


def _get(content: _Content, name: str) -> Any:
    value = content.get(name.encode())
    return value if value is not None else content.get(name)


def _map_of(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = cast("Array", value)
        return {
            b"__ndarray__": True,
            b"data": array.tobytes(),
            b"dtype": array.dtype.str,
            b"shape": array.shape,
        }
    if isinstance(value, np.generic):
        number = cast("Any", value)
        return {b"__npgeneric__": True, b"data": number.item(), b"dtype": number.dtype.str}
    raise TypeError(f"a {type(value).__name__} cannot be sent")
