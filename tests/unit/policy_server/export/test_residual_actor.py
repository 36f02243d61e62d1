from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from policy_checkpoint import FETCH_REACH_FIELDS, edit_record, make_policy_checkpoint, update_hash
from safetensors.numpy import load_file, save_file

from policy_server.export import graph
from policy_server.export.errors import ExportError
from policy_server.export.pipeline import ExportOptions, export_policy
from policy_server.export.residual_actor import read_residual_actor
from policy_server.export.verify import load_session
from policy_server.manifest import MODEL_FILE, Manifest, Outputs, check_files, read_manifest

NESTED_FIELDS = (
    {"name": "joints", "shape": [2, 3], "low": -1.0, "high": 1.0},
    {"name": "grip", "shape": [], "low": [0.0], "high": [0.1]},
)


def export(checkpoint: Path, repository: Path, **options: Any) -> tuple[Path, Manifest]:
    return export_policy(read_residual_actor(checkpoint), repository, ExportOptions(**options))


def run(folder: Path, **inputs: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    session = load_session(folder / MODEL_FILE)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, inputs), strict=True))


def observations(num: int, seed: int = 3) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return {
        "observation": rng.normal(0, 2, (num, 10)).astype(np.float32),
        "desired_goal": rng.normal(0, 2, (num, 3)).astype(np.float32),
    }


@pytest.mark.parametrize("normalizer", [False, True])
@pytest.mark.parametrize("depth", [4, 12])
def test_the_file_computes_what_the_training_network_does(depth: int, normalizer: bool, tmp_path: Path) -> None:
    networks = pytest.importorskip("gated_serving.rl.networks")
    folder = make_policy_checkpoint(tmp_path / "run", depth=depth, width=24, normalizer=normalizer)
    shape = networks.TrunkShape(input_size=13, depth=depth, width=24)
    actor = networks.GaussianActor(shape, 4)
    weights = {name: torch.from_numpy(value) for name, value in load_file(folder / "actor.safetensors").items()}
    mean, std = weights.pop("normalizer.mean", torch.zeros(13)), weights.pop("normalizer.std", torch.ones(13))
    actor.load_state_dict(weights)
    inputs = observations(5)
    x = torch.from_numpy(np.concatenate([inputs["observation"], inputs["desired_goal"]], axis=1))
    with torch.no_grad():
        expected = actor.act((x - mean) / std).numpy()
    exported, _ = export(folder, tmp_path / "policies")
    np.testing.assert_allclose(run(exported, **inputs)["action"], expected, atol=2e-5)


def test_the_manifest_says_what_the_graph_takes_and_gives(tmp_path: Path) -> None:
    folder = make_policy_checkpoint(
        tmp_path / "run", fields=NESTED_FIELDS, action_shape=(2, 2), low=-0.1, high=[0.3] * 4
    )
    exported, manifest = export(folder, tmp_path / "policies", name="grasp", version=7)
    assert exported == tmp_path / "policies" / "grasp" / "7"
    assert sorted(path.name for path in exported.iterdir()) == ["policy.json", "policy.onnx"]
    assert read_manifest(exported) == manifest
    check_files(exported, manifest)
    session = load_session(exported / MODEL_FILE)
    assert [(one.name, one.shape) for one in session.get_inputs()] == [
        ("joints", ["batch", 2, 3]),
        ("grip", ["batch"]),
    ]
    assert [(one.name, one.shape) for one in session.get_outputs()] == [("action", ["batch", 2, 2])]
    assert [field.name for field in manifest.observation] == ["joints", "grip"]
    assert manifest.training.environment == "FetchReach-v4"
    assert manifest.training.success_rate == 0.97
    assert manifest.control_period_s == 0.04
    assert manifest.architecture.depth == 4
    assert 0 < manifest.parity.largest_error < manifest.parity.tolerance
    onnx.checker.check_model(onnx.load(exported / MODEL_FILE), full_check=True)


def test_an_action_cannot_leave_its_bounds_by_rounding(tmp_path: Path) -> None:
    low, high = [-0.1, -0.7, 0.1, -1e-3], [0.1, 0.3, 0.7, 1e-3]
    folder = make_policy_checkpoint(tmp_path / "run", low=low, high=high)
    exported, manifest = export(folder, tmp_path / "policies")
    inputs = {name: values * 1e4 for name, values in observations(2000).items()}
    action = run(exported, **inputs)["action"]
    assert (action.astype(np.float64) >= np.array(low)).all()
    assert (action.astype(np.float64) <= np.array(high)).all()
    assert manifest.action.high is not None
    assert all(np.float32(bound) == bound for bound in manifest.action.high)


def test_a_sampled_action_is_the_squashed_gaussian_of_its_noise(tmp_path: Path) -> None:
    folder = make_policy_checkpoint(tmp_path / "run", low=-2.0, high=4.0)
    plain, _ = export(folder, tmp_path / "policies")
    sampled, manifest = export(folder, tmp_path / "policies", outputs=Outputs.DISTRIBUTION)
    assert sampled.name == "2"
    assert manifest.distribution is not None
    assert manifest.distribution.noise_size == 4
    inputs, zeros = observations(6), np.zeros((6, 4), np.float32)
    noise = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    at_zero, at_noise = run(sampled, **inputs, noise=zeros), run(sampled, **inputs, noise=noise)
    np.testing.assert_allclose(at_zero["action"], run(plain, **inputs)["action"], atol=1e-5)
    assert ((at_noise["log_std"] >= -5) & (at_noise["log_std"] <= 2)).all()
    expected = 1 + 3 * np.tanh(at_noise["mean"] + np.exp(at_noise["log_std"]) * noise)
    np.testing.assert_allclose(at_noise["action"], expected, atol=1e-4)


def change_tensors(folder: Path, change: Any) -> Path:
    tensors = load_file(folder / "actor.safetensors")
    change(tensors)
    save_file(tensors, folder / "actor.safetensors")
    return update_hash(folder)


def spoil(name: str, value: float) -> Any:
    def change(tensors: dict[str, NDArray[np.float32]]) -> None:
        tensors[name].reshape(-1)[-1] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil("trunk.blocks.0.2.norm.bias", np.nan), "trunk.blocks.0.2.norm.bias holds NaN or infinity"),
        (spoil("mean.weight", np.inf), "mean.weight holds NaN or infinity"),
        (lambda tensors: tensors.pop("trunk.blocks.0.1.linear.bias"), "trunk.blocks.0.1.linear.bias is missing"),
        (lambda tensors: tensors.update(extra=np.zeros(2, np.float32)), "extra is not part of a residual_gaussian"),
        (
            lambda tensors: tensors.update({"mean.bias": np.zeros(5, np.float32)}),
            r"mean.bias has the shape \[5\], needs",
        ),
        (lambda tensors: tensors.update({"mean.bias": np.zeros(4, np.int32)}), "mean.bias is I32"),
        (lambda tensors: tensors.update({"normalizer.mean": np.zeros(13, np.float32)}), "normalizer.std is missing"),
        (
            lambda tensors: tensors.update({f"normalizer.{one}": np.zeros(13, np.float32) for one in ("mean", "std")}),
            "normalizer.std holds a value that is not above 0",
        ),
    ],
)
def test_a_wrong_tensor_is_named_and_nothing_is_written(change: Any, message: str, tmp_path: Path) -> None:
    folder = change_tensors(make_policy_checkpoint(tmp_path / "run"), change)
    with pytest.raises(ExportError, match=message):
        export(folder, tmp_path / "policies")
    assert not (tmp_path / "policies").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "something"}, "format: Input should be 'gated-serving-rl'"),
        ({"format_version": 9}, "format_version: Input should be 1"),
        ({"actor": {"depth": 6}}, "actor.depth: Input should be a multiple of 4"),
        ({"actor": {"depth": 10**9}}, "actor.depth: Input should be less than or equal to 65536"),
        ({"actor": {"width": 10**9}}, "actor.width: Input should be less"),
        ({"actor": {"architecture": "cnn"}}, "actor.architecture"),
        ({"actor": {"input_size": 12}}, "actor.input_size=12, but the observation_fields join to 13"),
        ({"actor": {"action_size": 3}}, r"actor.action_size=3, but action.shape=\[4\] has 4 values"),
        ({"action": {"high": None}}, "action.low and action.high must be finite"),
        ({"action": {"low": [-1, -1, 2, -1]}}, r"low\[2\]=2.0 is above high\[2\]=1.0"),
        ({"action": {"low": [-1, -1]}}, "needs 4 numbers"),
        ({"files": {"actor.safetensors": "0" * 64}}, "its SHA-256 is .* truncated, damaged or of another"),
        ({"observation_fields": []}, "observation_fields"),
        ({"observation_fields": [FETCH_REACH_FIELDS[0], {"name": "noise", "shape": [3]}]}, "'noise' has a name"),
    ],
)
def test_a_wrong_record_is_refused_and_names_the_field(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = edit_record(make_policy_checkpoint(tmp_path / "run"), **fields)
    with pytest.raises(ExportError, match=message):
        export(folder, tmp_path / "policies")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = make_policy_checkpoint(tmp_path / "run")
    weights = folder / "actor.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ExportError, match="truncated, damaged"):
        read_residual_actor(folder)
    with pytest.raises(ExportError, match="is no whole safetensors file"):
        read_residual_actor(update_hash(folder))


def test_weights_beyond_one_file_are_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MAX_WEIGHT_BYTES", 1000)
    with pytest.raises(ExportError, match=r"depth 4, width 32.*protobuf limits to 2 GiB"):
        export(make_policy_checkpoint(tmp_path / "run"), tmp_path / "policies")
    assert not (tmp_path / "policies").exists()
