"""Opens a Stable-Baselines3 ``.zip`` and rebuilds its policy, without the algorithm, its buffers or its environment."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from policy_server.export.errors import ExportError, UnreadableSourceError
from policy_server.export.restricted_pickle import load_pickle

_ALGORITHM_OF_MODULE = {
    "stable_baselines3.sac.policies": "SAC",
    "stable_baselines3.td3.policies": "TD3",
    "stable_baselines3.dqn.policies": "DQN",
    "stable_baselines3.common.policies": "PPO",
}
_USUAL_STATISTICS = ("vecnormalize.pkl", "vec_normalize.pkl")


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A model's policy and what its file says of it. The policy is the library's own class, in eval mode."""

    path: Path
    algorithm: str
    version: str | None
    policy: Any
    observation_space: Any
    action_space: Any
    seed: int | None
    num_timesteps: int | None


def read_saved_model(path: Path, *, trust_pickle: bool) -> SavedModel:
    """Reads the settings, refuses what cannot be exported before anything is unpickled, and loads the weights.

    Raises:
        UnreadableSourceError: The file is no model, or damaged.
        ExportError: The policy cannot be exported, or needs a class that only --trust-pickle loads.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if missing := [name for name in ("data", "policy.pth") if name not in names]:
                raise UnreadableSourceError(
                    f"{path}: holds no {missing[0]!r}; it is no Stable-Baselines3 model, or was cut short"
                )
            settings: dict[str, Any] = json.loads(archive.read("data"))
            weights = torch.load(io.BytesIO(archive.read("policy.pth")), map_location="cpu", weights_only=True)
            version = archive.read(name).decode() if (name := "_stable_baselines3_version") in names else None
    except UnreadableSourceError:
        raise
    except Exception as error:  # zipfile, json, zlib and torch each have several
        raise UnreadableSourceError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error
    algorithm = _find_algorithm(settings, path)
    unpickled = {
        name: _unpickle(settings.get(name), f"{path}: {name}", trust_pickle)
        for name in ("policy_class", "observation_space", "action_space", "policy_kwargs")
    }
    if unpickled["observation_space"] is None or unpickled["action_space"] is None:
        raise UnreadableSourceError(f"{path}: does not say its observation_space and action_space")
    _refuse_images(unpickled, path)
    policy = _make_policy(unpickled, algorithm, bool(settings.get("use_sde")), weights, path)
    return SavedModel(
        path=path,
        algorithm=algorithm,
        version=version,
        policy=policy,
        observation_space=unpickled["observation_space"],
        action_space=unpickled["action_space"],
        seed=settings.get("seed"),
        num_timesteps=settings.get("num_timesteps"),
    )


def read_vec_normalize(path: Path | None, saved: SavedModel, *, trust_pickle: bool) -> Any:
    """Loads the statistics that ``VecNormalize.save`` wrote.

    Args:
        path: The file; None for a model that was trained without.
        saved: The model, whose observation the statistics must fit.
        trust_pickle: See ``read_saved_model``.

    Returns:
        A ``VecNormalize``, or None.

    Raises:
        UnreadableSourceError: The file is damaged or something else.
        ExportError: It does not fit the model, or statistics lie beside the model that were not given.
    """
    if path is None:
        beside = [found for name in _USUAL_STATISTICS if (found := saved.path.with_name(name)).exists()]
        if beside:
            raise ExportError(
                f"{saved.path}: {beside[0].name} lies beside it; give --vec-normalize {beside[0]}, or move it away if "
                "it belongs to another model"
            )
        return None
    from stable_baselines3.common.vec_env import VecNormalize

    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnreadableSourceError(f"--vec-normalize {path}: cannot be read ({error.strerror})") from error
    found = load_pickle(data, str(path), trust=trust_pickle)
    if not isinstance(found, VecNormalize):
        raise UnreadableSourceError(f"--vec-normalize {path}: holds a {type(found).__name__}, not a VecNormalize")
    ours, theirs = _shapes(saved.observation_space), _shapes(found.observation_space)
    if ours != theirs:
        raise ExportError(f"--vec-normalize {path}: is for observations of {theirs}, the model takes {ours}")
    found.training = False
    return found


def _find_algorithm(settings: Mapping[str, Any], path: Path) -> str:
    described = settings.get("policy_class")
    module = str(cast("Mapping[str, Any]", described).get("__module__")) if isinstance(described, dict) else ""
    if "recurrent" in module or "lstm" in str(settings.get("policy_kwargs", "")).lower():
        raise ExportError(
            f"{path}: the policy is recurrent ({module}), and its state from step to step would be lost; only policies "
            "without a memory can be exported"
        )
    if module == "stable_baselines3.common.policies":
        return "PPO" if "clip_range" in settings else "A2C"
    if module in _ALGORITHM_OF_MODULE:
        return _ALGORITHM_OF_MODULE[module]
    if module.startswith("sb3_contrib") or not module:
        raise UnreadableSourceError(
            f"{path}: is no PPO, A2C, SAC, TD3, DDPG or DQN (its policy is of {module or 'none'})"
        )
    # A policy class of the user's own: what the settings hold tells the algorithm apart.
    marks = {"clip_range": "PPO", "target_entropy": "SAC", "policy_delay": "TD3", "exploration_fraction": "DQN"}
    return next((name for mark, name in marks.items() if mark in settings), "A2C")


def _unpickle(described: Any, origin: str, trust: bool) -> Any:
    """A setting is plain JSON, or a pickle in base64 with a description around it."""
    if not isinstance(described, dict) or ":serialized:" not in described:
        return cast("Any", described)
    serialized = str(cast("dict[str, Any]", described)[":serialized:"])
    return load_pickle(base64.b64decode(serialized), origin, trust=trust)


def _refuse_images(unpickled: Mapping[str, Any], path: Path) -> None:
    from stable_baselines3.common import preprocessing
    from stable_baselines3.common.torch_layers import NatureCNN

    is_image_space = cast("Any", preprocessing).is_image_space
    arguments: dict[str, Any] = unpickled["policy_kwargs"] or {}
    extractor = arguments.get("features_extractor_class")
    name = unpickled["policy_class"].__name__
    if "Cnn" in name or (isinstance(extractor, type) and issubclass(extractor, NatureCNN)):
        raise ExportError(f"{path}: the policy is convolutional ({name}); only MlpPolicy and MultiInputPolicy export")
    space = unpickled["observation_space"]
    for field, subspace in (space.spaces if hasattr(space, "spaces") else {"observation": space}).items():
        if is_image_space(subspace):
            raise ExportError(
                f"{path}: observation field {field!r} is an image {list(subspace.shape)}, which goes through a "
                "convolutional network; only vectors can be exported"
            )


def _make_policy(unpickled: Mapping[str, Any], algorithm: str, use_sde: bool, weights: Any, path: Path) -> Any:
    arguments = dict(unpickled["policy_kwargs"] or {})
    arguments.pop("use_sde", None)
    if algorithm in ("PPO", "A2C", "SAC"):
        arguments["use_sde"] = use_sde
    try:
        policy = unpickled["policy_class"](
            unpickled["observation_space"], unpickled["action_space"], _no_learning, **arguments
        )
        policy.load_state_dict(weights)
    except Exception as error:  # a class of the user's own may fail in any way
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnreadableSourceError(f"{path}: its weights do not fit its settings ({reason})") from error
    policy.to("cpu")
    policy.set_training_mode(False)
    return policy


def _no_learning(_: float) -> float:
    return 0.0


def _shapes(space: Any) -> Any:
    if hasattr(space, "spaces"):
        return {name: list(one.shape) for name, one in space.spaces.items()}
    return list(space.shape)
