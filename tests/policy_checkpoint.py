"""Training checkpoints with random weights, in the format that ``train-rl`` writes; needs no training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

LAYERS_PER_BLOCK = 4
FETCH_REACH_FIELDS: tuple[Mapping[str, Any], ...] = (
    {"name": "observation", "shape": [10], "low": None, "high": None},
    {"name": "desired_goal", "shape": [3], "low": None, "high": None},
)


def make_policy_checkpoint(
    folder: Path,
    *,
    depth: int = 4,
    width: int = 32,
    fields: Sequence[Mapping[str, Any]] = FETCH_REACH_FIELDS,
    action_shape: Sequence[int] = (4,),
    low: Any = None,
    high: Any = None,
    normalizer: bool = False,
    recipe: str = "fetch-reach",
    environment: str = "FetchReach-v4",
    max_episode_steps: int = 50,
    success_rate: float | None = 0.97,
    seed: int = 0,
) -> Path:
    """Writes ``checkpoint.json`` and ``actor.safetensors`` and returns the folder.

    Args:
        folder: Made if need be.
        depth: Layers in the residual blocks; a multiple of four.
        width: Channels.
        fields: The observation fields in order.
        action_shape: The action's shape.
        low: Lower bounds, -1 if not given.
        high: Upper bounds, 1 if not given.
        normalizer: Whether the actor has an observation normaliser.
        recipe: Name of the recipe.
        environment: Its environment.
        max_episode_steps: Steps of an episode.
        success_rate: What the evaluation found; None for no evaluation.
        seed: The same seed gives the same weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    input_size = sum(int(np.prod(field["shape"])) for field in fields)
    action_size = int(np.prod(action_shape, dtype=int))
    tensors = _random_actor(rng, input_size=input_size, action_size=action_size, depth=depth, width=width)
    if normalizer:
        tensors["normalizer.mean"] = rng.normal(0, 3, input_size).astype(np.float32)
        tensors["normalizer.std"] = rng.uniform(0.2, 5, input_size).astype(np.float32)
    save_file(tensors, folder / "actor.safetensors")
    record = {
        "format": "gated-serving-rl",
        "format_version": 1,
        "recipe": recipe,
        "seed": seed,
        "environment": {
            "id": environment, "kwargs": {}, "control_period_s": 0.04, "max_episode_steps": max_episode_steps,
        },
        "observation_fields": [dict(field) for field in fields],
        "action": {
            "shape": list(action_shape),
            "low": [-1.0] * action_size if low is None else low,
            "high": [1.0] * action_size if high is None else high,
        },
        "actor": {
            "architecture": "residual_gaussian", "input_size": input_size, "action_size": action_size, "depth": depth,
            "width": width, "residual_interval": LAYERS_PER_BLOCK, "layer_norm_eps": 1e-6, "log_std_min": -5.0,
            "log_std_max": 2.0,
        },
        "num_environment_steps": 1000,
        "num_updates": 100,
        "evaluation": None if success_rate is None else {"success_rate": success_rate, "num_episodes": 100, "seed": 7},
        "files": {},
    }  # fmt: skip
    (folder / "checkpoint.json").write_text(json.dumps(record, indent=2))
    return update_hash(folder)


def update_hash(folder: Path) -> Path:
    """Writes the hash of the weights as they are now into the record."""
    digest = hashlib.sha256((folder / "actor.safetensors").read_bytes()).hexdigest()
    return edit_record(folder, files={"actor.safetensors": digest})


def edit_record(folder: Path, **fields: Any) -> Path:
    """Replaces fields of the record; a mapping is merged into the one that is there."""
    path = folder / "checkpoint.json"
    record = json.loads(path.read_text())
    for name, value in fields.items():
        merged = isinstance(value, Mapping) and isinstance(record.get(name), dict)
        record[name] = {**record[name], **value} if merged else value
    path.write_text(json.dumps(record, indent=2))
    return folder


def _random_actor(
    rng: np.random.Generator, *, input_size: int, action_size: int, depth: int, width: int
) -> dict[str, NDArray[np.float32]]:
    """The state dict of an untrained actor; norms and biases are random too, so that a lost one shows."""
    tensors: dict[str, NDArray[np.float32]] = {}

    def linear(name: str, fan_in: int, fan_out: int) -> None:
        bound = fan_in**-0.5
        tensors[f"{name}.weight"] = rng.uniform(-bound, bound, (fan_out, fan_in)).astype(np.float32)
        tensors[f"{name}.bias"] = rng.uniform(-bound, bound, fan_out).astype(np.float32)

    layers = (divmod(index, LAYERS_PER_BLOCK) for index in range(depth))
    for name in ["trunk.input", *(f"trunk.blocks.{block}.{layer}" for block, layer in layers)]:
        linear(f"{name}.linear", input_size if name == "trunk.input" else width, width)
        tensors[f"{name}.norm.weight"] = rng.uniform(0.8, 1.2, width).astype(np.float32)
        tensors[f"{name}.norm.bias"] = rng.uniform(-0.1, 0.1, width).astype(np.float32)
    linear("mean", width, action_size)
    linear("log_std", width, action_size)
    return tensors
