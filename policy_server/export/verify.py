"""Compares an exported file with its source: random observations, several batches, the bytes that will be served.

Zeros prove nothing (a forgotten normaliser or a lost bias gives the right answer for them), and a batch of one hides a
batch that was baked in.

Legend: B batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import onnxruntime  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray

from policy_server.export.errors import ExportError, ParityError
from policy_server.export.policy import Arrays, TrainedPolicy
from policy_server.manifest import ActionSpace, ObservationField, Outputs, Parity, Precision

BATCH_SIZES = (1, 3, 64)
TOLERANCES = {Precision.FP32: 1e-4, Precision.FP16: 2e-2, Precision.INT8: 2e-1}
"""Largest error allowed, in units of half the action's range (1 where it has none), or of a parameter's own size."""

_OUTLIER_SHARE = 0.25
_OUTLIER_SCALE = 5.0
_MARGIN = 0.1


class Session(Protocol):
    """The part of onnxruntime's session that is used here; its own types are only partly known."""

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Sequence[Any]:
        """Runs the graph."""
        ...

    def get_inputs(self) -> Sequence[Any]:
        """The inputs, each with a ``name``."""
        ...

    def get_outputs(self) -> Sequence[Any]:
        """The outputs, each with a ``name``."""
        ...


def draw_observations(policy: TrainedPolicy, num: int, *, seed: int = 0) -> dict[str, NDArray[np.generic]]:
    """Random observations: over the bounds and a tenth of the range beyond; without bounds, as training saw them.

    A quarter of the unbounded ones lie five times as far out, where clipping shows.

    Args:
        policy: Whose fields are filled.
        num: How many observations.
        seed: The same seed gives the same ones.

    Returns:
        Every field, [num, *shape].
    """
    rng = np.random.default_rng(seed)
    return {field.name: _draw_field(field, policy, num, rng) for field in policy.observation}


def draw_noise(policy: TrainedPolicy, num: int, *, seed: int = 1) -> NDArray[np.float32]:
    """Noise for the input ``noise``, [num, noise_size]; every third row is zero, which asks for the best action."""
    assert policy.distribution is not None
    rng = np.random.default_rng(seed)
    shape = (num, policy.distribution.noise_size)
    gumbel = policy.distribution.kind == "categorical"
    noise = rng.gumbel(size=shape) if gumbel else rng.standard_normal(shape)
    noise[::3] = 0
    return noise.astype(np.float32)


def load_session(path: Path, *, num_threads: int = 1) -> Session:
    """Opens the file in onnxruntime on the CPU.

    Raises:
        ExportError: onnxruntime refuses it.
    """
    runtime = cast("Any", onnxruntime)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises a class of its own for every kind of fault
        raise ExportError(f"onnxruntime refuses the exported graph: {error}") from error


def verify(
    file: Path | Session,
    policy: TrainedPolicy,
    *,
    outputs: Outputs,
    precision: Precision,
    tolerance: float | None = None,
) -> Parity:
    """Runs the exported file beside the source in float64.

    Args:
        file: The file, or a session that has it or an engine made of it open.
        policy: Its source.
        outputs: What the file gives.
        precision: What it is stored in; decides the tolerance.
        tolerance: Another tolerance, in the units of ``TOLERANCES``.

    Raises:
        ParityError: An output is further away than the tolerance, of another shape or type, or out of its bounds.
        ExportError: onnxruntime refuses the file.
    """
    allowed = TOLERANCES[precision] if tolerance is None else tolerance
    num = sum(BATCH_SIZES)
    inputs = draw_observations(policy, num)
    _check_reading(policy, inputs)
    if outputs == Outputs.DISTRIBUTION:
        inputs["noise"] = draw_noise(policy, num)
    expected = dict(policy.reference(inputs))
    if policy.action.num_choices is not None:
        expected["scores"] = np.add(expected["logits"], inputs.get("noise", 0.0))
    session = load_session(file) if isinstance(file, Path) else file
    names: list[str] = [output.name for output in session.get_outputs()]
    largest, start = 0.0, 0
    for size in BATCH_SIZES:
        rows = slice(start, start + size)
        start += size
        try:
            found = session.run(None, {name: values[rows] for name, values in inputs.items()})
        except Exception as error:  # see load_session
            raise ParityError(f"the exported graph fails on a batch of {size}: {error}") from error
        wanted = {name: values[rows] for name, values in expected.items()}
        results = dict(zip(names, (np.asarray(one) for one in found), strict=True))
        largest = max(largest, _compare(results, wanted, policy, outputs, allowed, size))
    return Parity(
        largest_error=largest,
        tolerance=allowed,
        batch_sizes=BATCH_SIZES,
        num_observations=num,
        share_at_bounds=_share_at_bounds(expected["action"], policy.action),
    )


def _draw_field(
    field: ObservationField, policy: TrainedPolicy, num: int, rng: np.random.Generator
) -> NDArray[np.generic]:
    shape = (num, field.size)
    mean, std = policy.scale.get(field.name, (np.zeros(field.size), np.ones(field.size)))
    far = np.where(rng.random((num, 1)) < _OUTLIER_SHARE, _OUTLIER_SCALE, 1.0)
    values = mean + std * far * rng.standard_normal(shape)
    low = np.array([-np.inf if bound is None else bound for bound in field.low or [None] * field.size])
    high = np.array([np.inf if bound is None else bound for bound in field.high or [None] * field.size])
    if field.dtype == "int64":
        return rng.integers(low.astype(np.int64), high.astype(np.int64) + 1, shape).reshape(num, *field.shape)
    # Spaces often carry the largest float as a bound; that is no range to draw from.
    bounded = np.isfinite(low) & np.isfinite(high) & (np.abs(low) < 1e6) & (np.abs(high) < 1e6)
    low, high = np.where(bounded, low, 0.0), np.where(bounded, high, 0.0)
    margin = _MARGIN * (high - low)
    uniform = rng.uniform(low - margin, high + margin, shape)
    return np.where(bounded, uniform, values).astype(np.float32).reshape(num, *field.shape)


def error_units(policy: TrainedPolicy) -> dict[str, NDArray[np.float64]]:
    """What an error of 1 is, by output: half the action's range, and 1 for a distribution's parameters."""
    space = policy.action
    lows, highs = (side or (None,) * space.size for side in (space.low, space.high))
    half = [1.0 if low is None or high is None else (high - low) / 2 for low, high in zip(lows, highs, strict=True)]
    units = {"action": np.array([one if one > 0 else 1.0 for one in half]).reshape(space.shape)}
    parameters = policy.distribution.parameters if policy.distribution is not None else ()
    return units | {name: np.ones(()) for name in parameters}


def _check_reading(policy: TrainedPolicy, inputs: Arrays) -> None:
    """The source's own framework and the float64 reference must agree, or the source was read wrong."""
    if policy.own_action is None:
        return
    own, ours = policy.own_action(inputs), policy.reference(inputs)
    error = _action_error(own, ours, policy.action)
    if not error <= (limit := 10 * TOLERANCES[Precision.FP32]):
        raise ParityError(
            f"{policy.training.framework}'s own prediction is {error:.3g} from what was read of it (limit {limit:g}); "
            "this policy does something that the exporter does not know"
        )


def _compare(
    found: Arrays, wanted: Arrays, policy: TrainedPolicy, outputs: Outputs, allowed: float, size: int
) -> float:
    """The largest error among all outputs."""
    where = f"at a batch of {size}"
    space = policy.action
    action = found["action"]
    if action.shape != (size, *space.shape) or action.dtype != np.dtype(space.dtype):
        raise ParityError(f"action {where} is {action.dtype} {list(action.shape)}, not {space.dtype} [{size}, *shape]")
    _check_bounds(action, space, where)
    errors = {"action": _action_error(action, wanted, space)}
    if outputs == Outputs.DISTRIBUTION:
        assert policy.distribution is not None
        for name in policy.distribution.parameters:
            errors[name] = _relative_error(found[name], wanted[name])
    for name, error in errors.items():
        if not error <= allowed:  # NaN is not
            raise ParityError(
                f"{name} {where}: largest error {error:.3g} against torch in float64 is above the tolerance {allowed:g}"
            )
    return max(errors.values())


def _check_bounds(action: NDArray[np.generic], space: ActionSpace, where: str) -> None:
    flat = action.reshape(len(action), -1)
    for side, outside in ((space.low, np.less), (space.high, np.greater)):
        for index, bound in enumerate(side or ()):
            if bound is not None and outside(flat[:, index], bound).any():
                raise ParityError(f"action[{index}] {where} leaves its bound {bound}")


def _action_error(found: NDArray[np.generic], wanted: Arrays, space: ActionSpace) -> float:
    if space.num_choices is not None:
        return _regret(found, wanted.get("scores", wanted["logits"]), space.num_choices)
    difference = np.abs(np.asarray(found, np.float64) - np.asarray(wanted["action"], np.float64))
    if space.low is None or space.high is None:
        return float(difference.max())
    pairs = zip(space.low, space.high, strict=True)
    half = np.array([1.0 if low is None or high is None else (high - low) / 2 for low, high in pairs])
    return float((difference.reshape(len(difference), -1) / np.where(half > 0, half, 1.0)).max())


def _share_at_bounds(action: NDArray[np.generic], space: ActionSpace) -> float:
    if space.kind == "discrete":
        return 0.0
    flat = np.asarray(action, np.float64).reshape(len(action), -1)
    at_bound = np.zeros(flat.shape, bool)
    for side in (space.low, space.high):
        limits = np.array([np.inf if bound is None else bound for bound in side or [None] * space.size])
        at_bound |= np.isclose(flat, limits, rtol=1e-6, atol=1e-9)
    return float(at_bound.mean())


def _regret(found: NDArray[np.generic], scores: NDArray[np.generic], num_choices: tuple[int, ...]) -> float:
    """How much worse than the best choice the chosen one is by the reference: zero unless two are nearly equal."""
    chosen, largest, start = np.asarray(found, np.int64).reshape(len(found), -1), 0.0, 0
    for index, num in enumerate(num_choices):
        part = np.asarray(scores, np.float64)[:, start : start + num]
        start += num
        taken = np.take_along_axis(part, chosen[:, index : index + 1], axis=1)[:, 0]
        largest = max(largest, float((part.max(axis=1) - taken).max()))
    return largest


def _relative_error(found: NDArray[np.generic], wanted: NDArray[np.generic]) -> float:
    reference = np.asarray(wanted, np.float64)
    if found.shape != reference.shape:
        return float("inf")
    return float((np.abs(np.asarray(found, np.float64) - reference) / np.maximum(1.0, np.abs(reference))).max())
