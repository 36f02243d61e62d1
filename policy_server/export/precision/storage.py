"""Stores linear layers in fewer bits, in the forms that onnxruntime runs.

- int8: ``MatMulNBits`` of onnxruntime's own operator set: 8-bit weights with a scale for every output channel (and
  every 256 input features), activations quantised row by row while it runs, int8 products. A row's result does not
  depend on the other rows of its batch, which the per-batch scale of ``DynamicQuantizeMatMul`` cannot promise.
- fp16: half-precision constants behind a ``Cast``. onnxruntime has no half-precision product on x86 and folds the cast
  when it loads the file: the file is half as large, the speed and the memory are those of fp32.

Legend: K input features, N output features, J blocks of input features, S features a block.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from policy_server.export.precision.linear_layers import LinearLayer, constant_array, constants_by_name
from policy_server.manifest import Precision

MAX_BLOCK = 256
MIN_BLOCK = 16
MICROSOFT_DOMAIN = "com.microsoft"
METHODS = {
    Precision.INT8: "8-bit weights with scales per output channel, activations quantised row by row (MatMulNBits)",
    Precision.FP16: "half-precision weights, multiplied in fp32 where the processor has no half-precision product",
}

_ZERO_POINT = 128
_INT8_COMPUTE = 4


def block_size(in_features: int) -> int:
    """Input features that share a scale: all of them up to 256, as a power of two."""
    return min(MAX_BLOCK, max(MIN_BLOCK, 1 << (in_features - 1).bit_length()))


def quantize_int8(weight: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Symmetric 8-bit weights.

    Args:
        weight: [N, K].

    Returns:
        Values around 128, [N, J, S], the last block filled up with zeros; scales, [N, J].
    """
    rows, columns = weight.shape
    size = block_size(columns)
    padded = np.pad(weight, ((0, 0), (0, -columns % size))).reshape(rows, -1, size)
    scales = np.abs(padded).max(axis=2) / 127
    safe = np.where(scales > 0, scales, 1).astype(np.float32)
    values = np.rint(padded / safe[:, :, None]) + _ZERO_POINT
    return values.astype(np.uint8), safe


def rounded(weight: NDArray[np.float32], precision: Precision) -> NDArray[np.float32]:
    """The weight [N, K] as the precision remembers it, in float32."""
    if precision == Precision.FP16:
        return weight.astype(np.float16).astype(np.float32)
    values, scales = quantize_int8(weight)
    restored = (values.astype(np.float32) - _ZERO_POINT) * scales[:, :, None]
    return restored.reshape(len(weight), -1)[:, : weight.shape[1]]


def store(
    model: onnx.ModelProto, layers: Collection[LinearLayer], precision: Precision
) -> tuple[onnx.ModelProto, NDArray[np.float32]]:
    """Writes the graph anew with these layers in the lower precision.

    Args:
        model: The fp32 graph; it is not changed.
        layers: Which layers are converted.
        precision: fp16 or int8.

    Returns:
        The new graph; and all scales, [scales].
    """
    constants = constants_by_name(model)
    chosen = {layer.index: layer for layer in layers}
    # A constant that another node reads too has to stay.
    still_read = {
        name
        for index, node in enumerate(model.graph.node)
        for place, name in enumerate(node.input)
        if index not in chosen or place != 1
    }
    dropped = {layer.weight for layer in layers} - still_read
    result = copy_without_weights(model)
    for constant in model.graph.initializer:
        if constant.name not in dropped:
            result.graph.initializer.add().CopyFrom(constant)
    scales: list[NDArray[np.float32]] = []
    stored: dict[tuple[str, bool], list[str]] = {}
    for index, node in enumerate(model.graph.node):
        layer = chosen.get(index)
        if layer is None:
            result.graph.node.add().CopyFrom(node)
            continue
        key = (layer.weight, layer.transposed)
        if key not in stored:
            weight = constant_array(constants[layer.weight])
            if precision == Precision.INT8:
                stored[key], of_layer = _add_int8(result, layer, weight)
                scales.append(of_layer.reshape(-1))
            else:
                stored[key] = _add_fp16(result, layer, weight)
        result.graph.node.append(
            _int8_node(node, layer, stored[key]) if precision == Precision.INT8 else _fp16_node(node, stored[key])
        )
    if precision == Precision.INT8 and all(one.domain != MICROSOFT_DOMAIN for one in result.opset_import):
        result.opset_import.append(helper.make_opsetid(MICROSOFT_DOMAIN, 1))
    return result, np.concatenate(scales) if scales else np.zeros(0, np.float32)


def copy_without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Inputs, outputs and operator sets of a graph, without nodes and constants."""
    result = onnx.ModelProto(ir_version=model.ir_version, producer_name=model.producer_name)
    result.opset_import.extend(model.opset_import)
    result.metadata_props.extend(model.metadata_props)
    result.graph.name = model.graph.name
    result.graph.input.extend(model.graph.input)
    result.graph.output.extend(model.graph.output)
    return result


def _add_constant(model: onnx.ModelProto, name: str, values: NDArray[np.generic]) -> str:
    model.graph.initializer.append(numpy_helper.from_array(values, name))
    return name


def _add_int8(
    model: onnx.ModelProto, layer: LinearLayer, weight: NDArray[np.float32]
) -> tuple[list[str], NDArray[np.float32]]:
    values, scales = quantize_int8(weight if layer.transposed else np.ascontiguousarray(weight.T))
    name = f"{layer.weight}.{'rows' if layer.transposed else 'columns'}"
    return [
        _add_constant(model, f"{name}.int8", values),
        _add_constant(model, f"{name}.scales", scales),
    ], scales


def _int8_node(node: onnx.NodeProto, layer: LinearLayer, stored: list[str]) -> onnx.NodeProto:
    bias = ["", "", layer.bias] if layer.bias else []
    return helper.make_node(
        "MatMulNBits",
        [node.input[0], *stored, *bias],
        list(node.output),
        name=node.name,
        domain=MICROSOFT_DOMAIN,
        K=layer.in_features,
        N=layer.out_features,
        bits=8,
        block_size=block_size(layer.in_features),
        accuracy_level=_INT8_COMPUTE,
    )


def _add_fp16(model: onnx.ModelProto, layer: LinearLayer, weight: NDArray[np.float32]) -> list[str]:
    stored = _add_constant(model, f"{layer.weight}.fp16", weight.astype(np.float16))
    restored = f"{stored}.fp32"
    model.graph.node.append(
        helper.make_node("Cast", [stored], [restored], name=f"{layer.name}/cast", to=onnx.TensorProto.FLOAT)
    )
    return [restored]


def _fp16_node(node: onnx.NodeProto, stored: list[str]) -> onnx.NodeProto:
    result = onnx.NodeProto()
    result.CopyFrom(node)
    result.input[1] = stored[0]
    return result
