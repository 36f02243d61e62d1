"""The Open Inference Protocol's infer request and answer, as JSON and with the binary tensor extension.

With the extension the body is a JSON object of a length that a header announces, followed by the tensors' bytes one
after the other, little-endian and in C order. Pure functions; no HTTP and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import orjson

from policy_server.engines.base import Array
from policy_server.errors import InvalidRequestError
from policy_server.wire import check_seed, check_session_id, check_timeout_ms

DTYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
}
"""The protocol's names of types, and numpy's."""
DATATYPES = {dtype: name for name, dtype in DTYPES.items()}
MAX_TENSORS = 64
_MAX_DIMENSIONS = 16


@dataclass(slots=True)
class InferOptions:
    """The parameters of a request that mean something here.

    Attributes:
        deterministic: The best action, or one drawn.
        seed: What to draw with.
        timeout_ms: When it is too late to begin; the protocol's ``timeout`` is in microseconds.
        session_id: ``session_id``, or Triton's ``sequence_id``.
    """

    deterministic: bool = True
    seed: int | None = None
    timeout_ms: float | None = None
    session_id: str | None = None


@dataclass(slots=True)
class InferRequest:
    """What an infer request holds, not yet compared with a policy.

    Attributes:
        arrays: The inputs by name, each of the shape and type that it came with.
        outputs: Names of the outputs asked for; empty for all.
        binary: Which of the outputs shall be binary; ``None`` in it stands for those that are not named.
        options: The parameters.
        request_id: The client's id, sent back.
    """

    arrays: dict[str, Array]
    outputs: list[str] = field(default_factory=list[str])
    binary: dict[str | None, bool] = field(default_factory=dict[str | None, bool])
    options: InferOptions = field(default_factory=InferOptions)
    request_id: str | None = None


def parse_infer(body: bytes, header_length: str | None) -> InferRequest:
    """Reads an infer request.

    Args:
        body: The whole body.
        header_length: The header ``Inference-Header-Content-Length``; None when there are no binary tensors.

    Raises:
        InvalidRequestError: Anything about it is wrong; names the part.
    """
    header, rest = _split(body, header_length)
    try:
        content: Any = orjson.loads(header)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the request is not JSON: {error}", field="body") from None
    content = _object(content, "body")
    parameters = _object(content.get("parameters", {}), "parameters")
    outputs, binary = _outputs(content.get("outputs", []))
    binary[None] = parameters.get("binary_data_output") is True
    request_id = content.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise InvalidRequestError("id: a text is expected", field="id")
    return InferRequest(
        arrays=_inputs(content.get("inputs"), rest),
        outputs=outputs,
        binary=binary,
        options=parse_options(parameters),
        request_id=request_id,
    )


def parse_options(parameters: Mapping[str, Any]) -> InferOptions:
    """The parameters of a request; those of Triton's that mean nothing here are passed over.

    Raises:
        InvalidRequestError: One of them makes no sense.
    """
    deterministic = parameters.get("deterministic", True)
    if not isinstance(deterministic, bool):
        raise InvalidRequestError(
            f"parameters.deterministic: {str(deterministic)[:40]!r}, true or false is expected",
            field="parameters.deterministic",
        )
    timeout_us = parameters.get("timeout")
    timeout_ms = None
    if timeout_us not in (None, 0):  # 0 is Triton's word for none
        number = timeout_us if isinstance(timeout_us, int | float) and not isinstance(timeout_us, bool) else math.nan
        timeout_ms = check_timeout_ms(number / 1e3, field="parameters.timeout")
    session_id = parameters.get("session_id")
    if session_id is None and parameters.get("sequence_id") not in (None, 0, ""):
        session_id = str(parameters["sequence_id"])[:256]
    return InferOptions(
        deterministic=deterministic,
        seed=check_seed(parameters.get("seed")),
        timeout_ms=timeout_ms,
        session_id=check_session_id(session_id, field="parameters.session_id"),
    )


def array_of(name: str, datatype: object, shape: object, raw: bytes | memoryview | None, data: object) -> Array:
    """One tensor, from its bytes or from JSON's flat or nested numbers.

    Raises:
        InvalidRequestError: Type, shape and content do not go together.
    """
    path = f"inputs.{name}"
    if not isinstance(datatype, str) or datatype not in DTYPES:
        raise InvalidRequestError(
            f"{path}.datatype: {str(datatype)[:40]!r}; there are {', '.join(DTYPES)}", field=f"{path}.datatype"
        )
    sizes = check_shape(shape, path)
    dtype = np.dtype(DTYPES[datatype]).newbyteorder("<")
    if raw is not None:
        expected = math.prod(sizes) * dtype.itemsize
        if len(raw) != expected:
            raise InvalidRequestError(
                f"{path}: {len(raw)} bytes, {list(sizes)} of {datatype} are {expected}", field=path
            )
        return np.frombuffer(raw, dtype).reshape(sizes)
    if not isinstance(data, list):
        raise InvalidRequestError(f"{path}.data: a list of numbers is expected", field=f"{path}.data")
    return _from_numbers(cast("list[Any]", data), dtype, sizes, f"{path}.data")


def _from_numbers(data: list[Any], dtype: np.dtype[Any], sizes: tuple[int, ...], path: str) -> Array:
    try:
        given = np.asarray(data) if data else np.zeros(0, dtype)
    except (ValueError, OverflowError):
        raise InvalidRequestError(
            f"{path}: rows of different lengths, or a number that is too large", field=path
        ) from None
    allowed = "b" if dtype.kind == "b" else "iu" if dtype.kind in "iu" else "iuf"
    if given.dtype.kind not in allowed:
        raise InvalidRequestError(f"{path}: other values than {dtype.name}", field=path)
    if given.size != math.prod(sizes):
        raise InvalidRequestError(
            f"{path}: {given.size} values, the shape {list(sizes)} has {math.prod(sizes)}", field=path
        )
    if given.dtype.kind in "iu" and dtype.kind in "iu" and given.size:
        limits = np.iinfo(dtype)
        if int(given.min()) < limits.min or int(given.max()) > limits.max:
            raise InvalidRequestError(f"{path}: a number beyond {dtype.name}", field=path)
    with np.errstate(over="ignore"):
        return given.astype(dtype).reshape(sizes)


def check_shape(shape: object, path: str) -> tuple[int, ...]:
    """A tensor's shape as it may be.

    Raises:
        InvalidRequestError: It is no list of whole numbers from 0.
    """
    if not isinstance(shape, list) or len(cast("list[Any]", shape)) > _MAX_DIMENSIONS:
        raise InvalidRequestError(f"{path}.shape: a list of sizes is expected", field=f"{path}.shape")
    sizes: list[int] = []
    for size in cast("list[Any]", shape):
        if type(size) is not int or not 0 <= size < 1 << 40:
            raise InvalidRequestError(f"{path}.shape: {str(size)[:40]!r} is no size", field=f"{path}.shape")
        sizes.append(size)
    return tuple(sizes)


def encode_infer(
    outputs: Mapping[str, Array], *, model: str, version: int, request: InferRequest
) -> tuple[bytes, int | None]:
    """The answer.

    Args:
        outputs: What to send, in order.
        model: The policy's name.
        version: Which version acted.
        request: What was asked; says which outputs are binary.

    Returns:
        The body, and the length of its JSON when binary tensors follow it.
    """
    described: list[dict[str, Any]] = []
    raw: list[bytes] = []
    for name, values in outputs.items():
        entry: dict[str, Any] = {"name": name, "datatype": DATATYPES[values.dtype.name], "shape": list(values.shape)}
        if request.binary.get(name, request.binary.get(None, False)):
            content = to_bytes(values)
            entry["parameters"] = {"binary_data_size": len(content)}
            raw.append(content)
        else:
            entry["data"] = np.ascontiguousarray(values).ravel()
        described.append(entry)
    content = {"model_name": model, "model_version": str(version), "outputs": described}
    if request.request_id is not None:
        content["id"] = request.request_id
    header = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    if not raw:
        return header, None
    return b"".join([header, *raw]), len(header)


def _split(body: bytes, header_length: str | None) -> tuple[bytes, memoryview]:
    if header_length is None:
        return body, memoryview(b"")
    if not header_length.isascii() or not header_length.isdecimal() or int(header_length[:20]) > len(body):
        raise InvalidRequestError(
            f"Inference-Header-Content-Length: {header_length[:40]!r}, the body has {len(body)} bytes",
            field="inference-header-content-length",
        )
    length = int(header_length)
    return body[:length], memoryview(body)[length:]


def _inputs(value: object, rest: memoryview) -> dict[str, Array]:
    if not isinstance(value, list) or not 1 <= len(cast("list[Any]", value)) <= MAX_TENSORS:
        raise InvalidRequestError(f"inputs: a list of 1 to {MAX_TENSORS} tensors is expected", field="inputs")
    arrays: dict[str, Array] = {}
    position = 0
    for index, item in enumerate(cast("list[Any]", value)):
        entry = _object(item, f"inputs[{index}]")
        name = entry.get("name")
        if not isinstance(name, str) or not name or name in arrays:
            raise InvalidRequestError(
                f"inputs[{index}].name: a name of its own is expected", field=f"inputs[{index}].name"
            )
        name = name[:128]
        raw: memoryview | None = None
        size = _object(entry.get("parameters", {}), f"inputs.{name}.parameters").get("binary_data_size")
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(rest) - position:
                raise InvalidRequestError(
                    f"inputs.{name}.parameters.binary_data_size: {str(size)[:40]}, "
                    f"{len(rest) - position} bytes are left in the body",
                    field=f"inputs.{name}.parameters.binary_data_size",
                )
            raw = rest[position : position + size]
            position += size
        arrays[name] = array_of(name, entry.get("datatype"), entry.get("shape"), raw, entry.get("data"))
    if position != len(rest):
        raise InvalidRequestError(f"body: {len(rest) - position} bytes behind the last tensor", field="body")
    return arrays


def _outputs(value: object) -> tuple[list[str], dict[str | None, bool]]:
    if not isinstance(value, list) or len(cast("list[Any]", value)) > MAX_TENSORS:
        raise InvalidRequestError(f"outputs: a list of at most {MAX_TENSORS} is expected", field="outputs")
    names: list[str] = []
    binary: dict[str | None, bool] = {}
    for index, item in enumerate(cast("list[Any]", value)):
        entry = _object(item, f"outputs[{index}]")
        name = entry.get("name")
        if not isinstance(name, str):
            raise InvalidRequestError(f"outputs[{index}].name: a text is expected", field=f"outputs[{index}].name")
        names.append(name)
        parameters = _object(entry.get("parameters", {}), f"outputs[{index}].parameters")
        if "binary_data" in parameters:
            binary[name] = parameters["binary_data"] is True
        if parameters.get("classification"):
            raise InvalidRequestError(
                "classification: is not offered; ask for the output itself", field=f"outputs[{index}].parameters"
            )
    return names, binary


def to_bytes(values: Array) -> bytes:
    """A tensor's bytes as the protocol has them: little-endian, in C order."""
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


def check_outputs(available: Collection[str], names: Sequence[str]) -> None:
    """Whether a policy gives the outputs asked for.

    Raises:
        InvalidRequestError: It does not give one of them.
    """
    for name in names:
        if name not in available:
            raise InvalidRequestError(
                f"outputs.{name[:40]}: the policy gives {', '.join(available)}", field=f"outputs.{name[:40]}"
            )


def _object(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path}: an object is expected", field=path)
    return cast("dict[str, Any]", value)
