"""Observations: within the policy's bounds, or the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from loadtest.errors import UsageError
from loadtest.observations import ObservationField, drawn_observations, fields_of, read_observations

FIELDS = (
    ObservationField(name="state", shape=(2, 2), dtype="float32", low=(0, -5, None, 20), high=(1, None, -3, 30)),
    ObservationField(name="mode", shape=(), dtype="int64", low=(1,), high=(3,)),
    ObservationField(name="free", shape=(3,), dtype="float32"),
)


def test_drawn_observations_are_within_the_bounds() -> None:
    drawn = drawn_observations(FIELDS, rows=4, seed=0, number=200)
    state = np.concatenate([observation["state"] for observation in drawn]).reshape(-1, 4)
    assert (state.shape, state.dtype) == ((800, 4), np.float32)
    assert (state >= [0, -5, -np.inf, 20]).all()
    assert (state <= [1, np.inf, -3, 30]).all()
    assert (state.std(axis=0) > 0.1).all()
    modes = np.concatenate([observation["mode"] for observation in drawn])
    assert (set(modes.tolist()), modes.dtype) == ({1, 2, 3}, np.int64)
    free = np.concatenate([observation["free"] for observation in drawn])
    assert np.abs(free).max() <= 1


def test_they_repeat_with_the_seed() -> None:
    first, again, other = (drawn_observations(FIELDS, rows=1, seed=seed, number=2) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first[0]["free"], again[0]["free"])
    assert not np.array_equal(first[0]["free"], other[0]["free"])
    assert not np.array_equal(first[0]["free"], first[1]["free"])


def test_fields_come_from_the_manifest() -> None:
    manifest = {"observation": [{"name": "a", "shape": [2], "dtype": "float32", "low": [0, None], "high": None}]}
    assert fields_of(manifest) == (ObservationField(name="a", shape=(2,), dtype="float32", low=(0, None)),)


def test_the_users_observations_are_read_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "observations.jsonl"
    path.write_text("".join(json.dumps({"a": [index, 0], "b": index}) + "\n" for index in range(3)))
    fields = (
        ObservationField(name="a", shape=(2,), dtype="float32"),
        ObservationField(name="b", shape=(), dtype="int64"),
    )
    read = read_observations(path, fields, rows=2)
    assert [observation["b"].tolist() for observation in read] == [[0, 1], [1, 2], [2, 0]]
    assert read[1]["a"].shape == (2, 2)


def test_a_single_field_may_be_a_plain_list(tmp_path: Path) -> None:
    path = tmp_path / "observations.jsonl"
    path.write_text("[1, 2]\n")
    (read,) = read_observations(path, (ObservationField(name="a", shape=(2,), dtype="float32"),), rows=1)
    assert read["a"].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1", "line 1: is not JSON"),
        ('{"b": [1, 2]}', r"has the fields \['b'\], the policy takes \['a'\]"),
        ("[1, 2, 3]", r"a has the shape \[3\], not \[2\]"),
        ('["x", 1]', "a does not hold numbers only"),
        ("[[1], [2, 3]]", "a does not hold numbers only"),
        ("[NaN, 1]", "a is not finite"),
        ("", "holds no observation"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "observations.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=message):
        read_observations(path, (ObservationField(name="a", shape=(2,), dtype="float32"),), rows=1)


def test_several_fields_need_names(tmp_path: Path) -> None:
    path = tmp_path / "observations.jsonl"
    path.write_text("[1, 2]\n")
    with pytest.raises(UsageError, match="an object with the fields state, mode, free"):
        read_observations(path, FIELDS, rows=1)
