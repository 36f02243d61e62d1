"""Reads a training checkpoint: ``checkpoint.json`` beside ``actor.safetensors``, as ``train-rl`` writes it.

Neither holds code, so a checkpoint from anywhere can be looked at. Tensors are read one at a time: a deep actor is
never in memory twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from policy_server.export.errors import UnreadableSourceError
from policy_server.manifest import sha256

CHECKPOINT_FILE = "checkpoint.json"
ACTOR_FILE = "actor.safetensors"
FORMAT = "gated-serving-rl"
FORMAT_VERSION = 1
LAYERS_PER_BLOCK = 4


class _Part(BaseModel):
    # What only training needs may be there too.
    model_config = ConfigDict(extra="ignore", frozen=True)


class EnvironmentRecord(_Part):
    """Which environment the policy was trained in."""

    id: str
    kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    control_period_s: Annotated[float, Field(gt=0)] | None = None
    max_episode_steps: int | None = None


class FieldRecord(_Part):
    """One observation field; the fields joined in order are the actor's input."""

    name: str
    shape: tuple[Annotated[int, Field(ge=1)], ...]
    low: Any = None
    high: Any = None


class ActionRecord(_Part):
    """The environment's action."""

    shape: tuple[Annotated[int, Field(ge=1)], ...]
    low: Any
    high: Any


class ActorRecord(_Part):
    """The actor's sizes, from which every tensor's shape follows."""

    architecture: Literal["residual_gaussian"]
    # The upper bounds are far above what fits into one ONNX file; a forged number shall not cost an hour to refuse.
    input_size: Annotated[int, Field(ge=1, le=1 << 24)]
    action_size: Annotated[int, Field(ge=1, le=1 << 20)]
    depth: Annotated[int, Field(ge=LAYERS_PER_BLOCK, le=1 << 16, multiple_of=LAYERS_PER_BLOCK)]
    width: Annotated[int, Field(ge=1, le=1 << 20)]
    residual_interval: Literal[4] = LAYERS_PER_BLOCK
    layer_norm_eps: Annotated[float, Field(gt=0)]
    log_std_min: float
    log_std_max: float

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor but the normaliser's, in the order of the forward pass."""
        width, shapes = self.width, dict[str, tuple[int, ...]]()
        layers = [("trunk.input", self.input_size)]
        for block in range(self.depth // LAYERS_PER_BLOCK):
            layers += [(f"trunk.blocks.{block}.{layer}", width) for layer in range(LAYERS_PER_BLOCK)]
        for name, fan_in in layers:
            shapes |= {f"{name}.linear.weight": (width, fan_in), f"{name}.linear.bias": (width,)}
            shapes |= {f"{name}.norm.weight": (width,), f"{name}.norm.bias": (width,)}
        for head in ("mean", "log_std"):
            shapes |= {f"{head}.weight": (self.action_size, width), f"{head}.bias": (self.action_size,)}
        return shapes


class EvaluationRecord(_Part):
    """How good the policy was when it was written."""

    success_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    num_episodes: int | None = None
    success: Literal["end", "any"] = "any"


class CheckpointRecord(_Part):
    """The part of ``checkpoint.json`` that an export needs."""

    format: Literal["gated-serving-rl"]
    format_version: Literal[1]
    recipe: str | None = None
    seed: int | None = None
    environment: EnvironmentRecord
    observation_fields: Annotated[tuple[FieldRecord, ...], Field(min_length=1)]
    action: ActionRecord
    actor: ActorRecord
    num_environment_steps: int | None = None
    evaluation: EvaluationRecord | None = None
    files: dict[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose record, hash and tensor shapes were found right."""

    folder: Path
    record: CheckpointRecord
    has_normalizer: bool

    @property
    def actor_file(self) -> Path:
        """Where the weights are."""
        return self.folder / ACTOR_FILE

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Every tensor in the order of the forward pass, the normaliser's first; read when it is asked for.

        Raises:
            UnreadableSourceError: A tensor holds NaN or infinity.
        """
        names = [*(["normalizer.mean", "normalizer.std"] if self.has_normalizer else []), *self.shapes()]
        with _open(self.actor_file) as file:
            for name in names:
                tensor: NDArray[np.float32] = np.asarray(file.get_tensor(name), np.float32)
                if not np.isfinite(tensor).all():
                    raise UnreadableSourceError(
                        f"{self.actor_file}: {name} holds NaN or infinity; the training diverged, take an earlier "
                        "checkpoint"
                    )
                yield name, tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor but the normaliser's."""
        return self.record.actor.tensor_shapes()


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads the record and checks the weights' hash, names and shapes against it.

    Raises:
        UnreadableSourceError: The folder is no checkpoint, or is damaged; the message names the file, field or tensor.
    """
    path = folder / CHECKPOINT_FILE
    try:
        content: object = json.loads(path.read_bytes())
    except OSError as error:
        raise UnreadableSourceError(
            f"{path}: cannot be read ({error.strerror}); give a folder such as RUN/checkpoints/best"
        ) from error
    except ValueError as error:
        raise UnreadableSourceError(f"{path}: is not JSON ({error}); take another checkpoint") from error
    try:
        record = CheckpointRecord.model_validate(content)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'record'}: {one['msg']}" for one in error.errors())
        raise UnreadableSourceError(f"{path}: {wrong}") from None
    _check_sizes(record, path)
    _check_hash(record, folder)
    return Checkpoint(folder, record, _check_tensors(record.actor, folder / ACTOR_FILE))


def _check_sizes(record: CheckpointRecord, path: Path) -> None:
    joined = sum(int(np.prod(field.shape, dtype=int)) for field in record.observation_fields)
    if joined != record.actor.input_size:
        raise UnreadableSourceError(
            f"{path}: actor.input_size={record.actor.input_size}, but the observation_fields join to {joined} values"
        )
    if (size := int(np.prod(record.action.shape, dtype=int))) != record.actor.action_size:
        raise UnreadableSourceError(
            f"{path}: actor.action_size={record.actor.action_size}, but action.shape={list(record.action.shape)} has "
            f"{size} values"
        )


def _check_hash(record: CheckpointRecord, folder: Path) -> None:
    if (expected := record.files.get(ACTOR_FILE)) is None:
        raise UnreadableSourceError(f"{folder / CHECKPOINT_FILE}: files has no hash of {ACTOR_FILE}")
    try:
        found = sha256(folder / ACTOR_FILE)
    except OSError as error:
        raise UnreadableSourceError(f"{folder / ACTOR_FILE}: cannot be read ({error.strerror})") from error
    if found != expected:
        raise UnreadableSourceError(
            f"{folder / ACTOR_FILE}: its SHA-256 is {found[:12]}..., {CHECKPOINT_FILE} says {expected[:12]}...; the "
            "file is truncated, damaged or of another checkpoint; copy it again"
        )


def _check_tensors(actor: ActorRecord, path: Path) -> bool:
    """Compares names, shapes and dtypes; says whether there is a normaliser."""
    expected = actor.tensor_shapes()
    try:
        with _open(path) as file:
            names: set[str] = set(file.keys())
            has_normalizer = bool(names & {"normalizer.mean", "normalizer.std"})
            if has_normalizer:
                expected |= dict.fromkeys(("normalizer.mean", "normalizer.std"), (actor.input_size,))
            if missing := sorted(expected.keys() - names):
                raise UnreadableSourceError(
                    f"{path}: {_some(missing)} missing; it is not the actor {CHECKPOINT_FILE} names"
                )
            if unknown := sorted(names - expected.keys()):
                raise UnreadableSourceError(f"{path}: {_some(unknown)} not part of a {actor.architecture} actor")
            for name, shape in expected.items():
                header = file.get_slice(name)
                if (found := tuple[int, ...](header.get_shape())) != shape:
                    raise UnreadableSourceError(f"{path}: {name} has the shape {list(found)}, needs {list(shape)}")
                if (dtype := header.get_dtype()) not in ("F32", "F16", "F64"):
                    raise UnreadableSourceError(f"{path}: {name} is {dtype}; save the actor in float32")
            if has_normalizer and not (np.asarray(file.get_tensor("normalizer.std")) > 0).all():
                raise UnreadableSourceError(f"{path}: normalizer.std holds a value that is not above 0")
    except SafetensorError as error:
        raise UnreadableSourceError(f"{path}: is no whole safetensors file ({error}); copy it again") from error
    return has_normalizer


def _open(path: Path) -> Any:
    # Typed as Any: the package says nothing of what it opens.
    return safe_open(path, framework="numpy")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"
