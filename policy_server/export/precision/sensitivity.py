"""Finds which layers have to stay in fp32: greedily, by what each one's rounding alone does to the outputs.

Legend: B observations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray
from onnx import helper

from policy_server.export.errors import ExportError
from policy_server.export.precision.linear_layers import LinearLayer, constant_array, constants_by_name
from policy_server.export.precision.storage import rounded
from policy_server.export.verify import Session
from policy_server.manifest import Precision

logger = logging.getLogger(__name__)

MAX_GROUPS = 256
"""Layers are tried in at most so many groups of neighbours, so that a deep network takes no longer than a shallow."""

_MAX_OBSERVATIONS = 16

Arrays = Mapping[str, NDArray[np.generic]]
Distance = Callable[[Sequence[NDArray[np.generic]], Sequence[NDArray[np.generic]]], float]


@dataclass(frozen=True)
class LayerGroup:
    """Neighbouring layers and how far the outputs move when only these are rounded."""

    layers: tuple[LinearLayer, ...]
    error: float


def open_session(model: onnx.ModelProto) -> Session:
    """Opens a graph in onnxruntime on one thread of the CPU.

    Raises:
        ExportError: onnxruntime refuses it.
    """
    runtime = cast("Any", onnxruntime)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3  # overridable constants are meant, not a mistake to be warned of
    try:
        return runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises a class of its own for every kind of fault
        raise ExportError(f"onnxruntime refuses the converted graph: {error}") from error


def run(session: Session, inputs: Arrays) -> list[NDArray[np.generic]]:
    """All outputs for these inputs."""
    return [np.asarray(one) for one in session.run(None, dict(inputs))]


def rank_layers(
    model: onnx.ModelProto,
    layers: Sequence[LinearLayer],
    precision: Precision,
    observations: Arrays,
    distance: Distance,
) -> list[LayerGroup]:
    """Rounds a few layers at a time and looks at the outputs.

    The graph is loaded once, with its weights as constants that a call can override.

    Args:
        model: The fp32 graph.
        layers: Which layers to try.
        precision: How they would be rounded.
        observations: The graph's inputs, [B, ...]; the first few are used.
        distance: How far two lists of outputs are apart.

    Returns:
        The groups, the most sensitive first.
    """
    constants = constants_by_name(model)
    few = {name: values[:_MAX_OBSERVATIONS] for name, values in observations.items()}
    session = open_session(_overridable(model, {layer.weight for layer in layers}))
    expected = run(session, few)
    size = -(-len(layers) // MAX_GROUPS)
    groups: list[LayerGroup] = []
    for start in range(0, len(layers), size):
        members = tuple(layers[start : start + size])
        weights: dict[str, NDArray[np.generic]] = {}
        for layer in members:
            weight = constant_array(constants[layer.weight])
            restored = rounded(weight if layer.transposed else weight.T, precision)
            weights[layer.weight] = np.ascontiguousarray(restored if layer.transposed else restored.T)
        groups.append(LayerGroup(members, distance(run(session, {**few, **weights}), expected)))
    # NaN would stay where it is in a sort; a layer that breaks the outputs is the most sensitive of all.
    return sorted(groups, key=lambda group: -np.nan_to_num(group.error, nan=np.inf))


def keep_fewest(
    ranked: Sequence[LayerGroup], error_with_kept: Callable[[Sequence[LinearLayer]], float], tolerance: float
) -> list[LinearLayer]:
    """Keeps the most sensitive groups in fp32, as few as the tolerance allows.

    Args:
        ranked: The most sensitive first.
        error_with_kept: The converted graph's error when these layers are kept.
        tolerance: What it may be.

    Returns:
        The layers to keep; all of them if nothing less is enough.
    """

    def kept(num_groups: int) -> list[LinearLayer]:
        return [layer for group in ranked[:num_groups] for layer in group.layers]

    too_few, enough = 0, 1
    while enough < len(ranked) and not error_with_kept(kept(enough)) <= tolerance:
        too_few, enough = enough, 2 * enough
    enough = min(enough, len(ranked))
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if error_with_kept(kept(middle)) <= tolerance:
            enough = middle
        else:
            too_few = middle
    return kept(enough)


def _overridable(model: onnx.ModelProto, names: set[str]) -> onnx.ModelProto:
    """The graph with these constants listed as inputs too, which lets a call replace them."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for constant in model.graph.initializer:
        if constant.name in names:
            result.graph.input.append(
                helper.make_tensor_value_info(constant.name, constant.data_type, list(constant.dims))
            )
    return result
