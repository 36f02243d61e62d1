"""A trained policy as the exporter sees it: what goes in, what comes out, and two ways to compute it.

Legend: B batch, A action values, N noise values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from numpy.typing import NDArray

from policy_server.export.errors import ExportError
from policy_server.manifest import ActionSpace, Architecture, Bounds, Distribution, ObservationField, Outputs, Training

Arrays = Mapping[str, NDArray[np.generic]]
"""Tensors by name: the observation fields and, with a distribution, ``noise``; or the outputs."""

OPSET = 18
"""The newest that onnxruntime, TensorRT 10 and torch's exporter all have; LayerNormalization came with 17."""

IR_VERSION = 9


@dataclass(frozen=True, kw_only=True)
class TrainedPolicy:
    """What every reader of a source returns.

    Attributes:
        suggested_name: The policy's name unless another is asked for.
        observation: The graph's inputs in order.
        action: The graph's output.
        distribution: How it can be sampled; None if the policy is deterministic by nature.
        architecture: The network's name and sizes.
        training: Where it comes from and how good it was.
        control_period_s: Seconds between two actions, if the source says so.
        build_graph: Makes the fp32 graph for the outputs asked for.
        reference: The same function in float64, written another way. Takes the fields (and ``noise``), gives ``action``
            and, where there is a distribution, its parameters; for discrete actions always ``logits`` [B, choices].
        own_action: The source framework's own path from observation to deterministic action in float32, if it has one:
            it shows that this project read the source right.
        scale: Mean and standard deviation of each field as training saw it, flattened; (0, 1) for a field that is not
            named.
    """

    suggested_name: str
    observation: tuple[ObservationField, ...]
    action: ActionSpace
    distribution: Distribution | None
    architecture: Architecture
    training: Training
    control_period_s: float | None
    build_graph: Callable[[Outputs], onnx.ModelProto]
    reference: Callable[[Arrays], Arrays]
    own_action: Callable[[Arrays], NDArray[np.generic]] | None = None
    scale: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = field(
        default_factory=dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
    )


def inner_bounds(low: object, high: object, *, size: int, origin: str) -> tuple[Bounds | None, Bounds | None]:
    """Bounds as float32 values that lie inside those given, so that an action within them is within both.

    Args:
        low: Lower bounds, flattened or not; infinite or None where there is none.
        high: Upper bounds.
        size: How many values there must be; a single one holds for all.
        origin: Where they come from, for messages.

    Returns:
        Both sides; None for a side without any bound.

    Raises:
        ExportError: They are no numbers, too few, or cross.
    """
    lows, highs = (_as_array(side, size, f"{origin}.{name}") for name, side in (("low", low), ("high", high)))
    lower, upper = lows.astype(np.float32), highs.astype(np.float32)
    lower = np.where(lower < lows, np.nextafter(lower, np.float32(np.inf)), lower)
    upper = np.where(upper > highs, np.nextafter(upper, np.float32(-np.inf)), upper)
    if (crossed := np.flatnonzero(lower > upper)).size:
        index = int(crossed[0])
        raise ExportError(f"{origin}: low[{index}]={lows[index]} is above high[{index}]={highs[index]}")
    return _as_bounds(lower, low is None), _as_bounds(upper, high is None)


def _as_array(side: object, size: int, origin: str) -> NDArray[np.float64]:
    if side is None:
        return np.full(size, -np.inf if origin.endswith("low") else np.inf)
    try:
        values = np.asarray(side, np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise ExportError(f"{origin}={side!r}: not a list of numbers") from error
    if values.size == 1:
        values = np.repeat(values, size)
    if values.size != size or np.isnan(values).any():
        raise ExportError(f"{origin}={side!r}: needs {size} numbers, one a value")
    return values


def _as_bounds(values: NDArray[np.float32], absent: bool) -> Bounds | None:
    bounds = tuple(float(value) if math.isfinite(value) else None for value in values)
    return None if absent or all(bound is None for bound in bounds) else bounds
