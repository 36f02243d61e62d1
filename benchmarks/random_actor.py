"""A checkpoint of a deep actor with random weights: speed does not depend on what it has learned."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from policy_server.export.checkpoint import ACTOR_FILE, CHECKPOINT_FILE, ActorRecord
from policy_server.manifest import sha256

OBSERVATION_SIZE, GOAL_SIZE, ACTION_SIZE = 10, 3, 4


def write_checkpoint(folder: Path, depth: int, width: int) -> Path:
    """A checkpoint with weights as training starts with them: uniform in +-1/sqrt(inputs), LayerNorm one and zero.

    The residual sum grows with every block, so the head is divided by their number: actions that all lie at their
    bounds would hide every error.
    """
    rng = np.random.default_rng(depth)
    actor = {
        "architecture": "residual_gaussian",
        "input_size": OBSERVATION_SIZE + GOAL_SIZE,
        "action_size": ACTION_SIZE,
        "depth": depth,
        "width": width,
        "residual_interval": 4,
        "layer_norm_eps": 1e-6,
        "log_std_min": -5.0,
        "log_std_max": 2.0,
    }
    tensors: dict[str, np.ndarray] = {}
    for name, shape in ActorRecord.model_validate(actor).tensor_shapes().items():
        bound = 1 / np.sqrt(shape[1]) if len(shape) == 2 else 0.0
        values = rng.uniform(-bound, bound, shape) / (depth // 4 if name == "mean.weight" else 1)
        tensors[name] = (values + (1.0 if name.endswith("norm.weight") else 0.0)).astype(np.float32)
    save_file(tensors, folder / ACTOR_FILE)
    sizes = {"observation": OBSERVATION_SIZE, "desired_goal": GOAL_SIZE}
    record = {
        "format": "gated-serving-rl",
        "format_version": 1,
        "recipe": "inference-precision",
        "seed": depth,
        "environment": {"id": "FetchReach-v4", "kwargs": {}, "control_period_s": 0.04, "max_episode_steps": 50},
        "observation_fields": [
            {"name": name, "shape": [size], "low": None, "high": None} for name, size in sizes.items()
        ],
        "action": {"shape": [ACTION_SIZE], "low": [-1.0] * ACTION_SIZE, "high": [1.0] * ACTION_SIZE},
        "actor": actor,
        "num_environment_steps": 0,
        "num_updates": 0,
        "evaluation": None,
        "files": {ACTOR_FILE: sha256(folder / ACTOR_FILE)},
    }
    (folder / CHECKPOINT_FILE).write_text(json.dumps(record))
    return folder


def export_actor(repository: Path, depth: int, *, width: int = 256) -> Path:
    """An actor with random weights, exported as ``actor/1``; the ONNX file."""
    with tempfile.TemporaryDirectory() as name:
        checkpoint = write_checkpoint(Path(name), depth, width)
        command = [sys.executable, "-m", "gated_serving", "export-policy", str(checkpoint), str(repository)]
        subprocess.run([*command, "--name", "actor"], check=True, capture_output=True)
    return repository / "actor" / "1" / "policy.onnx"
