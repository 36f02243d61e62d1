"""One training from its settings to its result; can be killed at any moment and resumed.

The output folder holds ``run.json`` (the settings), ``checkpoints/best`` and ``checkpoints/last``, ``replay/``,
``metrics.jsonl``, ``tensorboard/``, ``learning_curve.png`` and, once the run is over, ``result.json`` and perhaps
``episode.mp4``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import platform
import shutil
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError

from gated_serving.rl.environments import GoalEnvironmentSpec, GoalVectorEnvironment, make_vector_environment
from gated_serving.rl.replay import EpisodeReplay
from gated_serving.rl.replay_files import ReplayError
from gated_serving.rl.settings import TrainingRun
from gated_serving.rl.training import checkpoints
from gated_serving.rl.training.evaluation import EVALUATION_SEED, Evaluation
from gated_serving.rl.training.learner import Learner
from gated_serving.rl.training.progress import ProgressDisplay
from gated_serving.rl.training.schedule import Schedule
from gated_serving.rl.training.stopping import TrainingStoppedError, stop_requests
from gated_serving.rl.training.telemetry import MetricsLog
from gated_serving.rl.training.trainer import Trainer
from gated_serving.rl.training.video import VIDEO, check_video, record_episode
from gated_serving.run_folder import OutputFolderError, claim_folder, first_difference, locked, write_json
from gated_serving.run_settings import read_settings

logger = logging.getLogger(__name__)

RESULT = "result.json"
_PACKAGES = ("gated-serving", "torch", "numpy", "gymnasium", "gymnasium-robotics", "mujoco", "metaworld")


class UnusableInputError(Exception):
    """The settings and the machine cannot be used together; the message says what to change."""


def train(run: TrainingRun, output: Path, *, resume: bool = False, console: Console | None = None) -> Path:
    """Trains a policy, or goes on training it.

    Args:
        run: The whole settings.
        output: The run's folder.
        resume: Go on from the last checkpoint; starts from the beginning where there is none.
        console: A terminal to show progress on; None logs plain lines.

    Returns:
        ``output``, whose ``result.json`` says what was reached.

    Raises:
        OutputFolderError: The folder is in use and ``resume`` was not asked for, holds a run with other settings, or
            cannot be written to.
        UnusableInputError: The machine cannot do what the settings say.
        UnusableEnvironmentError: The environment cannot be made, or a policy cannot be trained in it.
        EnvironmentFailedError: An environment failed during the run.
        TrainingDivergedError: A loss or a parameter is not finite any more.
        TrainingStoppedError: Ctrl-C or SIGTERM; the checkpoint is of that moment.
    """
    with locked(output):
        last = output / "checkpoints" / "last"
        is_new = _claim(run, output, last, resume=resume)
        try:
            _train(run, output, last, console)
        except (OSError, SafetensorError) as error:
            if is_new and not last.exists():
                shutil.rmtree(output, ignore_errors=True)
            raise OutputFolderError(
                f"{output}: stopped ({error}); once that is mended, --resume goes on from the last checkpoint"
            ) from error
        except BaseException:
            # So that the same command works once what is wrong is mended.
            if is_new and not last.exists():
                shutil.rmtree(output, ignore_errors=True)
            raise
    return output


def _claim(run: TrainingRun, output: Path, last: Path, *, resume: bool) -> bool:
    wanted = json.loads(json.dumps(dataclasses.asdict(run)))
    return claim_folder(output, wanted, resume=resume, check=lambda _: _check_settings(run, wanted, output, last))


def _check_settings(run: TrainingRun, wanted: dict[str, Any], output: Path, last: Path) -> None:
    """A resumed run may have another runtime, and other stages as long as those so far stay as they were."""
    checkpoints.recover(last)
    try:
        before = read_settings(output, TrainingRun)
    except ValueError as error:
        raise OutputFolderError(str(error)) from error
    assert before is not None
    found = json.loads(json.dumps(dataclasses.asdict(before)))
    # What can be taken back of the replay follows from how often it is saved.
    found["runtime"] = wanted["runtime"] | {"save_rounds": found["runtime"]["save_rounds"]}
    stages = {name: found[name] for name in run.stages}
    for name in stages:
        found[name] = wanted[name]
    if difference := first_difference(found, wanted):
        raise OutputFolderError(f"{output} holds a run with other settings: {difference}; give another --output")
    difference = first_difference(stages, {name: wanted[name] for name in stages})
    if difference and last.exists():
        try:
            done = json.loads((last / checkpoints.STATE).read_text())["position"]["round"]
        except (OSError, ValueError, KeyError) as error:
            raise OutputFolderError(f"{last / checkpoints.STATE}: cannot be read ({error!r})") from error
        if not Schedule(before).agrees_until(Schedule(run), done):
            raise OutputFolderError(
                f"{output} holds a run with other settings: {difference}, which changes the {done} rounds that are "
                "done; give another --output"
            )


def _train(run: TrainingRun, output: Path, last: Path, console: Console | None) -> None:
    if run.runtime.num_threads is not None:
        torch.set_num_threads(run.runtime.num_threads)
    device = _device(run)
    if run.evaluation.video:
        check_video(run.environment)
    if not last.exists():
        shutil.rmtree(output / "replay", ignore_errors=True)  # of a run that was killed before its first checkpoint
    # The evaluations have environments of their own, so that measuring leaves the training's episodes alone.
    with _make_environments(run) as environments, _make_environments(run) as evaluations:
        try:
            trainer = Trainer(
                run,
                output,
                learner=_make_learner(run, environments.spec, device),
                environments=environments,
                evaluations=evaluations,
                replay=_make_replay(run, environments.spec, output / "replay"),
            )
            if last.exists():
                trainer.restore(last)
            if trainer.is_done and (output / RESULT).exists():
                logger.info("%s holds the finished run already", output)
                return
            final = _train_and_measure(run, output, trainer, console)
        except (checkpoints.DamagedCheckpointError, ReplayError) as error:
            raise OutputFolderError(f"the run cannot go on: {error}") from error
        write_json(output / RESULT, _result(run, trainer, final, device))


def _make_learner(run: TrainingRun, spec: GoalEnvironmentSpec, device: torch.device) -> Learner:
    try:
        return Learner(run, spec, device)
    except (RuntimeError, MemoryError) as error:  # torch has no class of its own for memory that a CPU lacks
        text = str(error)
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in text:
            raise
        networks = run.networks
        sizes = ", ".join(
            f"networks.{field.name}={getattr(networks, field.name)}" for field in dataclasses.fields(networks)
        )
        message = f"the networks do not fit into this machine's memory: {sizes}; make them smaller"
        raise UnusableInputError(message) from error


def _train_and_measure(run: TrainingRun, output: Path, trainer: Trainer, console: Console | None) -> Evaluation:
    done, total = trainer.position.environment_steps, trainer.schedule.num_environment_steps
    if done:
        logger.info("going on from environment step %d", done)
    with (
        stop_requests() as stop,
        MetricsLog(output, num_environment_steps=done) as log,
        ProgressDisplay(console, total=total, completed=done) as display,
    ):
        trainer.train(log, display, stop)
        logger.info("measuring the best policy on %d unseen episodes", run.evaluation.num_final_episodes)
        final = trainer.evaluate_best(stop)
        if run.evaluation.video:
            record_episode(output / VIDEO, trainer.best_policy(), run.environment, seed=EVALUATION_SEED)
        if stop.signal_number is not None:
            raise TrainingStoppedError(stop.signal_number)
    return final


def _make_environments(run: TrainingRun) -> GoalVectorEnvironment:
    return make_vector_environment(
        run.environment.id,
        num_environments=run.collection.num_environments,
        num_processes=run.runtime.num_processes,
        seed=run.optimisation.seed,
        kwargs=run.environment.kwargs,
    )


def _make_replay(run: TrainingRun, spec: GoalEnvironmentSpec, folder: Path) -> EpisodeReplay:
    size = run.collection.num_environments
    random_steps = Schedule(run).num_random_steps // size
    return EpisodeReplay(
        capacity_per_environment=math.ceil(run.replay.capacity / size),
        num_environments=size,
        observation_size=spec.observation_size,
        goal_size=spec.goal_size,
        action_size=spec.action_size,
        gamma=run.replay.gamma,
        folder=folder,
        max_unsaved_steps=max(random_steps, run.runtime.save_rounds * run.collection.round_length),
    )


def _device(run: TrainingRun) -> torch.device:
    wanted = run.runtime.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UnusableInputError("runtime.device='cuda': torch finds no GPU here; set runtime.device=cpu")
    return torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu")


def _result(run: TrainingRun, trainer: Trainer, final: Evaluation, device: torch.device) -> dict[str, Any]:
    position = trainer.position
    return {
        "recipe": run.name,
        "seed": run.optimisation.seed,
        "environment": run.environment.id,
        "untrained": position.untrained["final"],
        "final": dataclasses.asdict(final),
        "best": position.best,
        "num_environment_steps": position.environment_steps,
        "num_updates": position.updates,
        "seconds": round(trainer.seconds, 1),
        "num_parameters": trainer.learner.num_parameters,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
            "num_cores": os.cpu_count(),
            "num_threads": torch.get_num_threads(),
            "num_processes": run.runtime.num_processes,
            "system": platform.platform(),
        },
        "settings": dataclasses.asdict(run),
    }


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
