"""Half-precision products with everything else in fp32, for engines whose types are those written in the graph.

TensorRT builds strongly typed networks: a layer runs in the type its inputs have, so the mixture has to be in the
graph. LayerNorm stays in fp32, as its sum of squares overflows half precision; so do activations and the residual sum.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from policy_server.export.precision.linear_layers import (
    LinearLayer,
    constant_array,
    constants_by_name,
    find_linear_layers,
)
from policy_server.export.precision.storage import copy_without_weights


def to_half_compute(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """Casts around every linear layer but those that read the observation or make an output.

    Args:
        model: An fp32 graph; it is not changed.

    Returns:
        The mixed graph; and the names of the layers that multiply in half precision.
    """
    largest = float(np.finfo(np.float16).max)
    constants = constants_by_name(model)
    layers, _ = find_linear_layers(model)
    chosen = {
        layer.index: layer
        for layer in layers
        if not (layer.reads_input or layer.makes_output)
        and all(np.abs(constant_array(constants[name])).max() <= largest for name in (layer.weight, layer.bias) if name)
    }
    inner = {name for layer in chosen.values() for name in (layer.weight, layer.bias) if name}
    still_read = {
        name
        for index, node in enumerate(model.graph.node)
        for place, name in enumerate(node.input)
        if index not in chosen or place == 0
    }
    result = copy_without_weights(model)
    for constant in model.graph.initializer:
        if constant.name not in inner - still_read:
            result.graph.initializer.add().CopyFrom(constant)
    for name in sorted(inner):
        half = constant_array(constants[name]).astype(np.float16)
        result.graph.initializer.append(onnx.numpy_helper.from_array(half, f"{name}.fp16"))
    for index, node in enumerate(model.graph.node):
        if (layer := chosen.get(index)) is None:
            result.graph.node.add().CopyFrom(node)
        else:
            result.graph.node.extend(_cast_around(node, layer))
    return result, [layer.name for layer in chosen.values()]


def _cast_around(node: onnx.NodeProto, layer: LinearLayer) -> list[onnx.NodeProto]:
    half_input, half_output = f"{layer.name}/half_input", f"{layer.name}/half_output"
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    inner.input[:] = [half_input, *(f"{name}.fp16" for name in (layer.weight, layer.bias) if name)]
    inner.output[:] = [half_output]
    return [
        helper.make_node("Cast", [node.input[0]], [half_input], name=half_input, to=TensorProto.FLOAT16),
        inner,
        helper.make_node("Cast", [half_output], list(node.output), name=half_output, to=TensorProto.FLOAT),
    ]
