"""What clients send as observations and act requests: what is taken, and that each error names its field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_policies import write_policy

from policy_server.batcher import RowsDone
from policy_server.errors import InvalidRequestError, PayloadTooLargeError, PolicyServerError
from policy_server.manifest import Manifest, ObservationField, read_manifest
from policy_server.observation import ObservationParser
from policy_server.wire import decode_act, encode_act, parse_act


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return read_manifest(write_policy(tmp_path_factory.mktemp("repository"), fields={"goal": 2}))


@pytest.fixture
def parser(manifest: Manifest) -> ObservationParser:
    return ObservationParser(manifest, max_rows=8)


def parser_of(*fields: ObservationField, manifest: Manifest) -> ObservationParser:
    return ObservationParser(manifest.model_copy(update={"observation": fields}), max_rows=8)


ONE = {"observation": [1, 2.5, 3], "goal": [0.5, -1]}


@pytest.mark.parametrize(
    ("value", "batched"),
    [
        (ONE, False),
        ([1, 2.5, 3, 0.5, -1], False),
        ({"observation": [[1, 2.5, 3]], "goal": [[0.5, -1]]}, True),
        ([[1, 2.5, 3, 0.5, -1]], True),
    ],
)
def test_named_fields_and_a_flat_vector_are_the_same(parser: ObservationParser, value: Any, batched: bool) -> None:
    arrays, rows, is_batch = parser.from_json(value)
    assert (rows, is_batch) == (1, batched)
    np.testing.assert_array_equal(arrays["observation"], np.float32([[1, 2.5, 3]]))
    np.testing.assert_array_equal(arrays["goal"], np.float32([[0.5, -1]]))
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}
    assert all(array.flags.c_contiguous for array in arrays.values())


@pytest.mark.parametrize(
    ("value", "field", "words"),
    [
        ({"observation": [1, 2, 3]}, "observation.goal", "is missing; the fields are observation, goal"),
        ({**ONE, "other": [1]}, "observation.other", "no such field"),
        ({**ONE, "goal": [1]}, "observation.goal", r"has the shape \[1\], \[2\] is expected"),
        (
            {**ONE, "goal": [[1, 2], [3, 4]]},
            "observation.goal",
            "is a batch of 2, but observation.observation is a single",
        ),
        ({**ONE, "goal": 1}, "observation.goal", "nested 0 deep"),
        ({**ONE, "goal": [[[1, 2]]]}, "observation.goal", "nested 3 deep"),
        ({**ONE, "goal": []}, "observation.goal", "shape"),
        ({"observation": [[]], "goal": [[]]}, "observation.observation", "shape"),
        ({**ONE, "goal": ["1", "2"]}, "observation.goal", "holds strings, only numbers"),
        ({**ONE, "goal": [True, 1]}, "observation.goal", "holds booleans"),
        ({**ONE, "goal": [None, 1]}, "observation.goal", "holds null"),
        ({**ONE, "goal": [1, [2]]}, "observation.goal", "lists of other depth"),
        ({**ONE, "goal": {"x": 1}}, "observation.goal", "nested 0 deep"),
        ({**ONE, "goal": [1e39, 0]}, "observation.goal", "beyond float32"),
        ({**ONE, "goal": [10**400, 0]}, "observation.goal", "beyond float32"),
        ({"observation": [[1, 2, 3], [1, 2]], "goal": [[1, 2], [1, 2]]}, "observation.observation", "not equally long"),
        ([1, 2, 3], "observation", r"has the shape \[3\], \[5\] is expected"),
        ("text", "observation", "nested 0 deep"),
        (None, "observation", "nested 0 deep"),
        (7, "observation", "nested 0 deep"),
        (True, "observation", "nested 0 deep"),
    ],
)
def test_each_error_names_its_field(parser: ObservationParser, value: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as wrong:
        parser.from_json(value)
    assert wrong.value.field == field


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_with_their_row(parser: ObservationParser, bad: float) -> None:
    goals = np.zeros((3, 2), np.float32)
    goals[1, 1] = bad
    with pytest.raises(InvalidRequestError, match="in row 1") as wrong:
        parser.from_arrays({"observation": np.zeros((3, 3), np.float32), "goal": goals})
    assert wrong.value.field == "observation.goal"


def test_a_sum_that_overflows_does_not_refuse_finite_values(parser: ObservationParser) -> None:
    arrays, _, _ = parser.from_json({**ONE, "observation": [3e38, 3e38, 3e38]})
    assert np.isfinite(arrays["observation"]).all()


def test_more_rows_than_allowed_are_too_many(parser: ObservationParser) -> None:
    with pytest.raises(PayloadTooLargeError, match="9 observations in one request, at most 8"):
        parser.from_json([[0.0] * 5] * 9)
    assert parser.from_json([[0.0] * 5] * 8)[1] == 8


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "uint8", ">f4"])
def test_arrays_of_any_number_type_are_converted(parser: ObservationParser, dtype: str) -> None:
    arrays, rows, batched = parser.from_arrays({"observation": np.ones((2, 3), dtype), "goal": np.ones((2, 2), dtype)})
    assert (rows, batched) == (2, True)
    assert arrays["observation"].dtype == np.float32
    np.testing.assert_array_equal(arrays["goal"], np.ones((2, 2), np.float32))


@pytest.mark.parametrize("values", [np.ones(3, bool), np.asarray(["a", "b", "c"]), np.ones(3, np.complex64)])
def test_arrays_of_other_types_are_refused(parser: ObservationParser, values: np.ndarray) -> None:
    with pytest.raises(InvalidRequestError, match="float32 is expected"):
        parser.from_arrays({"observation": values, "goal": np.ones(2)})


def test_integer_fields_take_integers_only(manifest: Manifest) -> None:
    parser = parser_of(ObservationField(name="cell", shape=(), dtype="int64"), manifest=manifest)
    arrays, rows, batched = parser.from_json({"cell": 7})
    assert (arrays["cell"].tolist(), rows, batched) == ([7], 1, False)
    assert parser.from_json([3, 4])[0]["cell"].tolist() == [3, 4]
    with pytest.raises(InvalidRequestError, match="holds fractions, only integers"):
        parser.from_json({"cell": 1.5})
    with pytest.raises(InvalidRequestError, match="beyond int64"):
        parser.from_json({"cell": 1 << 63})
    with pytest.raises(InvalidRequestError, match="beyond int64"):
        parser.from_arrays({"cell": np.asarray(1 << 63, np.uint64)})
    with pytest.raises(InvalidRequestError, match="is float32, int64 is expected"):
        parser.from_arrays({"cell": np.asarray(1.5, np.float32)})


def test_images_keep_their_shape(manifest: Manifest) -> None:
    parser = parser_of(ObservationField(name="image", shape=(2, 3, 1)), manifest=manifest)
    image = np.arange(6).reshape(2, 3, 1)
    assert parser.from_json({"image": image.tolist()})[0]["image"].shape == (1, 2, 3, 1)
    assert parser.from_json([image.tolist()] * 4)[0]["image"].shape == (4, 2, 3, 1)


def parse(body: Any, parser: ObservationParser) -> Any:
    return parse_act(decode_act(body if isinstance(body, bytes) else json.dumps(body).encode()), parser)


def test_an_act_request_has_its_defaults_and_its_fields(parser: ObservationParser) -> None:
    plain = parse({"observation": ONE}, parser)
    assert (plain.deterministic, plain.seed, plain.deadline, plain.session_id) == (True, None, None, None)
    full = parse(
        {"observation": ONE, "deterministic": False, "seed": 2**64 - 1, "timeout_ms": 5, "session_id": "robot"}, parser
    )
    assert (full.deterministic, full.seed, full.session_id) == (False, 2**64 - 1, "robot")
    assert full.deadline is not None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (b'{"observation": NaN}', "body"),
        (b"\xff", "body"),
        ({}, "observation"),
        ({"observations": ONE}, "observation"),
        ({"observation": ONE, "determinstic": False}, "determinstic"),
        ({"observation": ONE, "deterministic": 1}, "deterministic"),
        ({"observation": ONE, "deterministic": "no"}, "deterministic"),
        ({"observation": ONE, "seed": -1}, "seed"),
        ({"observation": ONE, "seed": 1.0}, "seed"),
        ({"observation": ONE, "seed": True}, "seed"),
        ({"observation": ONE, "timeout_ms": 0}, "timeout_ms"),
        ({"observation": ONE, "timeout_ms": "5"}, "timeout_ms"),
        ({"observation": ONE, "timeout_ms": 1e12}, "timeout_ms"),
        ({"observation": ONE, "session_id": ""}, "session_id"),
        ({"observation": ONE, "session_id": "x" * 257}, "session_id"),
        ({"observation": ONE, "session_id": 5}, "session_id"),
    ],
)
def test_a_wrong_act_request_names_its_field(parser: ObservationParser, body: Any, field: str) -> None:
    with pytest.raises(PolicyServerError) as wrong:
        parse(body, parser)
    assert wrong.value.field == field
    assert wrong.value.status == 400


def test_deeply_nested_json_is_an_error_and_not_a_crash(parser: ObservationParser) -> None:
    with pytest.raises(InvalidRequestError):
        parse(b'{"observation":' + b"[" * 900 + b"1" + b"]" * 900 + b"}", parser)
    with pytest.raises(InvalidRequestError):
        parse(b'{"observation":' + b"[" * 100_000 + b"]" * 100_000 + b"}", parser)


def test_an_answer_has_the_actions_own_digits() -> None:
    action = np.asarray([[0.1, -1.0, 1 / 3]], np.float32)
    done = RowsDone({"action": action}, queued_s=0.001, inference_s=0.0025, batch_rows=4)
    answer = json.loads(encode_act(done, 3, batched=False, total_s=0.004))
    assert answer == {
        "action": [0.1, -1.0, 0.33333334],
        "version": 3,
        "timing": {"queue_ms": 1.0, "inference_ms": 2.5, "total_ms": 4.0, "batch_rows": 4},
    }
    assert np.asarray(answer["action"], np.float32).tobytes() == action.tobytes()
    assert json.loads(encode_act(done, 3, batched=True, total_s=0.0))["action"] == [[0.1, -1.0, 0.33333334]]


def test_a_discrete_action_is_a_number() -> None:
    done = RowsDone({"action": np.asarray([4], np.int64)}, 0.0, 0.0, 1)
    assert json.loads(encode_act(done, 1, batched=False, total_s=0.0))["action"] == 4


def test_rows_of_a_batch_are_encoded_wherever_they_lie(tmp_path: Path) -> None:
    actions = np.arange(12, dtype=np.float32).reshape(4, 3)
    done = RowsDone({"action": actions[::2]}, 0.0, 0.0, 1)
    assert json.loads(encode_act(done, 1, batched=True, total_s=0.0))["action"] == [[0, 1, 2], [6, 7, 8]]
