"""Finds a graph's linear layers: where nearly all the bytes are, and what precision is chosen for.

Legend: K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

LINEAR_OPERATORS = frozenset({"Gemm", "MatMul"})


@dataclass(frozen=True, kw_only=True)
class LinearLayer:
    """A node that multiplies by a constant matrix.

    Attributes:
        name: The node's name.
        index: The node's place in the graph.
        weight: Name of the constant.
        bias: Name of the bias, empty if there is none.
        transposed: Whether the constant is [N, K] instead of [K, N].
        in_features: K.
        out_features: N.
        reads_input: No other linear layer lies before it: it sees observations in their own units.
        makes_output: No other linear layer comes after it.
    """

    name: str
    index: int
    weight: str
    bias: str
    transposed: bool
    in_features: int
    out_features: int
    reads_input: bool
    makes_output: bool

    @property
    def num_weights(self) -> int:
        """Values of the matrix."""
        return self.in_features * self.out_features


def constants_by_name(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """The graph's constants."""
    return {constant.name: constant for constant in model.graph.initializer}


def constant_array(constant: onnx.TensorProto) -> NDArray[np.float32]:
    """The values of a float32 constant."""
    return np.asarray(numpy_helper.to_array(constant), np.float32)


def find_linear_layers(model: onnx.ModelProto) -> tuple[list[LinearLayer], dict[str, str]]:
    """Finds the layers that can be stored in another precision.

    Returns:
        The layers in the graph's order; and the names of linear nodes that are no such layer, with the reason.
    """
    constants = constants_by_name(model)
    nodes = [(index, node) for index, node in enumerate(model.graph.node) if node.op_type in LINEAR_OPERATORS]
    followers = _follows_linear(model.graph.node)
    leaders = _precedes_linear(model.graph.node)
    layers: list[LinearLayer] = []
    others: dict[str, str] = {}
    for index, node in nodes:
        if reason := _why_not(node, constants):
            others[node.name] = reason
            continue
        attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        transposed = bool(attributes.get("transB", 0))
        rows, columns = constants[node.input[1]].dims
        layers.append(
            LinearLayer(
                name=node.name,
                index=index,
                weight=node.input[1],
                bias=node.input[2] if len(node.input) > 2 else "",
                transposed=transposed,
                in_features=columns if transposed else rows,
                out_features=rows if transposed else columns,
                reads_input=not any(name in followers for name in node.input),
                makes_output=not any(name in leaders for name in node.output),
            )
        )
    return layers, others


def _why_not(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> str:
    weight = constants.get(node.input[1])
    if weight is None or len(weight.dims) != 2:
        return "its weight is no constant matrix"
    if weight.data_type != onnx.TensorProto.FLOAT:
        return f"its weight is {onnx.TensorProto.DataType.Name(weight.data_type)}, not FLOAT"
    attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    for name, plain in (("alpha", 1.0), ("beta", 1.0), ("transA", 0)):
        if attributes.get(name, plain) != plain:
            return f"{name}={attributes[name]}"
    if len(node.input) > 2 and node.input[2]:
        bias, out_features = constants.get(node.input[2]), weight.dims[0 if attributes.get("transB", 0) else 1]
        if bias is None or list(bias.dims) != [out_features]:
            return "its bias is no constant of one value a channel"
    return ""


def _follows_linear(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Tensors that a linear layer's output flows into; nodes come in topological order."""
    found: set[str] = set()
    for node in nodes:
        if node.op_type in LINEAR_OPERATORS or any(name in found for name in node.input):
            found.update(node.output)
    return found


def _precedes_linear(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Tensors that flow into a linear layer."""
    found: set[str] = set()
    for node in reversed(list(nodes)):
        if node.op_type in LINEAR_OPERATORS or any(name in found for name in node.output):
            found.update(name for name in node.input if name)
    return found
