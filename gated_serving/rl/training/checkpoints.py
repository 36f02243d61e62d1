"""Checkpoints: folders of safetensors and JSON that are whole at any moment, however the process ends.

``best`` and ``last`` both hold the actor and ``checkpoint.json``, which says all that running it elsewhere takes.
``last`` holds besides what only going on takes: critic, optimisers, random states, and where replay and environments
were.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from gated_serving.rl.environments import GoalEnvironmentSpec
from gated_serving.rl.networks import (
    LAYER_NORM_EPS,
    LOG_STD_MAX,
    LOG_STD_MIN,
    RESIDUAL_INTERVAL,
    GaussianActor,
    TrunkShape,
)
from gated_serving.rl.normalization import InputNormalizer
from gated_serving.rl.settings import TrainingRun
from gated_serving.rl.training.learner import Learner
from gated_serving.run_folder import write_json

FORMAT = "gated-serving-rl"
FORMAT_VERSION = 1
ARCHITECTURE = "residual_gaussian"
RECORD = "checkpoint.json"
ACTOR = "actor.safetensors"
CRITIC = "critic.safetensors"
OPTIMIZERS = "optimizers.safetensors"
STATE = "state.json"
_NORMALIZER_PREFIX = "normalizer."


class DamagedCheckpointError(Exception):
    """A checkpoint's files are not those that were written."""


@dataclass(frozen=True)
class LoadedActor:
    """A policy as a checkpoint holds it.

    Args:
        actor: The network.
        normalizer: What its input passes first; None where it takes inputs as they are.
        record: Its ``checkpoint.json``.
    """

    actor: GaussianActor
    normalizer: InputNormalizer | None
    record: dict[str, Any]


def describe(run: TrainingRun, spec: GoalEnvironmentSpec) -> dict[str, Any]:
    """The part of ``checkpoint.json`` that is the same throughout a run."""
    sizes = {"observation": spec.observation_size, "desired_goal": spec.goal_size}
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "recipe": run.name,
        "seed": run.optimisation.seed,
        "environment": {
            "id": spec.id,
            "kwargs": dict(run.environment.kwargs),
            "control_period_s": spec.control_period_s,
            "max_episode_steps": spec.max_episode_steps,
        },
        "observation_fields": [
            {"name": name, "shape": [sizes[name]], "low": None, "high": None} for name in spec.observation_fields
        ],
        "action": {
            "shape": [spec.action_size],
            "low": [float(bound) for bound in spec.action_low],
            "high": [float(bound) for bound in spec.action_high],
        },
        "actor": {
            "architecture": ARCHITECTURE,
            "input_size": spec.observation_size + spec.goal_size,
            "action_size": spec.action_size,
            "depth": run.networks.actor_depth,
            "width": run.networks.width,
            "residual_interval": RESIDUAL_INTERVAL,
            "layer_norm_eps": LAYER_NORM_EPS,
            "log_std_min": LOG_STD_MIN,
            "log_std_max": LOG_STD_MAX,
        },
    }


def write_checkpoint(
    folder: Path, record: Mapping[str, Any], learner: Learner, *, state: Mapping[str, Any] | None = None
) -> None:
    """Writes a checkpoint beside ``folder`` and puts it in its place in one step.

    Args:
        folder: ``best`` or ``last``.
        record: ``checkpoint.json`` without its ``files``.
        learner: Whose networks are written.
        state: Where the run is, as JSON; None writes what running the policy takes and nothing else.
    """
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    files = {ACTOR: _actor_tensors(learner)}
    if state is not None:
        files[CRITIC] = dict(learner.critic.state_dict())
        files[OPTIMIZERS] = _optimizer_tensors(learner)
    digests: dict[str, str] = {}
    for name, tensors in files.items():
        content = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
        (staging / name).write_bytes(content)
        digests[name] = hashlib.sha256(content).hexdigest()
    if state is not None:
        text = json.dumps(state, indent=2) + "\n"
        (staging / STATE).write_text(text)
        digests[STATE] = hashlib.sha256(text.encode()).hexdigest()
    (staging / RECORD).write_text(json.dumps({**record, "files": digests}, indent=2) + "\n")
    _put_in_place(staging, folder)


def read_record(folder: Path) -> dict[str, Any]:
    """A checkpoint's ``checkpoint.json``, after comparing the files with their digests.

    Raises:
        DamagedCheckpointError: It is not there, is of another format, or a file is missing or changed.
    """
    try:
        record = json.loads((folder / RECORD).read_text())
        if (found := (record["format"], record["format_version"])) != (FORMAT, FORMAT_VERSION):
            raise DamagedCheckpointError(f"{folder / RECORD}: is of the format {found}, not {(FORMAT, FORMAT_VERSION)}")
        for name, digest in record["files"].items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
                raise DamagedCheckpointError(f"{folder / name}: is not the file that was written; its SHA-256 differs")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{folder}: cannot be read as a checkpoint ({error!r})") from error
    return record


def load_actor(folder: Path) -> LoadedActor:
    """Reads the policy of a checkpoint.

    Raises:
        DamagedCheckpointError: It cannot be read.
    """
    record = read_record(folder)
    try:
        tensors = load_file(folder / ACTOR)
        sizes = record["actor"]
        shape = TrunkShape(input_size=sizes["input_size"], depth=sizes["depth"], width=sizes["width"])
        actor = GaussianActor(shape, sizes["action_size"])
        prefix = _NORMALIZER_PREFIX
        statistics = {key.removeprefix(prefix): tensors.pop(key) for key in list(tensors) if key.startswith(prefix)}
        actor.load_state_dict(tensors)
        normalizer = None
        if statistics:
            observation, goal = (field["shape"][0] for field in record["observation_fields"])
            normalizer = InputNormalizer(observation, goal)
            normalizer.load_state_dict(statistics)
    except (SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{folder}: its actor cannot be read ({error})") from error
    return LoadedActor(actor.eval(), normalizer, record)


def restore_learner(folder: Path, learner: Learner) -> dict[str, Any]:
    """Gives a learner all that ``last`` holds of it, and returns the state that was written with it.

    Raises:
        DamagedCheckpointError: A file is missing or changed, or does not fit.
    """
    read_record(folder)
    try:
        actor = load_file(folder / ACTOR)
        prefix = _NORMALIZER_PREFIX
        statistics = {key.removeprefix(prefix): actor.pop(key) for key in list(actor) if key.startswith(prefix)}
        if statistics:
            learner.normalizer.load_state_dict(statistics)
        learner.actor.load_state_dict(actor)
        learner.critic.load_state_dict(load_file(folder / CRITIC))
        _restore_optimizers(learner, load_file(folder / OPTIMIZERS))
        return json.loads((folder / STATE).read_text())
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError) as error:
        raise DamagedCheckpointError(f"{folder}: cannot be gone on from ({error})") from error


def add_final_evaluation(folder: Path, evaluation: Mapping[str, Any]) -> None:
    """Puts what a policy reached on episodes that chose nothing where its ``evaluation`` is.

    What it was chosen by is kept as ``selection``: the best of many measurements, it flatters.

    Raises:
        DamagedCheckpointError: The checkpoint cannot be read.
    """
    record = read_record(folder)
    chosen_by = record.get("selection", record["evaluation"])
    write_json(folder / RECORD, {**record, "evaluation": dict(evaluation), "selection": chosen_by})


def recover(folder: Path) -> None:
    """Puts back the checkpoint that was being replaced when a process ended, where that took two steps."""
    old = _old(folder)
    if old.exists():
        if folder.exists():
            shutil.rmtree(old)
        else:
            old.rename(folder)


def _actor_tensors(learner: Learner) -> dict[str, Tensor]:
    tensors = dict(learner.actor.state_dict())
    if learner.run.networks.normalize_inputs:
        tensors |= {_NORMALIZER_PREFIX + name: tensor for name, tensor in learner.normalizer.state_dict().items()}
    return tensors


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    tensors = {"generator": learner.generator.get_state()}
    if learner.log_alpha is not None:
        tensors["log_alpha"] = learner.log_alpha
    for name, optimizer in learner.optimizers.items():
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"{name}.{index}.{key}": value for key, value in state.items()}
    return tensors


def _restore_optimizers(learner: Learner, tensors: dict[str, Tensor]) -> None:
    learner.generator.set_state(tensors.pop("generator"))
    if learner.log_alpha is not None:
        with torch.no_grad():
            learner.log_alpha.copy_(tensors.pop("log_alpha"))
    states: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in learner.optimizers}
    for path, tensor in tensors.items():
        name, index, key = path.split(".")
        states[name].setdefault(int(index), {})[key] = tensor
    for name, optimizer in learner.optimizers.items():
        optimizer.load_state_dict({"state": states[name], "param_groups": optimizer.state_dict()["param_groups"]})


def _put_in_place(staging: Path, folder: Path) -> None:
    """Replaces a folder by another beside it."""
    if not folder.exists():
        staging.rename(folder)
        return
    if _exchange(staging, folder):
        shutil.rmtree(staging)
        return
    # Two steps; see ``recover``.
    old = _old(folder)
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    staging.rename(folder)
    shutil.rmtree(old)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges two folders in one step, where the system can (Linux, most of its file systems)."""
    at_working_folder, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux; Python has no call for it
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if rename(at_working_folder, os.fsencode(first), at_working_folder, os.fsencode(second), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(second))
