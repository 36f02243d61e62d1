"""What an exported policy says of itself: ``policy.json``, beside the weights in ``NAME/VERSION/``.

The exporter writes it and the server checks it, so it imports neither. A reader needs nothing else to call the model:
the observation fields in order, the action's bounds, whether noise is an input, and how good the policy was.

Legend: B batch, A action values.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MANIFEST_FILE = "policy.json"
MODEL_FILE = "policy.onnx"
FORMAT = "gated-serving-policy"
FORMAT_VERSION = 1
RESERVED_NAMES = frozenset({"noise", "action", "mean", "log_std", "logits"})
"""Names of the graph's own tensors; an observation field cannot have one of them."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HASH_CHUNK_BYTES = 1 << 20

Bounds = tuple[float | None, ...]
"""One bound a value, flattened row by row; null where there is none."""


class ManifestError(Exception):
    """``policy.json`` is missing, damaged or contradicts itself or its files; the message names the field."""


class Precision(StrEnum):
    """What the weights are stored and multiplied in."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"


class Engine(StrEnum):
    """What runs the policy."""

    ONNX = "onnx"
    TENSORRT = "tensorrt"


class Outputs(StrEnum):
    """What the graph gives: the best action, or also what a sampled one is made of."""

    ACTION = "action"
    DISTRIBUTION = "distribution"


class _Part(BaseModel):
    # Not "strict": JSON has no tuples. Unknown fields are refused, since a misspelt one would else be ignored.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Space(_Part):
    shape: tuple[Annotated[int, Field(ge=1)], ...]
    low: Bounds | None = None
    high: Bounds | None = None

    @property
    def size(self) -> int:
        """Values of one observation or action, its shape multiplied out."""
        return math.prod(self.shape)

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        for side, bounds in (("low", self.low), ("high", self.high)):
            if bounds is not None and len(bounds) != self.size:
                raise ValueError(f"{side} has {len(bounds)} values, the shape {list(self.shape)} needs {self.size}")
        for index, (low, high) in enumerate(zip(self.low or (), self.high or (), strict=False)):
            if low is not None and high is not None and low > high:
                raise ValueError(f"low[{index}]={low} is above high[{index}]={high}")
        return self


class ObservationField(_Space):
    """One named input of the graph, [B, *shape]."""

    name: str
    dtype: Literal["float32", "int64"] = "float32"

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if not self.name or self.name in RESERVED_NAMES:
            taken = ", ".join(sorted(RESERVED_NAMES))
            raise ValueError(f"name={self.name!r}: an observation field needs a name other than {taken}; rename it")
        return self


class ActionSpace(_Space):
    """The output ``action``, [B, *shape]: always inside the bounds.

    A discrete action is an int64 from 0 to ``num_choices - 1``; several at once have one entry in ``num_choices`` each.
    """

    kind: Literal["continuous", "discrete"]
    dtype: Literal["float32", "int64"]
    num_choices: tuple[Annotated[int, Field(ge=1)], ...] | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        discrete = self.kind == "discrete"
        if discrete != (self.num_choices is not None):
            raise ValueError(f"num_choices={self.num_choices}: given for discrete actions and only for them")
        if self.num_choices is not None and len(self.num_choices) != self.size:
            raise ValueError(f"num_choices has {len(self.num_choices)} values, the shape needs {self.size}")
        if self.dtype != ("int64" if discrete else "float32"):
            raise ValueError(f"dtype={self.dtype!r}: discrete actions are int64, continuous ones float32")
        return self


class Distribution(_Part):
    """How the graph makes a sampled action out of the input ``noise`` [B, noise_size].

    - ``squashed_gaussian``: action = unscale(tanh(mean + exp(log_std) * noise)); ``mean`` and ``log_std`` [B, A] are
      those before the squashing. Noise is standard normal.
    - ``gaussian``: action = clip(mean + exp(log_std) * noise), in the action's own unit. Noise is standard normal.
    - ``categorical``: action = argmax(logits + noise) within each choice; ``logits`` [B, sum(num_choices)]. Noise is
      standard Gumbel, -log(-log(u)) with u uniform in (0, 1).

    Zero noise gives the deterministic action, so the seed is the server's alone.
    """

    kind: Literal["squashed_gaussian", "gaussian", "categorical"]
    noise_size: Annotated[int, Field(ge=1)]

    @property
    def noise(self) -> Literal["standard_normal", "standard_gumbel"]:
        """What ``noise`` is drawn from."""
        return "standard_gumbel" if self.kind == "categorical" else "standard_normal"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The further outputs, in the graph's order."""
        return ("logits",) if self.kind == "categorical" else ("mean", "log_std")


class Architecture(_Part):
    """The network, for people: what it is called, and its sizes where they are known."""

    name: str
    num_parameters: Annotated[int, Field(ge=1)]
    depth: int | None = None
    width: int | None = None


class Training(_Part):
    """Where the policy comes from and how good it was there, as far as its source says."""

    framework: str
    framework_version: str | None = None
    algorithm: str | None = None
    recipe: str | None = None
    seed: int | None = None
    environment: str | None = None
    environment_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    max_episode_steps: int | None = None
    num_environment_steps: int | None = None
    success_rate: Annotated[float, Field(ge=0, le=1)] | None = None
    num_evaluation_episodes: int | None = None
    success_at: Literal["end", "any"] = "any"
    """Whether an episode succeeds by its last step or by any; ``success_rate`` counts so."""
    source_sha256: str | None = None


class Parity(_Part):
    """How far the exported file is from the source in float64, and what was allowed."""

    largest_error: Annotated[float, Field(ge=0)]
    tolerance: Annotated[float, Field(gt=0)]
    batch_sizes: tuple[int, ...]
    num_observations: int
    share_at_bounds: Annotated[float, Field(ge=0, le=1)]
    """Share of the compared actions at a bound of theirs, where any large value gives the same action."""


class Success(_Part):
    """Success in the environment of this very export and of its fp32 form, on the same episodes."""

    environment: str
    num_episodes: int
    fp32: Annotated[float, Field(ge=0, le=1)]
    exported: Annotated[float, Field(ge=0, le=1)]


class Manifest(_Part):
    """Everything ``policy.json`` holds."""

    format: Literal["gated-serving-policy"] = FORMAT
    format_version: Literal[1] = FORMAT_VERSION
    name: str
    version: Annotated[int, Field(ge=1)]
    observation: Annotated[tuple[ObservationField, ...], Field(min_length=1)]
    action: ActionSpace
    outputs: Outputs = Outputs.ACTION
    distribution: Distribution | None = None
    control_period_s: Annotated[float, Field(gt=0)] | None = None
    precision: Precision = Precision.FP32
    engine: Engine = Engine.ONNX
    opset: int
    architecture: Architecture
    training: Training
    parity: Parity
    success: Success | None = None
    conversion: dict[str, Any] = Field(default_factory=dict[str, Any])
    """What the conversion to a lower precision or to an engine reports of itself."""
    files: dict[str, str]
    """SHA-256 of every file of the folder but this one; ``policy.onnx`` is always among them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not is_policy_name(self.name):
            raise ValueError(
                f"name={self.name!r}: letters, digits, '.', '_' and '-' only, at most 128, first a letter or digit"
            )
        names = [field.name for field in self.observation]
        if len(set(names)) < len(names):
            raise ValueError(f"observation: the names {names} are not all different")
        if (self.outputs == Outputs.DISTRIBUTION) != (self.distribution is not None):
            raise ValueError(f"distribution={self.distribution}: given with outputs='distribution' and only with it")
        if self.distribution is not None and (self.distribution.kind == "categorical") != (
            self.action.kind == "discrete"
        ):
            raise ValueError(
                f"distribution.kind={self.distribution.kind!r}: discrete actions have a categorical one, others not; "
                f"this action is {self.action.kind}"
            )
        if MODEL_FILE not in self.files:
            raise ValueError(f"files: {MODEL_FILE} is missing")
        return self

    def to_json(self) -> str:
        """The file's text; the same manifest gives the same bytes."""
        return self.model_dump_json(indent=2) + "\n"


def is_policy_name(text: str) -> bool:
    """Whether it can be the name of a policy: a folder's name and a part of an address."""
    return _NAME.fullmatch(text) is not None


def read_manifest(folder: Path) -> Manifest:
    """Reads ``policy.json`` of a ``NAME/VERSION/`` folder; its files are not looked at.

    Raises:
        ManifestError: It is missing, no JSON, of another format, or contradicts itself.
    """
    path = folder / MANIFEST_FILE
    try:
        content: object = json.loads(path.read_bytes())
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read ({error.strerror}); export the policy again") from error
    except ValueError as error:
        raise ManifestError(f"{path}: is not JSON ({error}); export the policy again") from error
    return parse_manifest(content, origin=str(path))


def parse_manifest(content: object, *, origin: str = MANIFEST_FILE) -> Manifest:
    """Checks the parsed JSON of a manifest.

    Args:
        content: What the JSON holds.
        origin: Where it comes from, for messages.

    Raises:
        ManifestError: It is of another format or contradicts itself; names every wrong field.
    """
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:  # pyright: ignore[reportUnknownMemberType]
        raise ManifestError(f"{origin}: is not a policy's manifest (no format={FORMAT!r})")
    version: object = content.get("format_version")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if version != FORMAT_VERSION:
        raise ManifestError(
            f"{origin}: format_version={version!r}, this release reads {FORMAT_VERSION}; export the policy again"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        wrong = "; ".join(_describe(problem["loc"], problem["msg"], problem["input"]) for problem in error.errors())
        raise ManifestError(f"{origin}: {wrong}") from None


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compares the SHA-256 of each file with the manifest's.

    Raises:
        ManifestError: A file is missing or not the one that was exported.
    """
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            found = sha256(path)
        except OSError as error:
            raise ManifestError(f"{path}: cannot be read ({error.strerror}); export the policy again") from error
        if found != expected:
            raise ManifestError(
                f"{path}: its SHA-256 is {found[:12]}..., {MANIFEST_FILE} says {expected[:12]}...; it was damaged or "
                "changed since the export; copy it again or export again"
            )


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal.

    Raises:
        OSError: The file cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _describe(location: tuple[int | str, ...], message: str, value: object) -> str:
    name = ".".join(str(part) for part in location) or "manifest"
    shown = repr(value)
    of_value = f"={shown}" if len(shown) <= 60 and not isinstance(value, Mapping) else ""
    return f"{name}{of_value}: {message.removeprefix('Value error, ')}"
