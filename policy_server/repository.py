"""The folder of policies, ``NAME/VERSION/``, and how a version of it becomes one that serves.

What lies there is untrusted: a version is read once, hashed, and only those bytes are used; it may reach for no other
file; what the graph takes and gives has to be what the manifest says; and warming it is bounded in time.
"""

from __future__ import annotations

import hashlib
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from policy_server.engines import Engine, EngineError, open_engine
from policy_server.engines.base import Array, TensorInfo
from policy_server.errors import StartError
from policy_server.external_data import refuse_external_data
from policy_server.manifest import (
    MANIFEST_FILE,
    MODEL_FILE,
    Manifest,
    ManifestError,
    read_manifest,
)
from policy_server.repository_scan import LoadError
from policy_server.served import ACTION, NOISE
from policy_server.settings import OVERRIDES_FILE, BatchingSettings, EngineSettings, ServerSettings, read_overrides

MAX_MANIFEST_BYTES = 4 << 20
_WARM_RUNS = 3


@dataclass(frozen=True)
class LoadedVersion:
    """A version that passed every check and ran; not yet on an event loop."""

    manifest: Manifest
    engine: Engine
    batching: BatchingSettings
    engine_settings: EngineSettings
    batch_s: float
    load_s: float


def load_version(folder: Path, settings: ServerSettings) -> LoadedVersion:
    """Reads, checks and warms one version. Slow; for a thread.

    Args:
        folder: ``NAME/VERSION/``.
        settings: The server's; the policy's own ``serving.json`` is read here.

    Raises:
        LoadError: Anything about it is wrong.
    """
    started = time.perf_counter()
    try:
        manifest = _read_manifest(folder)
        _refuse_odd_overrides(folder.parent / OVERRIDES_FILE)
        batching, engine_settings = read_overrides(folder.parent, settings.batching, settings.engine)
        model = _read_model(folder, manifest, settings.max_model_bytes)
        refuse_external_data(model)
        engine = open_engine(model, engine_settings, max_batch=batching.max_batch)
    except (ManifestError, EngineError, StartError, ValueError) as error:
        text = str(error)
        raise LoadError(text if text.startswith(str(folder.parent)) else f"{folder}: {text}") from error
    try:
        check_interface(engine, manifest)
        batch_s = warm(engine, manifest, batching.max_batch, limit_s=settings.load_timeout_s)
    except (EngineError, ValueError) as error:
        engine.close()
        raise LoadError(f"{folder}: {error}") from error
    return LoadedVersion(manifest, engine, batching, engine_settings, batch_s, time.perf_counter() - started)


def _read_manifest(folder: Path) -> Manifest:
    _inside(folder, folder / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    manifest = read_manifest(folder)
    if (manifest.name, str(manifest.version)) != (folder.parent.name, folder.name):
        raise ManifestError(
            f"{MANIFEST_FILE} says {manifest.name} {manifest.version}; rename the folders to "
            f"{manifest.name}/{manifest.version}, or export it under the name that is wanted"
        )
    return manifest


def _refuse_odd_overrides(path: Path) -> None:
    """A pipe would never end, and neither would a device that a link leads to."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_MANIFEST_BYTES:
        raise ValueError(f"{path}: is not a file of at most {MAX_MANIFEST_BYTES} bytes; remove it or write it anew")


def _read_model(folder: Path, manifest: Manifest, max_bytes: int) -> bytes:
    """The model's bytes, read once; the other files are hashed only."""
    model = b""
    for name, expected in manifest.files.items():
        if Path(name).name != name or name == "..":
            raise ManifestError(f"{MANIFEST_FILE}: files: {name!r} is not a file of this folder")
        path = _inside(folder, folder / name, max_bytes)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ManifestError(f"{path}: cannot be read ({error.strerror}); copy it again") from error
        found = hashlib.sha256(content).hexdigest()
        if found != expected:
            raise ManifestError(
                f"{path}: its SHA-256 is {found[:12]}..., {MANIFEST_FILE} says {expected[:12]}...; it is still being "
                "copied, was damaged, or was changed since the export"
            )
        if name == MODEL_FILE:
            model = content
    return model


def _inside(folder: Path, path: Path, max_bytes: int) -> Path:
    try:
        resolved = path.resolve(strict=True)
        size = resolved.stat().st_size
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read ({error.strerror}); is the copy complete?") from error
    if not resolved.is_relative_to(folder.resolve()) or not resolved.is_file():
        raise ManifestError(f"{path}: is not a file inside its folder; copy the file itself instead of a link")
    if size > max_bytes:
        raise ManifestError(f"{path}: {size} bytes, at most {max_bytes} are allowed (max_model_bytes)")
    return path


def check_interface(engine: Engine, manifest: Manifest) -> None:
    """Whether the graph takes and gives what the manifest says.

    Raises:
        ValueError: It does not; names the tensor.
    """
    expected_inputs = {field.name: (field.dtype, tuple(field.shape)) for field in manifest.observation}
    expected_outputs = {ACTION: (manifest.action.dtype, tuple(manifest.action.shape))}
    if manifest.distribution is not None:
        expected_inputs[NOISE] = ("float32", (manifest.distribution.noise_size,))
        num_choices = sum(manifest.action.num_choices or ())
        size = num_choices if manifest.distribution.kind == "categorical" else manifest.action.size
        expected_outputs |= dict.fromkeys(manifest.distribution.parameters, ("float32", (size,)))
    _compare("input", {tensor.name: tensor for tensor in engine.inputs}, expected_inputs)
    _compare("output", {tensor.name: tensor for tensor in engine.outputs}, expected_outputs)


def _compare(kind: str, found: dict[str, TensorInfo], expected: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    if set(found) != set(expected):
        raise ValueError(f"the graph's {kind}s are {sorted(found)}, the manifest says {sorted(expected)}")
    for name, (dtype, shape) in expected.items():
        tensor = found[name]
        if tensor.dtype != dtype:
            raise ValueError(f"{kind} {name}: the graph says {tensor.dtype}, the manifest {dtype}")
        same = len(tensor.shape) == len(shape) and all(
            size is None or size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
        )
        if not same and kind == "input":
            raise ValueError(f"{kind} {name}: the graph's rows have the shape {tensor.shape}, the manifest's {shape}")
        if not tensor.dynamic_batch and kind == "input":
            raise ValueError(f"{kind} {name}: the graph's batch is fixed; export it with a dynamic batch")


def warm(engine: Engine, manifest: Manifest, max_batch: int, *, limit_s: float) -> float:
    """Runs the engine at a batch of one and at a full one, and looks at what comes out.

    Args:
        engine: What to warm.
        manifest: Gives the inputs.
        max_batch: Rows of a full batch.
        limit_s: When to give up; a graph may loop for ever.

    Returns:
        Seconds that a full batch takes, the fastest of a few.

    Raises:
        EngineError: A run failed or took too long.
        ValueError: The outputs are not what the manifest says, or not finite.
    """
    fastest = float("inf")
    with _TimeLimit(limit_s, engine.stop_run) as limit:
        for rows in (1, max_batch, *([max_batch] * _WARM_RUNS)):
            inputs = example_inputs(manifest, rows)
            started = time.perf_counter()
            try:
                outputs = engine.run(inputs)
            except EngineError as error:
                if limit.passed:
                    raise EngineError(f"warming it took longer than {limit_s:g} s (load_timeout_s)") from error
                raise EngineError(f"a batch of {rows} does not run: {error}") from error
            if rows == max_batch:
                fastest = min(fastest, time.perf_counter() - started)
            _check_outputs(outputs, manifest, rows)
            if limit.passed:
                raise EngineError(f"warming it took longer than {limit_s:g} s (load_timeout_s)")
    return fastest


def example_inputs(manifest: Manifest, rows: int) -> dict[str, Array]:
    """Observations in the middle of their bounds, zeros where there are none; zero noise."""
    inputs: dict[str, Array] = {}
    for field in manifest.observation:
        low = field.low or (None,) * field.size
        high = field.high or (None,) * field.size
        middle = [_middle(a, b) for a, b in zip(low, high, strict=True)]
        row = np.asarray(middle).astype(field.dtype).reshape(field.shape)
        inputs[field.name] = np.ascontiguousarray(np.broadcast_to(row, (rows, *field.shape)))
    if manifest.distribution is not None:
        inputs[NOISE] = np.zeros((rows, manifest.distribution.noise_size), np.float32)
    return inputs


def _middle(low: float | None, high: float | None) -> float:
    if low is not None and high is not None:
        return low / 2 + high / 2
    return max(low or 0.0, 0.0) if low is not None else min(high or 0.0, 0.0)


def _check_outputs(outputs: dict[str, Array], manifest: Manifest, rows: int) -> None:
    action = outputs[ACTION]
    if action.shape != (rows, *manifest.action.shape):
        raise ValueError(f"output {ACTION}: the shape {action.shape} for {rows} rows of {manifest.action.shape}")
    if action.dtype.kind == "f" and not np.isfinite(action).all():
        raise ValueError(f"output {ACTION}: not finite for an observation in the middle of its bounds")


class _TimeLimit:
    """Calls a function when the time is over, unless the block is left before."""

    def __init__(self, limit_s: float, at_end: Callable[[], None]) -> None:
        self.passed = False
        self._at_end = at_end
        self._timer = threading.Timer(limit_s, self._over)
        self._timer.daemon = True

    def _over(self) -> None:
        self.passed = True
        self._at_end()

    def __enter__(self) -> _TimeLimit:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
