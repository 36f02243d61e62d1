from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from policy_server.manifest import (
    MANIFEST_FILE,
    MODEL_FILE,
    ManifestError,
    check_files,
    parse_manifest,
    read_manifest,
    sha256,
)


def content(**changes: Any) -> dict[str, Any]:
    return {
        "format": "gated-serving-policy",
        "format_version": 1,
        "name": "reach",
        "version": 3,
        "observation": [{"name": "observation", "shape": [2]}, {"name": "goal", "shape": [], "low": [0], "high": [1]}],
        "action": {"kind": "continuous", "shape": [2], "dtype": "float32", "low": [-1, None], "high": [1, 2.5]},
        "opset": 18,
        "architecture": {"name": "residual_gaussian", "num_parameters": 10},
        "training": {"framework": "gated-serving", "success_rate": 0.97},
        "parity": {
            "largest_error": 1e-6, "tolerance": 1e-4, "batch_sizes": [1, 3, 64], "num_observations": 68,
            "share_at_bounds": 0.5,
        },
        "files": {MODEL_FILE: "00"},
        **changes,
    }  # fmt: skip


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    manifest = parse_manifest(content())
    (tmp_path / MANIFEST_FILE).write_text(manifest.to_json())
    assert read_manifest(tmp_path) == manifest
    assert manifest.observation[1].size == 1
    assert manifest.action.low == (-1.0, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "onnx"}, "is not a policy's manifest"),
        ({"format_version": 2}, "format_version=2, this release reads 1"),
        ({"name": "../reach"}, r"name='../reach': letters, digits"),
        ({"version": 0}, "version=0"),
        ({"observation": []}, "observation"),
        ({"observation": [{"name": "action", "shape": [2]}]}, "observation.0: name='action'"),
        ({"observation": [{"name": "a", "shape": [2]}, {"name": "a", "shape": [2]}]}, "not all different"),
        ({"observation": [{"name": "a", "shape": [2], "low": [0]}]}, r"low has 1 values, the shape \[2\] needs 2"),
        (
            {"observation": [{"name": "a", "shape": [1], "low": [2], "high": [1]}]},
            r"low\[0\]=2.0 is above high\[0\]=1.0",
        ),
        ({"action": {"kind": "discrete", "shape": [], "dtype": "int64"}}, "num_choices=None"),
        ({"action": {"kind": "continuous", "shape": [1], "dtype": "int64"}}, "dtype='int64'"),
        ({"outputs": "distribution"}, "distribution=None: given with outputs='distribution'"),
        (
            {"outputs": "distribution", "distribution": {"kind": "categorical", "noise_size": 2}},
            "distribution.kind='categorical': discrete actions have a categorical one",
        ),
        (
            {
                "outputs": "distribution",
                "distribution": {"kind": "gaussian", "noise_size": 2},
                "action": {"kind": "discrete", "shape": [], "dtype": "int64", "num_choices": [2]},
            },
            "this action is discrete",
        ),
        ({"files": {}}, "policy.onnx is missing"),
        ({"precison": "fp32"}, "precison"),
        ({"control_period_s": 0}, "control_period_s=0"),
    ],
)
def test_a_contradiction_is_refused_and_names_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        parse_manifest(content(**changes))


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "is not a policy's manifest")])
def test_a_damaged_manifest_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).write_text(text)
    with pytest.raises(ManifestError, match=message):
        read_manifest(tmp_path)


def test_a_missing_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="cannot be read"):
        read_manifest(tmp_path)


def test_a_changed_file_is_found(tmp_path: Path) -> None:
    model = tmp_path / MODEL_FILE
    model.write_bytes(b"weights")
    manifest = parse_manifest(content(files={MODEL_FILE: sha256(model)}))
    check_files(tmp_path, manifest)
    model.write_bytes(b"weightz")
    with pytest.raises(ManifestError, match=r"policy.onnx: its SHA-256 is"):
        check_files(tmp_path, manifest)
    model.unlink()
    with pytest.raises(ManifestError, match=r"policy.onnx: cannot be read"):
        check_files(tmp_path, manifest)


def test_a_sampled_policy_says_what_noise_it_needs() -> None:
    manifest = parse_manifest(
        content(outputs="distribution", distribution={"kind": "squashed_gaussian", "noise_size": 2})
    )
    assert manifest.distribution is not None
    assert manifest.distribution.noise == "standard_normal"
    assert manifest.distribution.parameters == ("mean", "log_std")
    assert json.loads(manifest.to_json())["distribution"] == {"kind": "squashed_gaussian", "noise_size": 2}
