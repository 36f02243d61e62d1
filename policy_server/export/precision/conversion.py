"""Converts an fp32 graph to fp16 or int8 weights and finds out which layers cannot bear it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray

from policy_server.export.errors import ExportError
from policy_server.export.precision.linear_layers import (
    LinearLayer,
    constant_array,
    constants_by_name,
    find_linear_layers,
)
from policy_server.export.precision.report import KeptLayer, PrecisionReport, PrecisionResult
from policy_server.export.precision.sensitivity import Arrays, keep_fewest, open_session, rank_layers, run
from policy_server.export.precision.storage import METHODS, store
from policy_server.manifest import Precision

logger = logging.getLogger(__name__)

TOLERANCES = {Precision.FP16: 1e-2, Precision.INT8: 1e-1}
"""Largest error that converting may add, in units of ``output_scale``."""

_NUM_RANDOM_OBSERVATIONS = 64
_FP16_MAX = float(np.finfo(np.float16).max)
_MIN_FEATURES = 16


def convert(
    model: onnx.ModelProto,
    precision: Precision,
    calibration: Mapping[str, NDArray[np.generic]] | None = None,
    *,
    output_scale: Mapping[str, NDArray[np.floating]] | None = None,
    tolerance: float | None = None,
) -> PrecisionResult:
    """Stores the linear layers in a lower precision, all but those that must stay in fp32.

    In int8 the layers that read the observation and those that make the outputs stay: they see values in units of
    their own or decide the action directly, and hold few bytes. Beyond them the layers whose rounding moves the
    outputs most are kept, as few as bring the error under the tolerance. LayerNorm, activations and biases are fp32.

    Args:
        model: An fp32 graph; it is not changed.
        precision: fp32 (nothing is done), fp16 or int8.
        calibration: Observations to measure the error on, by input, [B, *shape]; random ones if None.
        output_scale: What an error of 1 is, by output, a value or [*shape]: half the action's range, say. An output
            that is not named is measured by its own largest value, an integer one by the share that differs.
        tolerance: Another tolerance than ``TOLERANCES``.

    Raises:
        ExportError: An input is missing in ``calibration``, or no layer can be converted.
    """
    layers, others = find_linear_layers(model)
    weight_bytes = _constant_bytes(model)
    allowed = tolerance if tolerance is not None else TOLERANCES.get(precision, 0.0)
    if precision == Precision.FP32:
        return PrecisionResult(model, _report(precision, len(layers) + len(others), weight_bytes))
    observations = _observations(model, calibration)
    kept = [KeptLayer(name, reason) for name, reason in others.items()]
    chosen: list[LinearLayer] = []
    for layer in layers:
        if reason := _why_keep(model, layer, precision):
            kept.append(KeptLayer(layer.name, reason))
        else:
            chosen.append(layer)
    if not chosen:
        raise ExportError(
            f"precision={precision}: no layer can be stored in it "
            f"({'; '.join(f'{one.name}: {one.reason}' for one in kept) or 'the graph has no linear layer'}); "
            "export with --precision fp32"
        )
    expected = run(open_session(model), observations)
    scales = _output_scales(model, expected, output_scale or {})

    def distance(found: Sequence[NDArray[np.generic]], wanted: Sequence[NDArray[np.generic]]) -> float:
        return max(_difference(*pair) for pair in zip(found, wanted, scales, strict=True))

    def error_with_kept(sensitive: Sequence[LinearLayer]) -> float:
        names = {layer.name for layer in sensitive}
        candidate, _ = store(model, [layer for layer in chosen if layer.name not in names], precision)
        return distance(run(open_session(candidate), observations), expected)

    error_all = error_with_kept([])
    if not error_all <= allowed:
        logger.info("%s: error %.3g is above %g; looking for the layers to keep in fp32", precision, error_all, allowed)
        ranked = rank_layers(model, chosen, precision, observations, distance)
        sensitive = keep_fewest(ranked, error_with_kept, allowed)
        errors = {layer.name: group.error for group in ranked for layer in group.layers}
        kept += [
            KeptLayer(layer.name, f"sensitive: rounding it alone costs {errors[layer.name]:.2g}") for layer in sensitive
        ]
        names = {layer.name for layer in sensitive}
        chosen = [layer for layer in chosen if layer.name not in names]
    if not chosen:
        raise ExportError(
            f"precision={precision}: even one layer in it costs more than the tolerance {allowed:g}; "
            "export with --precision fp32"
        )
    result, weight_scales = store(model, chosen, precision)
    error = distance(run(open_session(result), observations), expected)
    report = PrecisionReport(
        precision=precision,
        method=METHODS[precision],
        num_layers=len(layers) + len(others),
        num_converted=len(chosen),
        kept=tuple(kept),
        channel_scales=weight_scales.size,
        smallest_scale=float(weight_scales.min()) if weight_scales.size else 0.0,
        largest_scale=float(weight_scales.max()) if weight_scales.size else 0.0,
        fp32_weight_bytes=weight_bytes,
        weight_bytes=_constant_bytes(result),
        error=error,
        error_all_converted=error_all,
        tolerance=allowed,
        num_observations=len(next(iter(observations.values()))),
        unit="half the action's range" if output_scale else "the output's largest value",
    )
    return PrecisionResult(result, report)


def _difference(found: NDArray[np.generic], wanted: NDArray[np.generic], scale: NDArray[np.float64]) -> float:
    """Largest error in units of ``scale``; for integers, such as the number of a choice, the share that differs."""
    if np.issubdtype(wanted.dtype, np.integer):
        return float(np.mean(np.not_equal(found, wanted)))
    return float((np.abs(np.asarray(found, np.float64) - np.asarray(wanted, np.float64)) / scale).max())


def _why_keep(model: onnx.ModelProto, layer: LinearLayer, precision: Precision) -> str:
    if precision == Precision.INT8:
        if layer.reads_input:
            return "reads the observation"
        if layer.makes_output:
            return "makes an output"
        if min(layer.in_features, layer.out_features) < _MIN_FEATURES:
            return f"has fewer than {_MIN_FEATURES} features"
        return ""
    largest = float(np.abs(constant_array(constants_by_name(model)[layer.weight])).max())
    return f"holds {largest:.3g}, beyond fp16's {_FP16_MAX:g}" if largest > _FP16_MAX else ""


def _report(precision: Precision, num_layers: int, weight_bytes: int) -> PrecisionReport:
    return PrecisionReport(
        precision=precision,
        method="as trained",
        num_layers=num_layers,
        num_converted=num_layers,
        kept=(),
        channel_scales=0,
        smallest_scale=0.0,
        largest_scale=0.0,
        fp32_weight_bytes=weight_bytes,
        weight_bytes=weight_bytes,
        error=0.0,
        error_all_converted=0.0,
        tolerance=0.0,
        num_observations=0,
        unit="the output's largest value",
    )


def _constant_bytes(model: onnx.ModelProto) -> int:
    sizes = (np.dtype(onnx.helper.tensor_dtype_to_np_dtype(one.data_type)).itemsize for one in model.graph.initializer)
    return sum(size * int(np.prod(one.dims)) for size, one in zip(sizes, model.graph.initializer, strict=True))


def _observations(model: onnx.ModelProto, given: Arrays | None) -> Arrays:
    rng = np.random.default_rng(0)
    constants = constants_by_name(model)
    result: dict[str, NDArray[np.generic]] = {}
    for one in model.graph.input:
        if one.name in constants:
            continue
        if given is not None:
            if one.name not in given:
                raise ExportError(f"calibration: the graph's input {one.name!r} is missing; it has {sorted(given)}")
            result[one.name] = given[one.name]
            continue
        if one.type.tensor_type.elem_type != onnx.TensorProto.FLOAT:
            raise ExportError(f"the input {one.name!r} is no float32: give calibration observations for it")
        shape = [dim.dim_value for dim in one.type.tensor_type.shape.dim][1:]
        result[one.name] = rng.standard_normal((_NUM_RANDOM_OBSERVATIONS, *shape)).astype(np.float32)
    return result


def _output_scales(
    model: onnx.ModelProto,
    expected: Sequence[NDArray[np.generic]],
    given: Mapping[str, NDArray[np.floating]],
) -> list[NDArray[np.float64]]:
    scales: list[NDArray[np.float64]] = []
    for output, values in zip(model.graph.output, expected, strict=True):
        own = np.asarray(np.abs(np.asarray(values, np.float64)).max())
        scale = np.asarray(given.get(output.name, own), np.float64)
        scales.append(np.where(scale > 0, scale, 1.0))
    return scales
