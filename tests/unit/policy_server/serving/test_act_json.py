from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np
import pytest

from policy_server.batcher import RowsDone
from policy_server.errors import InvalidRequestError, PayloadTooLargeError, PolicyServerError
from policy_server.manifest import ActionSpace, Architecture, Manifest, ObservationField, Parity, Training
from policy_server.observation import ObservationParser
from policy_server.served import ActRequest
from policy_server.wire import MAX_SEED, decode_act, encode_act, parse_act

POSITION = ObservationField(name="position", shape=(2,))
GOAL = ObservationField(name="goal", shape=(1,))
IMAGE = ObservationField(name="image", shape=(2, 2))
MODE = ObservationField(name="mode", shape=(1,), dtype="int64")
HEIGHT = ObservationField(name="height", shape=())


def manifest(*fields: ObservationField) -> Manifest:
    return Manifest(
        name="reach",
        version=1,
        observation=fields,
        action=ActionSpace(kind="continuous", dtype="float32", shape=(2,)),
        opset=18,
        architecture=Architecture(name="any", num_parameters=1),
        training=Training(framework="none"),
        parity=Parity(largest_error=0, tolerance=1, batch_sizes=(1,), num_observations=1, share_at_bounds=0),
        files={"policy.onnx": "00"},
    )


def parsed(content: Any, *fields: ObservationField, max_rows: int = 8) -> ActRequest:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return parse_act(decode_act(body), ObservationParser(manifest(*fields), max_rows=max_rows))


def wrong(content: Any, *fields: ObservationField, max_rows: int = 8) -> PolicyServerError:
    with pytest.raises(PolicyServerError) as caught:
        parsed(content, *fields, max_rows=max_rows)
    assert caught.value.field is not None
    assert caught.value.field in caught.value.message or caught.value.field == "body"
    return caught.value


@pytest.mark.parametrize(
    ("observation", "position", "goal", "batched"),
    [
        ({"position": [1, 2.5], "goal": [3]}, [[1, 2.5]], [[3]], False),
        ([1, 2.5, 3], [[1, 2.5]], [[3]], False),
        ({"goal": [[3]], "position": [[1, 2.5]]}, [[1, 2.5]], [[3]], True),
        ([[1, 2, 3], [4, 5, 6]], [[1, 2], [4, 5]], [[3], [6]], True),
        ({"position": [[1, 2], [4, 5]], "goal": [[3], [6]]}, [[1, 2], [4, 5]], [[3], [6]], True),
    ],
)
def test_named_fields_and_flat_vectors_one_or_many_become_rows(
    observation: Any, position: list[Any], goal: list[Any], batched: bool
) -> None:
    request = parsed({"observation": observation}, POSITION, GOAL)
    assert (request.rows, request.batched) == (len(position), batched)
    assert list(request.observation) == ["position", "goal"]
    for name, expected in (("position", position), ("goal", goal)):
        assert request.observation[name].dtype == np.float32
        assert request.observation[name].flags.c_contiguous
        np.testing.assert_array_equal(request.observation[name], np.asarray(expected, np.float32))


def test_the_quick_look_and_the_close_one_read_the_same_numbers() -> None:
    values = [0.1, -3.0000001e38, 1e-45]
    quick = parsed({"observation": values}, POSITION, GOAL).observation
    close = parsed({"observation": [values]}, POSITION, GOAL).observation
    for name in quick:
        np.testing.assert_array_equal(quick[name], close[name])


def test_fields_of_several_dimensions_of_none_and_of_integers() -> None:
    fields = {"image": [[1, 2], [3, 4]], "height": 0.5, "mode": [7]}
    request = parsed({"observation": fields}, IMAGE, HEIGHT, MODE)
    assert [array.shape for array in request.observation.values()] == [(1, 2, 2), (1,), (1, 1)]
    assert request.observation["mode"].dtype == np.int64
    flat = parsed({"observation": [1, 2, 3, 4, 0.5, 7]}, IMAGE, HEIGHT, MODE)
    batch = parsed({"observation": [[1, 2, 3, 4, 0.5, 7]] * 3}, IMAGE, HEIGHT, MODE)
    for name, array in request.observation.items():
        np.testing.assert_array_equal(flat.observation[name], array)
        np.testing.assert_array_equal(batch.observation[name], np.repeat(array, 3, axis=0))


def test_a_flat_vector_keeps_integers_whole_or_says_that_it_cannot() -> None:
    assert parsed({"observation": [0.5, 16_777_217]}, GOAL, MODE).observation["mode"].item() == 16_777_217
    for value in (0.5, 2**53 + 2):
        assert wrong({"observation": [0.5, value]}, GOAL, MODE).field == "observation.mode"
    assert (
        parsed({"observation": {"goal": [0.5], "mode": [2**62 + 1]}}, GOAL, MODE).observation["mode"].item()
        == 2**62 + 1
    )


@pytest.mark.parametrize(
    ("observation", "field", "message"),
    [
        ({"position": [1, 2]}, "observation.goal", "is missing"),
        ({"position": [1, 2], "goal": [3], "speed": [1]}, "observation.speed", "no such field"),
        ({"position": [1, 2, 3], "goal": [3]}, "observation.position", r"\[3\], \[2\] is expected"),
        ({"position": [1, "2"], "goal": [3]}, "observation.position", "strings"),
        ({"position": [1, None], "goal": [3]}, "observation.position", "null"),
        ({"position": [1, True], "goal": [3]}, "observation.position", "booleans"),
        ({"position": [1, [2]], "goal": [3]}, "observation.position", "lists"),
        ({"position": [[1], [2, 3]], "goal": [[3], [3]]}, "observation.position", "not equally long"),
        ({"position": [[1, 2]], "goal": [3]}, "observation.goal", "single observation"),
        ({"position": [[1, 2]] * 2, "goal": [[3]]}, "observation.goal", "batch of 1"),
        ({"position": 1, "goal": [3]}, "observation.position", "nested 0 deep"),
        ({"position": [[[1, 2]]], "goal": [3]}, "observation.position", "nested 3 deep"),
        ({"position": [], "goal": []}, "observation.position", "is expected"),
        ({"position": [1, 1e39], "goal": [3]}, "observation.position", "beyond float32"),
        ([1, 2, -1e39], "observation", "beyond float32"),
        ([1, 2], "observation", "is expected"),
        ([], "observation", "is expected"),
        ([[]], "observation", "is expected"),
        ([[1, 2, 3], [1, 2]], "observation", "not equally long"),
        ("1 2 3", "observation", "nested 0 deep"),
        (None, "observation", "nested 0 deep"),
    ],
)
def test_a_wrong_observation_is_named(observation: Any, field: str, message: str) -> None:
    error = wrong({"observation": observation}, POSITION, GOAL)
    assert (error.status, error.field) == (400, field)
    assert message.replace("\\", "") in error.message


def test_the_row_that_is_not_finite_is_named() -> None:
    rows = [[1.0, 2.0, 3.0]] * 4
    rows[2] = [1.0, math.copysign(1e300, -1), 3.0]
    assert "in row 2" in wrong({"observation": rows}, POSITION, GOAL).message


def test_too_many_rows_are_refused_before_they_are_read() -> None:
    assert parsed({"observation": [[1, 2, 3]] * 8}, POSITION, GOAL).rows == 8
    error = wrong({"observation": [[1, 2, 3]] * 8 + [["x"]]}, POSITION, GOAL)
    assert isinstance(error, PayloadTooLargeError)
    assert "9 observations" in error.message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"\xff\xfe", "body"),
        (b"[1, 2, 3]", "body"),
        (b"null", "body"),
        (b'{"observation": [NaN, 2, 3]}', "body"),
        (b"[" * 100_000, "body"),
        (b"{}", "observation"),
        (b'{"observation": [1, 2, 3], "sed": 3}', "sed"),
        (b'{"observation": [1, 2, 3], "deterministic": 1}', "deterministic"),
        (b'{"observation": [1, 2, 3], "deterministic": null}', "deterministic"),
        (b'{"observation": [1, 2, 3], "seed": -1}', "seed"),
        (b'{"observation": [1, 2, 3], "seed": 1.5}', "seed"),
        (b'{"observation": [1, 2, 3], "seed": true}', "seed"),
        (b'{"observation": [1, 2, 3], "seed": 18446744073709551616}', "seed"),
        (b'{"observation": [1, 2, 3], "seed": ' + b"[" * 900 + b"]" * 900 + b"}", "seed"),
        (b'{"observation": [1, 2, 3], "timeout_ms": 0}', "timeout_ms"),
        (b'{"observation": [1, 2, 3], "timeout_ms": "5"}', "timeout_ms"),
        (b'{"observation": [1, 2, 3], "timeout_ms": 1e12}', "timeout_ms"),
        (b'{"observation": [1, 2, 3], "session_id": ""}', "session_id"),
        (b'{"observation": [1, 2, 3], "session_id": 5}', "session_id"),
        (b'{"observation": ' + b"[" * 900 + b"]" * 900 + b"}", "observation"),
    ],
)
def test_a_wrong_body_is_refused_with_the_field(body: bytes, field: str) -> None:
    error = wrong(body, POSITION, GOAL)
    assert isinstance(error, InvalidRequestError)
    assert error.field == field
    assert len(error.message) < 300


def test_the_other_fields_are_taken_over() -> None:
    before = time.monotonic()
    request = parsed(
        {"observation": [1, 2, 3], "deterministic": False, "seed": MAX_SEED, "timeout_ms": 2000, "session_id": "arm-7"},
        POSITION, GOAL,
    )  # fmt: skip
    assert (request.deterministic, request.seed, request.session_id) == (False, MAX_SEED, "arm-7")
    assert request.deadline is not None
    assert 2.0 <= request.deadline - before < 60.0


def test_the_bodys_timeout_goes_before_the_headers() -> None:
    observations = ObservationParser(manifest(POSITION), max_rows=1)
    far, near = 3_600_000.0, 1.0
    from_header = parse_act({"observation": [1, 2]}, observations, timeout_ms=far).deadline
    from_body = parse_act({"observation": [1, 2], "timeout_ms": near}, observations, timeout_ms=far).deadline
    assert from_header is not None
    assert from_body is not None
    assert from_header - from_body > 3000


def test_an_answer_reads_back_to_the_same_float32() -> None:
    actions = np.asarray([[0.1, -1e-7], [1.0, 3.4e38]], np.float32)
    done = RowsDone({"action": actions}, queued_s=0.0012344, inference_s=0.5, batch_rows=7)
    answer = json.loads(encode_act(done, 12, batched=True, total_s=0.51))
    np.testing.assert_array_equal(np.asarray(answer["action"], np.float32), actions)
    assert answer["version"] == 12
    assert answer["timing"] == {"queue_ms": 1.234, "inference_ms": 500.0, "total_ms": 510.0, "batch_rows": 7}
    one = RowsDone({"action": actions[1:]}, queued_s=0, inference_s=0, batch_rows=1)
    assert json.loads(encode_act(one, 1, batched=False, total_s=0))["action"] == pytest.approx([1.0, 3.4e38])


def test_discrete_actions_are_whole_numbers() -> None:
    done = RowsDone({"action": np.asarray([3, 1], np.int64)}, queued_s=0, inference_s=0, batch_rows=2)
    assert json.loads(encode_act(done, 1, batched=True, total_s=0))["action"] == [3, 1]
    assert json.loads(encode_act(done, 1, batched=False, total_s=0))["action"] == 3
