"""The binary wires: the Open Inference Protocol's tensors, and openpi's msgpack."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import msgpack
import numpy as np
import pytest

from policy_server.errors import InvalidRequestError
from policy_server.wire_msgpack import pack, unpack
from policy_server.wire_tensors import DTYPES, InferRequest, check_outputs, encode_infer, parse_infer


def body_of(arrays: dict[str, np.ndarray], *, binary: bool = True, **fields: Any) -> tuple[bytes, str | None]:
    inputs: list[dict[str, Any]] = []
    raw = b""
    for name, values in arrays.items():
        datatype = next(key for key, dtype in DTYPES.items() if dtype == values.dtype.name)
        entry: dict[str, Any] = {"name": name, "shape": list(values.shape), "datatype": datatype}
        if binary:
            entry["parameters"] = {"binary_data_size": values.nbytes}
            raw += values.tobytes()
        else:
            entry["data"] = values.ravel().tolist()
        inputs.append(entry)
    header = json.dumps({"inputs": inputs, **fields}).encode()
    return header + raw, str(len(header)) if binary else None


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("dtype", list(DTYPES.values()))
def test_tensors_come_through_as_they_are(dtype: str, binary: bool) -> None:
    values = (np.arange(6).reshape(2, 3) % 2).astype(dtype)
    request = parse_infer(*body_of({"x": values, "y": values[:1]}, binary=binary))
    np.testing.assert_array_equal(request.arrays["x"], values)
    np.testing.assert_array_equal(request.arrays["y"], values[:1])
    assert request.arrays["x"].dtype.name == dtype


def test_parameters_outputs_and_id_are_read() -> None:
    body, length = body_of(
        {"x": np.ones(1, np.float32)},
        id="7",
        outputs=[{"name": "action", "parameters": {"binary_data": False}}, {"name": "mean"}],
        parameters={
            "binary_data_output": True,
            "timeout": 2500,
            "seed": 3,
            "deterministic": False,
            "sequence_id": 42,
            "priority": 0,
        },
    )
    request = parse_infer(body, length)
    assert (request.request_id, request.outputs) == ("7", ["action", "mean"])
    assert request.binary == {"action": False, None: True}
    options = request.options
    assert (options.timeout_ms, options.seed, options.deterministic, options.session_id) == (2.5, 3, False, "42")


def test_answers_mix_json_and_binary_as_asked() -> None:
    request = InferRequest({}, binary={"action": True, None: False}, request_id="7")
    outputs = {"action": np.asarray([[1.5, 2]], np.float32), "mean": np.asarray([[3, 4]], np.float32)}
    body, length = encode_infer(outputs, model="m", version=2, request=request)
    header = json.loads(body[:length])
    assert header == {
        "model_name": "m",
        "model_version": "2",
        "id": "7",
        "outputs": [
            {"name": "action", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
            {"name": "mean", "datatype": "FP32", "shape": [1, 2], "data": [3, 4]},
        ],
    }
    np.testing.assert_array_equal(np.frombuffer(body[length:], np.float32), [1.5, 2])


def test_only_outputs_that_exist_can_be_asked_for() -> None:
    with pytest.raises(InvalidRequestError, match="the policy gives action"):
        check_outputs(["action"], ["reward"])


GOOD = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": {}}, "inputs"),
        ({"inputs": [1]}, "inputs[0]"),
        ({"inputs": [GOOD] * 65}, "inputs"),
        ({"inputs": [GOOD, GOOD]}, "inputs[1].name"),
        ({"inputs": [{**GOOD, "name": 1}]}, "inputs[0].name"),
        ({"inputs": [{**GOOD, "datatype": "BYTES"}]}, "inputs.x.datatype"),
        ({"inputs": [{**GOOD, "datatype": ["FP32"]}]}, "inputs.x.datatype"),
        ({"inputs": [{**GOOD, "shape": [-1]}]}, "inputs.x.shape"),
        ({"inputs": [{**GOOD, "shape": [True, 2]}]}, "inputs.x.shape"),
        ({"inputs": [{**GOOD, "shape": "2"}]}, "inputs.x.shape"),
        ({"inputs": [{**GOOD, "shape": [1 << 50]}]}, "inputs.x.shape"),
        ({"inputs": [{**GOOD, "shape": [3]}]}, "inputs.x.data"),
        ({"inputs": [{**GOOD, "data": ["1", "2"]}]}, "inputs.x.data"),
        ({"inputs": [{**GOOD, "data": [[1], [2, 3]]}]}, "inputs.x.data"),
        ({"inputs": [{**GOOD, "data": None}]}, "inputs.x.data"),
        ({"inputs": [{**GOOD, "datatype": "INT8", "data": [1, 300]}]}, "inputs.x.data"),
        ({"inputs": [{**GOOD, "datatype": "INT8", "data": [1, 1.5]}]}, "inputs.x.data"),
        ({"inputs": [{**GOOD, "parameters": {"binary_data_size": 8}}]}, "inputs.x.parameters.binary_data_size"),
        ({"inputs": [{**GOOD, "parameters": {"binary_data_size": -1}}]}, "inputs.x.parameters.binary_data_size"),
        ({"inputs": [{**GOOD, "parameters": 3}]}, "inputs.x.parameters"),
        ({"inputs": [GOOD], "outputs": 5}, "outputs"),
        ({"inputs": [GOOD], "outputs": [{"name": None}]}, "outputs[0].name"),
        ({"inputs": [GOOD], "parameters": []}, "parameters"),
        ({"inputs": [GOOD], "parameters": {"timeout": "soon"}}, "parameters.timeout"),
        ({"inputs": [GOOD], "parameters": {"deterministic": 1}}, "parameters.deterministic"),
        ({"inputs": [GOOD], "id": 5}, "id"),
    ],
)
def test_wrong_requests_name_the_part(content: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as wrong:
        parse_infer(json.dumps(content).encode(), None)
    assert wrong.value.field == field


@pytest.mark.parametrize("length", ["-1", "x", "999999", "1" * 5000, "٣"])
def test_a_wrong_header_length_is_an_error(length: str) -> None:
    with pytest.raises(InvalidRequestError, match="Inference-Header-Content-Length"):
        parse_infer(b'{"inputs": []}', length)


def test_bytes_that_belong_to_no_tensor_are_an_error() -> None:
    body, length = body_of({"x": np.ones(2, np.float32)})
    with pytest.raises(InvalidRequestError, match="3 bytes behind the last tensor"):
        parse_infer(body + b"abc", length)
    with pytest.raises(InvalidRequestError, match="bytes are left"):
        parse_infer(body[:-1], length)


def test_ten_thousand_broken_bodies_raise_nothing_else() -> None:
    chosen = random.Random(0)
    good, length = body_of({"observation": np.ones((2, 3), np.float32)}, parameters={"binary_data_output": True})
    for _ in range(10_000):
        broken = bytearray(good)
        for _ in range(chosen.randint(1, 8)):
            broken[chosen.randrange(len(broken))] = chosen.randrange(256)
        cut = bytes(broken[: chosen.randint(0, len(broken))]) if chosen.random() < 0.3 else bytes(broken)
        with contextlib.suppress(InvalidRequestError):
            parse_infer(cut, length if chosen.random() < 0.8 else str(chosen.randint(0, 200)))


def test_arrays_and_numbers_come_through_msgpack() -> None:
    content = {
        "a": np.arange(6, dtype="<f8").reshape(2, 3),
        "b": np.float32(1.5),
        "c": [1, 2.5, "text"],
        "d": np.int64(7),
    }
    found = unpack(pack(content))
    np.testing.assert_array_equal(found["a"], content["a"])
    assert found["a"].dtype == np.float64
    assert (float(found["b"]), int(found["d"]), found["c"]) == (1.5, 7, [1, 2.5, "text"])


@pytest.mark.parametrize(
    "array",
    [
        {b"dtype": "|O", b"shape": [1], b"data": b"12345678"},
        {b"dtype": "V8", b"shape": [1], b"data": b"12345678"},
        {b"dtype": "f4,f4", b"shape": [1], b"data": b"12345678"},
        {b"dtype": "(2,)f4", b"shape": [1], b"data": b"12345678"},
        {b"dtype": 5, b"shape": [1], b"data": b"12345678"},
        {b"dtype": "x" * 1000, b"shape": [1], b"data": b""},
        {b"dtype": "<f4", b"shape": [3], b"data": b"12345678"},
        {b"dtype": "<f4", b"shape": [-2], b"data": b"12345678"},
        {b"dtype": "<f4", b"shape": [2.0], b"data": b"12345678"},
        {b"dtype": "<f4", b"shape": [True, True], b"data": b"1234"},
        {b"dtype": "<f4", b"shape": [1 << 62, 4], b"data": b""},
        {b"dtype": "<f4", b"shape": [1] * 40, b"data": b"1234"},
        {b"dtype": "<f4", b"shape": None, b"data": b"1234"},
        {b"dtype": "<f4", b"shape": [1], b"data": "1234"},
        {b"dtype": "<f4", b"shape": [1]},
        {},
    ],
)
def test_arrays_that_make_no_sense_are_refused(array: dict[bytes, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        unpack(msgpack.packb({"x": {b"__ndarray__": True, **array}}))


@pytest.mark.parametrize(
    "number", [{b"data": "1", b"dtype": "<f4"}, {b"data": 1, b"dtype": "|O"}, {b"data": 1 << 63, b"dtype": "<i8"}, {}]
)
def test_numbers_that_make_no_sense_are_refused(number: dict[bytes, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        unpack(msgpack.packb({"x": {b"__npgeneric__": True, **number}}))


def test_ten_thousand_broken_frames_raise_nothing_else() -> None:
    chosen = random.Random(1)
    good = pack({"observation": np.ones(10, np.float32), "goal": np.ones((2, 3)), "n": np.float32(3)})
    for _ in range(10_000):
        broken = bytearray(good)
        for _ in range(chosen.randint(1, 8)):
            broken[chosen.randrange(len(broken))] = chosen.randrange(256)
        with contextlib.suppress(InvalidRequestError):
            unpack(bytes(broken[: chosen.randint(0, len(broken))]) if chosen.random() < 0.3 else bytes(broken))


def test_a_frame_of_announced_terabytes_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        unpack(b"\xdd\xff\xff\xff\xff")
    with pytest.raises(InvalidRequestError):
        unpack(b"\xc6\xff\xff\xff\xff")
    with pytest.raises(InvalidRequestError):
        unpack(b"\x91" * 100_000)
