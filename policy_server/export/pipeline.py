"""From a trained policy to a checked folder: build, convert, write, compare with the source, describe, publish."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from policy_server.export.errors import ExportError
from policy_server.export.policy import TrainedPolicy
from policy_server.export.serialize import write_serialized
from policy_server.export.success import EnvironmentUnavailableError, MakeEnvironment, success_rate
from policy_server.export.verify import draw_noise, draw_observations, error_units, verify
from policy_server.export.write import check_target, next_version, publish, staging_folder
from policy_server.manifest import (
    MODEL_FILE,
    ActionSpace,
    Engine,
    Manifest,
    ManifestError,
    ObservationField,
    Outputs,
    Parity,
    Precision,
    Success,
    read_manifest,
    sha256,
)

_NUM_CALIBRATION_OBSERVATIONS = 512
_CALIBRATION_SEED = 2


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What an export shall give.

    Attributes:
        name: The policy's name; the source's own if None.
        version: Its version; the next number if None.
        outputs: The best action, or also what a sampled one is made of.
        precision: What weights are stored and multiplied in.
        engine: What will run it.
        tolerance: Largest error, in units of half the action's range; the precision's own if None.
        num_episodes: Episodes in which a lower precision's success is compared with fp32's; 0 for none.
    """

    name: str | None = None
    version: int | None = None
    outputs: Outputs = Outputs.ACTION
    precision: Precision = Precision.FP32
    engine: Engine = Engine.ONNX
    tolerance: float | None = None
    num_episodes: int = 100

    def __post_init__(self) -> None:
        if self.tolerance is not None and not (math.isfinite(self.tolerance) and self.tolerance > 0):
            raise ExportError(f"--tolerance {self.tolerance}: must be a number above 0")
        if self.num_episodes < 0:
            raise ExportError(f"--episodes {self.num_episodes}: must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What only the finished file shows."""

    opset: int
    conversion: dict[str, Any]
    parity: Parity
    success: Success | None
    files: dict[str, str]


def export_policy(
    policy: TrainedPolicy,
    repository: Path,
    options: ExportOptions,
    *,
    make_environment: MakeEnvironment | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Path, Manifest]:
    """Exports a policy into ``repository/NAME/VERSION/``; after an error nothing new is there.

    Args:
        policy: What a reader made of its source.
        repository: Where policies lie by name and version.
        options: What it shall be.
        make_environment: Makes the policy's environment, for the success of a lower precision; not measured if None.
        say: Told what is being done.

    Returns:
        The folder and what it says of itself.

    Raises:
        ExportError: It cannot be exported as asked.
        ParityError: The result does not compute what the source does.
    """
    name = options.name if options.name is not None else _as_name(policy.suggested_name)
    check_target(repository, name, options.version)
    _check_same_interface(repository / name, policy)
    if options.outputs == Outputs.DISTRIBUTION and policy.distribution is None:
        raise ExportError(
            f"--outputs distribution: {policy.training.algorithm or policy.architecture.name} is deterministic and has "
            "none; take --outputs action"
        )
    if options.engine == Engine.TENSORRT:
        from policy_server.export import tensorrt_engine

        tensorrt_engine.check_available(options.precision)
    with staging_folder(repository) as staging:
        path = staging / MODEL_FILE
        say("building the graph")
        opset, conversion = _write_graph(policy, options, path, say)
        say("comparing it with the source in float64")
        parity = verify(path, policy, outputs=options.outputs, precision=options.precision, tolerance=options.tolerance)
        success = _measure_success(policy, options, path, make_environment, say)
        if options.engine == Engine.TENSORRT:
            conversion |= {"tensorrt": _build_engine(policy, options, staging, say)}
        files = {file.name: sha256(file) for file in sorted(staging.iterdir())}
        measured = _Measured(opset=opset, conversion=conversion, parity=parity, success=success, files=files)
        describe = partial(_describe, policy, options, measured, name)
        return publish(staging, repository, name, options.version, describe)


def write_model(model: onnx.ModelProto, path: Path) -> None:
    """Writes one file with the weights inside.

    Raises:
        ExportError: The model is larger than protobuf allows, or the disk is full.
    """
    try:
        write_serialized(model, path)
    except OSError as error:
        raise ExportError(f"{path}: cannot be written ({error.strerror})") from error
    except Exception as error:  # too large, by our measure or by protobuf's
        raise ExportError(f"the graph does not fit into one ONNX file, which holds at most 2 GiB ({error})") from error


def _write_graph(
    policy: TrainedPolicy, options: ExportOptions, path: Path, say: Callable[[str], None]
) -> tuple[int, dict[str, Any]]:
    model = policy.build_graph(options.outputs)
    conversion: dict[str, Any] = {}
    if options.precision != Precision.FP32:
        from policy_server.export import precision

        say(f"converting it to {options.precision}")
        observations = draw_observations(policy, _NUM_CALIBRATION_OBSERVATIONS, seed=_CALIBRATION_SEED)
        if options.outputs == Outputs.DISTRIBUTION:
            observations["noise"] = draw_noise(policy, _NUM_CALIBRATION_OBSERVATIONS, seed=_CALIBRATION_SEED + 1)
        result = precision.convert(
            model,
            options.precision,
            observations,
            output_scale=error_units(policy),
            tolerance=None if options.tolerance is None else options.tolerance / 2,
        )
        model, conversion = result.model, result.report.as_dict()
        for line in result.report.lines():
            say(line)
    write_model(model, path)
    return next(one.version for one in model.opset_import if one.domain == ""), conversion


def _build_engine(
    policy: TrainedPolicy, options: ExportOptions, staging: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Builds the TensorRT engine from the fp32 graph, and compares it with the source like the file."""
    from policy_server.export import tensorrt_engine, tensorrt_session

    say("building the TensorRT engine")
    record = tensorrt_engine.build(policy.build_graph(options.outputs), staging, precision=options.precision)
    say("comparing the engine with the source in float64")
    session = tensorrt_session.EngineSession(staging / tensorrt_engine.ENGINE_FILE)
    parity = verify(session, policy, outputs=options.outputs, precision=options.precision, tolerance=options.tolerance)
    return record | {"largest_error": parity.largest_error}


def _check_same_interface(parent: Path, policy: TrainedPolicy) -> None:
    """Versions of one name can take each other's place: they read the same fields and give the same kind of action."""
    highest = next_version(parent) - 1 if parent.is_dir() else 0
    try:
        before = read_manifest(parent / str(highest))
    except ManifestError:
        return  # there is none, or none that could be served
    interfaces = [
        ([_interface(field) for field in one.observation], _interface(one.action)) for one in (before, policy)
    ]
    if interfaces[0] != interfaces[1]:
        (old_fields, old_action), (fields, action) = interfaces
        raise ExportError(
            f"{parent / str(highest)} reads {', '.join(old_fields)} and gives {old_action}, this policy reads "
            f"{', '.join(fields)} and gives {action}: versions of one name must be exchangeable; give another --name"
        )


def _interface(space: ObservationField | ActionSpace) -> str:
    name = space.name if isinstance(space, ObservationField) else "action"
    return f"{name} {list(space.shape)} of {space.dtype}"


def _as_name(text: str) -> str:
    """A recipe's or an environment's name as a folder's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text.rpartition("/")[2]).strip("-._") or "policy"


def _measure_success(
    policy: TrainedPolicy,
    options: ExportOptions,
    path: Path,
    make_environment: MakeEnvironment | None,
    say: Callable[[str], None],
) -> Success | None:
    """Success of a lower precision beside fp32's, where the source names an environment."""
    environment = policy.training.environment
    if options.precision == Precision.FP32 or options.num_episodes == 0 or make_environment is None:
        return None
    if environment is None:
        say("change of success not measured: the source names no environment")
        return None
    plain = path.with_name("fp32.onnx")
    try:
        write_model(policy.build_graph(Outputs.ACTION), plain)
        rates: list[float] = []
        for name, file in (("fp32", plain), (str(options.precision), path)):
            say(f"running {options.num_episodes} episodes of {environment} in {name}")
            rates.append(success_rate(file, policy, make_environment, num_episodes=options.num_episodes))
    except EnvironmentUnavailableError as error:
        say(f"change of success not measured: {error}")
        return None
    finally:
        plain.unlink(missing_ok=True)
    return Success(environment=environment, num_episodes=options.num_episodes, fp32=rates[0], exported=rates[1])


def _describe(
    policy: TrainedPolicy,
    options: ExportOptions,
    measured: _Measured,
    name: str,
    version: int,
) -> Manifest:
    return Manifest(
        name=name,
        version=version,
        observation=policy.observation,
        action=policy.action,
        outputs=options.outputs,
        distribution=policy.distribution if options.outputs == Outputs.DISTRIBUTION else None,
        control_period_s=policy.control_period_s,
        precision=options.precision,
        engine=options.engine,
        opset=measured.opset,
        architecture=policy.architecture,
        training=policy.training,
        parity=measured.parity,
        success=measured.success,
        conversion=measured.conversion,
        files=measured.files,
    )
