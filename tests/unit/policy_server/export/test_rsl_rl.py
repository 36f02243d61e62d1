from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from rsl_rl.models import MLPModel, RNNModel
from tensordict import TensorDict

from policy_server.export.errors import ExportError
from policy_server.export.pipeline import ExportOptions, export_policy
from policy_server.export.rsl_rl import read_rsl_rl
from policy_server.export.verify import load_session
from policy_server.manifest import MODEL_FILE, Manifest, Outputs

SIZES = {"policy": 5, "heights": 3}
GAUSSIAN = {"class_name": "GaussianDistribution", "init_std": 0.7, "std_type": "scalar"}


def save(
    folder: Path,
    *,
    groups: tuple[str, ...] = ("policy",),
    distribution: dict[str, Any] | None = GAUSSIAN,
    normalized: bool = True,
    activation: str = "elu",
    kind: Any = MLPModel,
) -> tuple[Path, Any]:
    """An actor of three actions whose normaliser has seen observations, and its run's configuration."""
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    settings = {
        "hidden_dims": [16, 8], "activation": activation, "obs_normalization": normalized,
        "distribution_cfg": distribution,
    }  # fmt: skip
    observed = TensorDict(
        {name: torch.tensor(generator.normal(50, 3, (200, size)), dtype=torch.float32) for name, size in SIZES.items()},
        batch_size=[200],
    )
    actor = kind(observed, {"actor": list(groups)}, "actor", 3, **settings)
    actor.train()
    actor.update_normalization(observed)
    actor.eval()
    folder.mkdir()
    path = folder / "model_40.pt"
    torch.save({"actor_state_dict": actor.state_dict(), "critic_state_dict": {}, "iter": 40, "infos": None}, path)
    (folder / "params").mkdir()
    content = {"actor": {"class_name": kind.__name__, **settings}, "obs_groups": {"actor": list(groups)}}
    (folder / "params" / "agent.yaml").write_text(yaml.safe_dump(content))
    return path, actor


def read(path: Path, **arguments: Any) -> Any:
    given = {"config": None, "observation": (), "low": None, "high": None, **arguments}
    return read_rsl_rl(path, **given)


def export(path: Path, outputs: Outputs = Outputs.ACTION, **arguments: Any) -> tuple[Path, Manifest]:
    return export_policy(read(path, **arguments), path.parent / "policies", ExportOptions(outputs=outputs))


def run(folder: Path, inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    session = load_session(folder / MODEL_FILE)
    return dict(zip((one.name for one in session.get_outputs()), session.run(None, inputs), strict=True))


def observe(*groups: str) -> dict[str, NDArray[Any]]:
    generator = np.random.default_rng(1)
    return {name: generator.normal(50, 3, (7, SIZES[name])).astype(np.float32) for name in groups}


def act(actor: Any, inputs: dict[str, NDArray[Any]]) -> NDArray[Any]:
    observation = TensorDict({name: torch.from_numpy(value) for name, value in inputs.items()}, batch_size=[7])
    with torch.no_grad():
        return actor(observation).numpy()


@pytest.mark.parametrize(
    "distribution",
    [
        None,
        GAUSSIAN,
        {"class_name": "HeteroscedasticGaussianDistribution", "std_type": "log"},
        {"class_name": "BetaDistribution"},
    ],
)
def test_the_file_acts_as_the_actor(distribution: dict[str, Any] | None, tmp_path: Path) -> None:
    path, actor = save(tmp_path / "walk", distribution=distribution)
    folder, manifest = export(path)
    inputs = observe("policy")
    np.testing.assert_allclose(run(folder, inputs)["action"], act(actor, inputs), atol=1e-4)
    assert folder.parent.name == "walk"
    assert manifest.action.low is None
    assert manifest.training.framework == "rsl_rl"


def test_several_groups_are_joined_in_the_runs_order(tmp_path: Path) -> None:
    path, actor = save(tmp_path / "walk", groups=("policy", "heights"), normalized=False, activation="mish")
    sizes = ("heights=3", "policy=5")
    folder, manifest = export(path, observation=sizes, low="-0.05", high="0.05,0.1,1")
    inputs = observe("policy", "heights")
    expected = np.clip(act(actor, inputs), [-0.05] * 3, [0.05, 0.1, 1])
    np.testing.assert_allclose(run(folder, inputs)["action"], expected, atol=1e-4)
    assert [field.name for field in manifest.observation] == ["policy", "heights"]


@pytest.mark.parametrize("kind", ["GaussianDistribution", "HeteroscedasticGaussianDistribution"])
@pytest.mark.parametrize("std_type", ["scalar", "log"])
def test_sampled_actions_follow_the_actors_distribution(kind: str, std_type: str, tmp_path: Path) -> None:
    path, actor = save(tmp_path / "walk", distribution={"class_name": kind, "std_type": std_type, "init_std": 0.5})
    folder, _ = export(path, Outputs.DISTRIBUTION)
    inputs = observe("policy")
    noise = np.random.default_rng(2).standard_normal((7, 3)).astype(np.float32)
    results = run(folder, {**inputs, "noise": noise})
    observation = TensorDict({"policy": torch.from_numpy(inputs["policy"])}, batch_size=[7])
    with torch.no_grad():
        actor(observation, stochastic_output=True)
        mean, std = actor.output_mean.numpy(), actor.output_std.numpy()
    np.testing.assert_allclose(results["mean"], mean, atol=1e-4)
    np.testing.assert_allclose(np.exp(results["log_std"]), np.broadcast_to(std, (7, 3)), atol=1e-4)
    np.testing.assert_allclose(results["action"], mean + std * noise, atol=1e-4)


def test_a_beta_has_no_noise_that_makes_it(tmp_path: Path) -> None:
    path, _ = save(tmp_path / "walk", distribution={"class_name": "BetaDistribution"})
    with pytest.raises(ExportError, match="has none"):
        export(path, Outputs.DISTRIBUTION)


def test_a_recurrent_actor_is_refused(tmp_path: Path) -> None:
    path, _ = save(tmp_path / "walk", kind=RNNModel)
    with pytest.raises(ExportError, match=r"recurrent \(RNNModel\)"):
        export(path)


def test_what_is_missing_is_asked_for(tmp_path: Path) -> None:
    path, _ = save(tmp_path / "walk", groups=("policy", "heights"))
    with pytest.raises(ExportError, match="--observation policy=SIZE --observation heights=SIZE"):
        export(path)
    with pytest.raises(ExportError, match="reads 8 values, the --observation fields have 7"):
        export(path, observation=("policy=4", "heights=3"))
    (tmp_path / "walk" / "params" / "agent.yaml").unlink()
    with pytest.raises(ExportError, match="give --config FILE"):
        export(path)


def test_a_configuration_of_another_network_is_refused(tmp_path: Path) -> None:
    path, _ = save(tmp_path / "walk")
    config = tmp_path / "agent.yaml"
    config.write_text(yaml.safe_dump({"actor": {"hidden_dims": [16, 9], "activation": "elu"}}))
    with pytest.raises(ExportError, match="weights do not fit the configuration's 'actor'"):
        export(path, config=config)
    config.write_text("policy: {}")
    with pytest.raises(ExportError, match="has no section 'actor'"):
        export(path, config=config)
    config.write_text("{")
    with pytest.raises(ExportError, match="neither YAML nor JSON"):
        export(path, config=config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_state_dict": {}}, "before 4.0"),
        ({"weights": 1}, "holds no 'actor_state_dict'"),
        (Path(), "running code"),
    ],
)
def test_another_file_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "model_1.pt")
    with pytest.raises(ExportError, match=message):
        export(tmp_path / "model_1.pt")


def test_a_damaged_weight_is_named(tmp_path: Path) -> None:
    path, actor = save(tmp_path / "walk")
    with torch.no_grad():
        actor.mlp[2].bias[1] = float("nan")
    torch.save({"actor_state_dict": actor.state_dict()}, path)
    with pytest.raises(ExportError, match=r"mlp.2.bias holds NaN"):
        export(path)
