from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from policy_server.export.errors import ExportError
from policy_server.export.pipeline import ExportOptions, export_policy
from policy_server.export.stable_baselines3 import read_stable_baselines3
from policy_server.export.verify import load_session
from policy_server.manifest import MODEL_FILE, Manifest, Outputs

UNEVEN = spaces.Box(np.array([-2.0, 0.1], np.float32), np.array([1.0, 0.7], np.float32))
ALGORITHMS: dict[str, Any] = {
    "PPO": (PPO, {"n_steps": 32, "batch_size": 32, "n_epochs": 1}),
    "A2C": (A2C, {}),
    "SAC": (SAC, {"learning_starts": 10}),
    "TD3": (TD3, {"learning_starts": 10}),
    "DDPG": (DDPG, {"learning_starts": 10}),
    "DQN": (DQN, {"learning_starts": 10}),
}


class Wandering(gymnasium.Env[Any, Any]):
    """Observations of every kind, far from mean 0 and variance 1."""

    def __init__(self, action: spaces.Space[Any], *, single: bool) -> None:
        self.single = single
        self.action_space = action
        parts: dict[str, spaces.Space[Any]] = {
            "position": spaces.Box(-5, 5, (2, 3)),
            "velocity": spaces.Box(-np.inf, np.inf, (3,)),
            "mode": spaces.Discrete(4),
            "lamps": spaces.MultiBinary(2),
            "switches": spaces.MultiDiscrete([2, 3]),
        }
        self.observation_space = parts["velocity"] if single else spaces.Dict(parts)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.num_steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        return self._observe(), float(np.sum(action)), False, self.num_steps >= 10, {}

    def _observe(self) -> Any:
        velocity = self.np_random.normal([100, 0, -3], [0.1, 20, 1]).astype(np.float32)
        if self.single:
            return velocity
        return {
            "position": self.np_random.normal(3, 1, (2, 3)).astype(np.float32),
            "velocity": velocity,
            "mode": int(self.np_random.integers(4)),
            "lamps": self.np_random.integers(0, 2, 2).astype(np.int8),
            "switches": self.np_random.integers(0, [2, 3]),
        }


def train(
    path: Path,
    algorithm: str,
    action: spaces.Space[Any],
    *,
    single: bool = False,
    normalized: bool = False,
    policy: str | None = None,
    **arguments: Any,
) -> Any:
    """A model after a few steps, saved as path; with VecNormalize its statistics beside it as path.pkl."""
    kind, settings = ALGORITHMS[algorithm]
    environment: Any = DummyVecEnv([lambda: Wandering(action, single=single)])
    if normalized:
        keys = None if single else ["position", "velocity"]
        environment = VecNormalize(environment, norm_obs_keys=keys, clip_obs=2.0)
    model = kind(
        policy or ("MlpPolicy" if single else "MultiInputPolicy"),
        environment,
        device="cpu",
        seed=0,
        **{"policy_kwargs": {"net_arch": [16, 16]}, **settings, **arguments},
    )
    model.learn(40)
    model.save(path)
    if normalized:
        environment.save(path.with_suffix(".pkl"))
    return model


def observe(num: int = 20, *, single: bool = False) -> dict[str, NDArray[Any]]:
    environment = Wandering(UNEVEN, single=single)
    environment.reset(seed=5)
    all_steps = [environment.step(0)[0] for _ in range(num)]
    if single:
        return {"observation": np.stack(all_steps)}
    whole = ("mode", "lamps", "switches")
    return {
        name: np.stack([np.asarray(step[name], np.int64 if name in whole else np.float32) for step in all_steps])
        for name in all_steps[0]
    }


def run(folder: Path, inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    session = load_session(folder / MODEL_FILE)
    return dict(zip((one.name for one in session.get_outputs()), session.run(None, inputs), strict=True))


def export(path: Path, outputs: Outputs = Outputs.ACTION, **arguments: Any) -> tuple[Path, Manifest]:
    policy = read_stable_baselines3(path, **arguments)
    return export_policy(policy, path.parent / "policies", ExportOptions(outputs=outputs))


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("algorithm", ["PPO", "SAC", "TD3"])
def test_the_file_acts_as_the_model_behind_its_normaliser(algorithm: str, single: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    model = train(path, algorithm, UNEVEN, single=single, normalized=True)
    folder, manifest = export(path, vec_normalize=path.with_suffix(".pkl"))
    inputs = observe(single=single)
    given = model.get_vec_normalize_env().normalize_obs(inputs["observation"] if single else inputs)
    expected, _ = model.predict(given, deterministic=True)
    np.testing.assert_allclose(run(folder, inputs)["action"], expected, atol=1e-4)
    assert np.ptp(expected, axis=0).max() > 1e-3
    assert manifest.training.algorithm == algorithm
    assert [field.name for field in manifest.observation] == sorted(inputs)
    assert manifest.action.low == (-2.0, float(np.float32(0.1)))


@pytest.mark.parametrize("algorithm", ["A2C", "DDPG"])
def test_the_siblings_of_an_algorithm_export_too(algorithm: str, tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    model = train(path, algorithm, UNEVEN)
    folder, _ = export(path)
    inputs = observe()
    np.testing.assert_allclose(run(folder, inputs)["action"], model.predict(inputs, deterministic=True)[0], atol=1e-4)


@pytest.mark.parametrize(
    ("action", "shape"),
    [
        (spaces.Discrete(5), ()),
        (spaces.MultiDiscrete([3, 2]), (2,)),
        (spaces.MultiBinary(3), (3,)),
    ],
)
def test_discrete_actions_are_chosen_inside(action: spaces.Space[Any], shape: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    model = train(path, "PPO", action)
    folder, manifest = export(path)
    inputs = observe()
    found = run(folder, inputs)["action"]
    np.testing.assert_array_equal(found, model.predict(inputs, deterministic=True)[0])
    assert found.dtype == np.int64
    assert manifest.action.shape == shape
    sampled, manifest = export(path, Outputs.DISTRIBUTION)
    assert manifest.distribution is not None
    zeros = np.zeros((20, manifest.distribution.noise_size), np.float32)
    results = run(sampled, {**inputs, "noise": zeros})
    np.testing.assert_array_equal(results["action"], found)
    assert results["logits"].shape == zeros.shape
    last = zeros.copy()
    last[:, -1] = 1e6
    assert (np.atleast_2d(run(sampled, {**inputs, "noise": last})["action"].T)[-1] == action_choices(action) - 1).all()


def action_choices(action: Any) -> int:
    return {"Discrete": lambda: action.n, "MultiDiscrete": lambda: action.nvec[-1]}.get(
        type(action).__name__, lambda: 2
    )()


def test_q_values_choose_the_action(tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    model = train(path, "DQN", spaces.Discrete(4), single=True)
    folder, _ = export(path)
    inputs = observe(single=True)
    expected = model.predict(inputs["observation"], deterministic=True)[0]
    np.testing.assert_array_equal(run(folder, inputs)["action"], expected)
    with pytest.raises(ExportError, match="DQN is deterministic and has none"):
        export(path, Outputs.DISTRIBUTION)


def test_sampled_actions_follow_the_models_distribution(tmp_path: Path) -> None:
    inputs = observe()
    noise = np.random.default_rng(0).standard_normal((20, 2)).astype(np.float32)
    low, high = UNEVEN.low, UNEVEN.high
    for algorithm in ("PPO", "SAC"):
        path = tmp_path / f"{algorithm}.zip"
        model = train(path, algorithm, UNEVEN)
        folder, _ = export(path, Outputs.DISTRIBUTION)
        results = run(folder, {**inputs, "noise": noise})
        tensors, _ = model.policy.obs_to_tensor(inputs)
        with torch.no_grad():
            if algorithm == "PPO":
                normal = model.policy.get_distribution(tensors).distribution
                mean, log_std = normal.mean.numpy(), normal.stddev.log().numpy()
                expected = np.clip(mean + np.exp(log_std) * noise, low, high)
            else:
                mean, log_std = (one.numpy() for one in model.policy.actor.get_action_dist_params(tensors)[:2])
                expected = low + (np.tanh(mean + np.exp(log_std) * noise) + 1) / 2 * (high - low)
        np.testing.assert_allclose(results["mean"], mean, atol=1e-4)
        np.testing.assert_allclose(results["log_std"], log_std, atol=1e-4)
        np.testing.assert_allclose(results["action"], expected, atol=1e-4)


def test_state_dependent_exploration_exports_its_best_action_only(tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    arguments = {"use_sde": True, "policy_kwargs": {"net_arch": [16], "squash_output": True}}
    model = train(path, "PPO", UNEVEN, **arguments)
    folder, _ = export(path)
    inputs = observe()
    np.testing.assert_allclose(run(folder, inputs)["action"], model.predict(inputs, deterministic=True)[0], atol=1e-4)
    with pytest.raises(ExportError, match="has none"):
        export(path, Outputs.DISTRIBUTION)


def rewrite(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model.zip"
    train(path, "PPO", UNEVEN, single=True)
    return path


def spoil_weights(files: dict[str, bytes]) -> None:
    import io

    weights = torch.load(io.BytesIO(files["policy.pth"]), weights_only=True)
    weights["action_net.bias"][0] = float("nan")
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    files["policy.pth"] = buffer.getvalue()


def change_settings(**changes: Any) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        files["data"] = json.dumps({**json.loads(files["data"]), **changes}).encode()

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil_weights, "action_net.bias holds NaN or infinity"),
        (lambda files: files.pop("policy.pth"), "holds no 'policy.pth'"),
        (change_settings(policy_kwargs={"net_arch": [8]}), "weights do not fit its settings"),
        (change_settings(policy_class={"__module__": "sb3_contrib.common.recurrent.policies"}), "is recurrent"),
        (change_settings(policy_class={"__module__": "sb3_contrib.tqc.policies"}), "is no PPO, A2C, SAC"),
    ],
)
def test_what_cannot_be_exported_is_refused(change: Any, message: str, saved: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(saved, tmp_path / "model.zip"))
    rewrite(path, change)
    with pytest.raises(ExportError, match=message):
        export(path)


def test_a_truncated_file_is_refused(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    path.write_bytes(saved.read_bytes()[:-500])
    with pytest.raises(ExportError, match=r"cannot be read|was cut short"):
        export(path)


class _Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path(str(Path.cwd() / "exploded")),))


def test_a_pickle_that_names_foreign_code_is_not_run(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import base64

    monkeypatch.chdir(tmp_path)
    path = Path(shutil.copy(saved, tmp_path / "model.zip"))
    bomb = base64.b64encode(pickle.dumps(_Bomb())).decode()
    rewrite(path, change_settings(action_space={":type:": "Box", ":serialized:": bomb}))
    with pytest.raises(ExportError, match="give --trust-pickle if the file is your own"):
        export(path)
    (tmp_path / "statistics.pkl").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(ExportError, match="give --trust-pickle"):
        export(saved, vec_normalize=tmp_path / "statistics.pkl")
    assert not (tmp_path / "exploded").exists()


class _Doubled(torch.nn.Tanh):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # its parent's name for it
        return super().forward(input) * 2


def test_a_class_of_ones_own_needs_trust(tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    model = train(path, "PPO", UNEVEN, single=True, policy_kwargs={"net_arch": [8], "activation_fn": _Doubled})
    with pytest.raises(ExportError, match=r"_Doubled.*--trust-pickle"):
        export(path)
    folder, _ = export(path, trust_pickle=True)
    inputs = observe(single=True)
    expected = model.predict(inputs["observation"], deterministic=True)[0]
    np.testing.assert_allclose(run(folder, inputs)["action"], expected, atol=1e-4)


def test_images_are_refused(tmp_path: Path) -> None:
    class Pictures(gymnasium.Env[Any, Any]):
        observation_space = spaces.Box(0, 255, (36, 36, 3), np.uint8)
        action_space = UNEVEN

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            return self.observation_space.sample(), {}

    PPO("CnnPolicy", DummyVecEnv([Pictures]), device="cpu").save(tmp_path / "model.zip")
    with pytest.raises(ExportError, match=r"convolutional \(ActorCriticCnnPolicy\)"):
        export(tmp_path / "model.zip")


def test_forgotten_statistics_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    train(path, "TD3", UNEVEN, single=True, normalized=True)
    path.with_suffix(".pkl").rename(tmp_path / "vecnormalize.pkl")
    with pytest.raises(ExportError, match=r"vecnormalize.pkl lies beside it; give --vec-normalize"):
        export(path)


def test_statistics_of_another_model_are_refused(saved: Path, tmp_path: Path) -> None:
    train(tmp_path / "other.zip", "PPO", UNEVEN, normalized=True)
    with pytest.raises(ExportError, match=r"the model takes \[3\]"):
        export(saved, vec_normalize=tmp_path / "other.pkl")
    with pytest.raises(ExportError, match="cannot be read"):
        export(saved, vec_normalize=tmp_path / "none.pkl")
    (tmp_path / "list.pkl").write_bytes(pickle.dumps([1]))
    with pytest.raises(ExportError, match="holds a list, not a VecNormalize"):
        export(saved, vec_normalize=tmp_path / "list.pkl")
