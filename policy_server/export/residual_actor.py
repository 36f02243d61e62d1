"""A training checkpoint as a policy: the graph written directly, the reference in float64."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from policy_server.export.checkpoint import ACTOR_FILE, Checkpoint, EvaluationRecord, read_checkpoint
from policy_server.export.errors import UnreadableSourceError
from policy_server.export.graph import build_residual_actor
from policy_server.export.policy import TrainedPolicy, inner_bounds
from policy_server.export.reference import residual_actor
from policy_server.manifest import (
    RESERVED_NAMES,
    ActionSpace,
    Architecture,
    Distribution,
    ObservationField,
    Training,
)


def read_residual_actor(folder: Path) -> TrainedPolicy:
    """Reads ``RUN/checkpoints/best`` or ``last``.

    Raises:
        UnreadableSourceError: It is no checkpoint or a damaged one.
        ExportError: The action has no finite bounds to be scaled to.
    """
    checkpoint = read_checkpoint(folder)
    record = checkpoint.record
    origin = folder.name
    fields = tuple(_field(one.name, one.shape, one.low, one.high, origin) for one in record.observation_fields)
    size = record.actor.action_size
    low, high = inner_bounds(record.action.low, record.action.high, size=size, origin=f"{origin}: action")
    if low is None or high is None or None in low or None in high:
        raise UnreadableSourceError(f"{origin}: action.low and action.high must be finite for a squashed action")
    space = ActionSpace(kind="continuous", shape=record.action.shape, dtype="float32", low=low, high=high)
    shapes = [*checkpoint.shapes().values()]
    lows, highs = (torch.tensor(side, dtype=torch.float64) for side in (low, high))
    return TrainedPolicy(
        suggested_name=record.recipe or record.environment.id,
        observation=fields,
        action=space,
        distribution=Distribution(kind="squashed_gaussian", noise_size=size),
        architecture=Architecture(
            name=record.actor.architecture,
            num_parameters=sum(int(np.prod(shape)) for shape in shapes),
            depth=record.actor.depth,
            width=record.actor.width,
        ),
        training=_training(checkpoint),
        control_period_s=record.environment.control_period_s,
        build_graph=partial(build_residual_actor, checkpoint, fields, space),
        reference=partial(residual_actor, checkpoint, lows, highs),
        scale=_scale(checkpoint, fields),
    )


def _field(name: str, shape: tuple[int, ...], low: object, high: object, origin: str) -> ObservationField:
    if not name or name in RESERVED_NAMES:
        raise UnreadableSourceError(f"{origin}: observation field {name!r} has a name the graph uses itself; rename it")
    size = int(np.prod(shape, dtype=int))
    lower, upper = inner_bounds(low, high, size=size, origin=f"{origin}: observation field {name}")
    return ObservationField(name=name, shape=shape, low=lower, high=upper)


def _training(checkpoint: Checkpoint) -> Training:
    record = checkpoint.record
    evaluation = record.evaluation or EvaluationRecord()
    return Training(
        framework="gated-serving",
        algorithm="contrastive",
        recipe=record.recipe,
        seed=record.seed,
        environment=record.environment.id,
        environment_kwargs=record.environment.kwargs,
        max_episode_steps=record.environment.max_episode_steps,
        num_environment_steps=record.num_environment_steps,
        success_rate=evaluation.success_rate,
        num_evaluation_episodes=evaluation.num_episodes,
        success_at=evaluation.success,
        source_sha256=record.files[ACTOR_FILE],
    )


def _scale(
    checkpoint: Checkpoint, fields: tuple[ObservationField, ...]
) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    if not checkpoint.has_normalizer:
        return {}
    tensors = checkpoint.tensors()
    mean, std = (np.asarray(next(tensors)[1], np.float64) for _ in range(2))
    ends = np.cumsum([field.size for field in fields])[:-1]
    parts = zip(fields, np.split(mean, ends), np.split(std, ends), strict=True)
    return {field.name: (of_mean, of_std) for field, of_mean, of_std in parts}
