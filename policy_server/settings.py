"""What can be set: for the server by options or environment variables, for one policy by a file beside its versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from policy_server.errors import StartError

ENVIRONMENT_PREFIX = "GATED_SERVING_POLICY_"
OVERRIDES_FILE = "serving.json"
SHIPPED_POLICIES = Path(__file__).parent / "pretrained"
MIB = 1 << 20

_Model = TypeVar("_Model", bound=BaseModel)


class BatchingSettings(BaseModel):
    """How requests are gathered into batches.

    By default nothing waits: what arrives while the engine is busy is the next batch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_batch: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Rows of one run of the engine."""
    max_delay_ms: Annotated[float, Field(ge=0, le=10_000)] = 0.0
    """How long an idle engine waits for a batch to fill; no request waits longer than half the time to its deadline."""
    max_queue: Annotated[int, Field(ge=1, le=10_000_000)] = 1024
    """Rows that may wait; one more is answered with 503."""
    deadline_ms: Annotated[float, Field(gt=0)] | None = 5_000.0
    """How long a request may wait that names no deadline of its own; null for ever."""


class EngineSettings(BaseModel):
    """What runs the policies, and how."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: Literal["onnxruntime", "cuda", "tensorrt"] = "onnxruntime"
    intra_op_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of one run; at small batches more than one costs more than it gives."""
    batch_buckets: tuple[Annotated[int, Field(ge=1)], ...] = (1, 2, 4, 8, 16, 32, 64)
    """Batch sizes that a GPU engine prepares; others are padded to the next."""
    run_inline_below_ms: Annotated[float, Field(ge=0, le=100)] = 1.0
    """A policy whose full batch takes less runs on the event loop itself: cheaper than handing it to a thread."""

    @field_validator("batch_buckets")
    @classmethod
    def _check_buckets(cls, buckets: tuple[int, ...]) -> tuple[int, ...]:
        if not buckets or list(buckets) != sorted(set(buckets)):
            raise ValueError("batch sizes that rise, at least one")
        return buckets


class ServerSettings(BaseSettings):
    """Everything about the server; each field is an environment variable ``GATED_SERVING_POLICY_<NAME>`` too."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter="__"
    )

    repository: Path = SHIPPED_POLICIES
    """Folder of ``NAME/VERSION/``."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8100
    """0 for any free one."""
    grpc_port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    """Off if not given."""
    workers: Annotated[int, Field(ge=1, le=512)] = 1
    """Processes behind the one port, each with engines of its own."""
    api_keys: tuple[SecretStr, ...] = ()
    """Let in only requests that carry one of them."""
    cors_origins: tuple[str, ...] = ()
    """Pages of other origins that may call; ``*`` for all."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * MIB
    max_model_bytes: Annotated[int, Field(ge=1)] = 2048 * MIB
    max_rows: Annotated[int, Field(ge=1)] = 1024
    """Rows of one request."""
    watch: bool = True
    """Make new versions live as they appear."""
    load_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long loading and warming a version may take."""
    drain_s: Annotated[float, Field(ge=0)] = 10.0
    """How long a stopping server finishes what it has begun."""
    batching: BatchingSettings = BatchingSettings()
    engine: EngineSettings = EngineSettings()

    @property
    def reachable_host(self) -> str:
        """The host for addresses that are called on this machine."""
        named = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}  # noqa: S104  # compared, not bound to
        return named.get(self.host, f"[{self.host}]" if ":" in self.host else self.host)

    @field_validator("api_keys")
    @classmethod
    def _check_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in keys:
            value = key.get_secret_value()
            if not value or not value.isascii() or not value.isprintable() or " " in value:
                raise ValueError("an API key is printable ASCII without spaces, and not empty")
        return keys


class PolicyOverrides(BaseModel):
    """``NAME/serving.json``: what is different for this policy; fields that are absent are the server's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batching: dict[str, Any] = Field(default_factory=dict[str, Any])
    engine: dict[str, Any] = Field(default_factory=dict[str, Any])


def make_settings(**values: Any) -> ServerSettings:
    """The settings of the given values, the environment and the defaults, in this order.

    Raises:
        StartError: A value makes no sense; the message names its field.
    """
    try:
        return ServerSettings(**values)
    except ValidationError as error:
        raise StartError(describe(error), exit_code=2) from None


def read_overrides(
    folder: Path, batching: BatchingSettings, engine: EngineSettings
) -> tuple[BatchingSettings, EngineSettings]:
    """The settings of one policy: the server's, changed by ``serving.json`` in its folder, if there is one.

    Raises:
        ValueError: The file cannot be read or says something that makes no sense; the message names file and field.
    """
    path = folder / OVERRIDES_FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return batching, engine
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        overrides = PolicyOverrides.model_validate(json.loads(text))
        return _changed(batching, overrides.batching, "batching"), _changed(engine, overrides.engine, "engine")
    except ValidationError as error:
        raise ValueError(f"{path}: {describe(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def _changed(settings: _Model, changes: dict[str, Any], section: str) -> _Model:
    try:
        return type(settings).model_validate({**settings.model_dump(), **changes})
    except ValidationError as error:
        raise ValueError(f"{section}.{describe(error)}") from None


def describe(error: ValidationError) -> str:
    """Every wrong field with its value; secrets are not shown."""
    parts: list[str] = []
    for problem in error.errors(include_url=False):
        name = ".".join(str(part) for part in problem["loc"]) or "settings"
        shown = "" if "api_keys" in name else f"={problem['input']!r}"
        parts.append(f"{name}{shown}: {problem['msg'].removeprefix('Value error, ')}")
    return "; ".join(parts)
