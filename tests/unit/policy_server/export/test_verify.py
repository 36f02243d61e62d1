from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from policy_checkpoint import make_policy_checkpoint, update_hash
from safetensors.numpy import load_file, save_file

from policy_server.export.errors import ParityError
from policy_server.export.pipeline import ExportOptions, export_policy
from policy_server.export.policy import TrainedPolicy
from policy_server.export.residual_actor import read_residual_actor
from policy_server.export.verify import draw_noise, draw_observations
from policy_server.manifest import Outputs

Change = Callable[[onnx.ModelProto], None]


@pytest.fixture
def policy(tmp_path: Path) -> TrainedPolicy:
    return read_residual_actor(make_policy_checkpoint(tmp_path / "run", normalizer=True, low=-3.0, high=1.0))


def scale_weight(name: str, factor: float) -> Change:
    def change(model: onnx.ModelProto) -> None:
        tensor = next(one for one in model.graph.initializer if one.name == name)
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), name))

    return change


def bypass(name: str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        node = next(one for one in model.graph.node if one.name == name)
        node.CopyFrom(onnx.helper.make_node("Identity", node.input[:1], node.output, name=name))

    return change


def fix_batch(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (bypass("normalizer/centred"), "largest error"),
        (bypass("normalizer/scaled"), "largest error"),
        (bypass("trunk/blocks.0/residual"), "largest error"),
        (bypass("action/squashed"), "largest error|leaves its bound"),
        (bypass("action/shifted"), "largest error"),
        (scale_weight("trunk/blocks.0.2/linear.bias", 0.0), "largest error"),
        (scale_weight("trunk/blocks.0.3/norm.weight", 1.01), "largest error"),
        (scale_weight("head/mean.bias", np.nan), "largest error nan"),
        (fix_batch, "fails on a batch of 3"),
    ],
)
def test_a_graph_that_computes_something_else_is_not_written(
    change: Change, message: str, policy: TrainedPolicy, tmp_path: Path
) -> None:
    def build(outputs: Outputs) -> onnx.ModelProto:
        model = policy.build_graph(outputs)
        change(model)
        return model

    with pytest.raises(ParityError, match=message):
        export_policy(dataclasses.replace(policy, build_graph=build), tmp_path / "policies", ExportOptions())
    assert not (tmp_path / "policies").exists()


def test_an_action_outside_its_bounds_is_an_error_however_near_the_source(
    policy: TrainedPolicy, tmp_path: Path
) -> None:
    narrower = policy.action.model_copy(update={"high": (1.0, 1.0, 1.0, -1.0)})
    with pytest.raises(ParityError, match=r"action\[3\] at a batch of \d+ leaves its bound -1.0"):
        export_policy(dataclasses.replace(policy, action=narrower), tmp_path / "policies", ExportOptions())


def test_the_mean_is_compared_where_squashing_hides_an_error(tmp_path: Path) -> None:
    folder = make_policy_checkpoint(tmp_path / "run")
    tensors = load_file(folder / "actor.safetensors")
    tensors["mean.bias"][:] = 30
    save_file(tensors, folder / "actor.safetensors")
    policy = read_residual_actor(update_hash(folder))

    def build(outputs: Outputs) -> onnx.ModelProto:
        model = policy.build_graph(outputs)
        scale_weight("head/mean.bias", 1.001)(model)
        return model

    broken = dataclasses.replace(policy, build_graph=build)
    _, manifest = export_policy(broken, tmp_path / "policies", ExportOptions())
    assert manifest.parity.share_at_bounds == 1
    with pytest.raises(ParityError, match="mean at a batch of"):
        export_policy(broken, tmp_path / "policies", ExportOptions(outputs=Outputs.DISTRIBUTION))


def test_a_source_that_was_read_wrong_is_not_written(policy: TrainedPolicy, tmp_path: Path) -> None:
    other = dataclasses.replace(policy, own_action=lambda inputs: policy.reference(inputs)["action"] * 0.99)
    with pytest.raises(ParityError, match="own prediction is"):
        export_policy(other, tmp_path / "policies", ExportOptions())


def test_the_tolerance_can_be_set(policy: TrainedPolicy, tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="above the tolerance 1e-12"):
        export_policy(policy, tmp_path / "policies", ExportOptions(tolerance=1e-12))


def test_observations_are_random_and_follow_bounds_and_statistics(tmp_path: Path) -> None:
    fields = (
        {"name": "bounded", "shape": [2], "low": [0.0, 10.0], "high": [1.0, 30.0]},
        {"name": "free", "shape": [3], "low": None, "high": None},
    )
    policy = read_residual_actor(make_policy_checkpoint(tmp_path / "run", fields=fields, normalizer=True))
    drawn = draw_observations(policy, 400)
    assert np.unique(drawn["free"]).size == 1200
    assert (drawn["bounded"].min(axis=0) >= [-0.1, 8.0]).all()
    assert (drawn["bounded"].min(axis=0) < [0.0, 10.0]).all()
    assert (drawn["bounded"].max(axis=0) > [1.0, 30.0]).all()
    mean, std = policy.scale["free"]
    far = np.abs((drawn["free"] - mean) / std)
    assert 0.3 < np.median(far) < 1.5
    assert far.max() > 5


def test_noise_holds_zeros_and_random_rows(policy: TrainedPolicy) -> None:
    noise = draw_noise(policy, 9)
    assert (noise[::3] == 0).all()
    assert (noise[1::3] != 0).all()
