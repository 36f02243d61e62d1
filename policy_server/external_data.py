"""Refuses ONNX files whose weights lie in other files, before any runtime opens them.

An ONNX file is a protocol buffer, and a tensor with ``data_location = EXTERNAL`` names a path that the runtime then
reads. The walk here looks at message headers only and skips the weights, so that it costs no copy of them; the fields'
numbers are those of onnx.proto.
"""

from __future__ import annotations

from policy_server.engines import EngineError

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_DEPTH = 64

# Which fields of a message hold messages, and of what kind.
_CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
_TENSOR_EXTERNAL_DATA, _TENSOR_DATA_LOCATION = 13, 14


def refuse_external_data(model: bytes) -> None:
    """Looks at every tensor of the model, those of subgraphs and functions too.

    Raises:
        EngineError: A tensor's data lies in another file, or the bytes are no protocol buffer.
    """
    try:
        _walk(memoryview(model), "model", 0)
    except (IndexError, OverflowError) as error:
        raise EngineError("policy.onnx: is no ONNX file, or is cut off; export the policy again") from error


def _walk(message: memoryview, kind: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise EngineError(f"policy.onnx: graphs are nested deeper than {_MAX_DEPTH}")
    children = _CHILDREN[kind]
    position, end = 0, len(message)
    while position < end:
        tag, position = _varint(message, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            value, position = _varint(message, position)
            external = kind == "tensor" and number == _TENSOR_DATA_LOCATION and value == 1
        elif wire_type == _LENGTH:
            length, position = _varint(message, position)
            if position + length > end:
                raise IndexError
            external = kind == "tensor" and number == _TENSOR_EXTERNAL_DATA
            child = children.get(number)
            if child is not None:
                _walk(message[position : position + length], child, depth + 1)
            position += length
        elif wire_type in (_FIXED64, _FIXED32):
            position += 8 if wire_type == _FIXED64 else 4
            external = False
        else:
            raise IndexError
        if external:
            raise EngineError(
                "policy.onnx: a tensor's data lies in another file, which is never read; export the policy in one file"
            )
    if position != end:
        raise IndexError


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise OverflowError
