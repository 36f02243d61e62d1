"""Writes the deep residual actor as an ONNX graph directly, node by node: seconds and little memory at 1,024 layers.

Tracing exporters run the network and then optimise what they recorded; a residual actor is so regular that its graph
can be written down from the checkpoint's names. Weights go from the file into the graph one tensor at a time.

Legend: B batch, I joined observation values, A action values.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import TensorProto, helper

from policy_server.export.checkpoint import LAYERS_PER_BLOCK, Checkpoint
from policy_server.export.errors import ExportError
from policy_server.export.policy import IR_VERSION, OPSET
from policy_server.manifest import ActionSpace, ObservationField, Outputs

BATCH = "batch"
MAX_WEIGHT_BYTES = 2**31 - 64 * 2**20
"""Protobuf holds at most 2 GiB in one file; the nodes take a little of it."""


class GraphBuilder:
    """Collects nodes and weights; every method adds something and gives the new tensor's name.

    Node names tell where a node belongs (``trunk/blocks.3.1/linear``), so that a conversion can choose among them.
    """

    def __init__(self) -> None:
        self._model = onnx.ModelProto(ir_version=IR_VERSION, producer_name="gated-serving")
        self._model.opset_import.append(helper.make_opsetid("", OPSET))
        self._model.graph.name = "policy"

    def weight(self, name: str, values: ArrayLike, dtype: type[np.generic] = np.float32) -> str:
        """Adds a constant."""
        array = np.ascontiguousarray(values, dtype)
        self._model.graph.initializer.add(  # made in place: appending would copy the weights
            name=name,
            data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
            dims=array.shape,
            raw_data=array.tobytes(),
        )
        return name

    def node(self, operator: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Adds a node with one output, which has the node's name."""
        self._model.graph.node.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def linear(self, x: str, weight: NDArray[np.float32], bias: NDArray[np.float32], name: str) -> str:
        """Linear layer: x [B, in] times weight [out, in] plus bias [out]: [B, out]."""
        inputs = [x, self.weight(f"{name}.weight", weight), self.weight(f"{name}.bias", bias)]
        return self.node("Gemm", inputs, name, transB=1)

    def swish(self, x: str, name: str) -> str:
        """Swish: x * sigmoid(x), in the two nodes that onnxruntime fuses into one."""
        return self.node("Mul", [x, self.node("Sigmoid", [x], f"{name}/sigmoid")], name)

    def joined(self, fields: tuple[ObservationField, ...]) -> str:
        """All fields flattened and joined in order: [B, I]."""
        flat = [
            field.name
            if len(field.shape) == 1
            else self.node("Flatten", [field.name], f"observation/{field.name}/flat", axis=1)
            for field in fields
        ]
        return flat[0] if len(flat) == 1 else self.node("Concat", flat, "observation/joined", axis=1)

    def bounded(self, action: str, space: ActionSpace) -> str:
        """Clips [B, A] to the bounds and gives it the action's shape; the output ``action``.

        Both bounds are float32 numbers, so no rounding can leave them; NaN passes through, for the server to refuse.
        """
        name = action
        for operator, side, absent in (("Min", space.high, np.inf), ("Max", space.low, -np.inf)):
            if side is not None:
                limits = [absent if bound is None else bound for bound in side]
                limit = self.weight(f"action/{operator.lower()}.limit", limits)
                name = self.node(operator, [name, limit], f"action/{operator.lower()}")
        if len(space.shape) != 1:
            shape = self.weight("action/shape.dims", [-1, *space.shape], np.int64)
            name = self.node("Reshape", [name, shape], "action/shape")
        return self.output(name, "action")

    def output(self, tensor: str, name: str) -> str:
        """Gives a tensor an output's name."""
        self._model.graph.node.append(helper.make_node("Identity", [tensor], [name], name=f"output/{name}"))
        return name

    def model(self, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]) -> onnx.ModelProto:
        """The whole graph."""
        self._model.graph.input.extend(inputs)
        self._model.graph.output.extend(outputs)
        return self._model


def tensor_info(name: str, shape: tuple[int, ...], dtype: str = "float32") -> onnx.ValueInfoProto:
    """An input or output with a free batch in front: [B, *shape]."""
    element = TensorProto.INT64 if dtype == "int64" else TensorProto.FLOAT
    return helper.make_tensor_value_info(name, element, [BATCH, *shape])


def build_residual_actor(
    checkpoint: Checkpoint, fields: tuple[ObservationField, ...], space: ActionSpace, outputs: Outputs
) -> onnx.ModelProto:
    """The actor with its normaliser, squashing, unscaling and clipping as one fp32 graph.

    Args:
        checkpoint: Where the weights are.
        fields: The graph's inputs.
        space: The output's shape and bounds, which must be finite.
        outputs: Whether ``noise`` is an input too, and ``mean`` and ``log_std`` are outputs too.

    Raises:
        ExportError: The weights are larger than one ONNX file can be.
        UnreadableSourceError: A tensor holds NaN or infinity.
    """
    actor = checkpoint.record.actor
    weight_bytes = 4 * sum(math.prod(shape) for shape in checkpoint.shapes().values())
    if weight_bytes > MAX_WEIGHT_BYTES:
        raise ExportError(
            f"{checkpoint.actor_file}: {weight_bytes / 2**30:.2f} GiB of weights (depth {actor.depth}, width "
            f"{actor.width}) do not fit into one ONNX file, which protobuf limits to 2 GiB; train a smaller actor"
        )
    tensors = checkpoint.tensors()
    graph = GraphBuilder()

    def take() -> NDArray[np.float32]:
        return next(tensors)[1]

    def layer(x: str, name: str) -> str:
        x = graph.linear(x, take(), take(), f"{name}/linear")
        norm = [x, graph.weight(f"{name}/norm.weight", take()), graph.weight(f"{name}/norm.bias", take())]
        x = graph.node("LayerNormalization", norm, f"{name}/norm", axis=-1, epsilon=actor.layer_norm_eps)
        return graph.swish(x, f"{name}/swish")

    x = graph.joined(fields)
    if checkpoint.has_normalizer:
        x = graph.node("Sub", [x, graph.weight("normalizer.mean", take())], "normalizer/centred")
        x = graph.node("Div", [x, graph.weight("normalizer.std", take())], "normalizer/scaled")
    x = layer(x, "trunk/input")
    for block in range(actor.depth // LAYERS_PER_BLOCK):
        skip = x
        for index in range(LAYERS_PER_BLOCK):
            x = layer(x, f"trunk/blocks.{block}.{index}")
        x = graph.node("Add", [x, skip], f"trunk/blocks.{block}/residual")
    mean = graph.linear(x, take(), take(), "head/mean")
    inputs = [tensor_info(field.name, field.shape, field.dtype) for field in fields]
    results = [tensor_info("action", space.shape)]
    raw = mean
    if outputs == Outputs.DISTRIBUTION:
        log_std = _bounded_log_std(
            graph, graph.linear(x, take(), take(), "head/log_std"), actor.log_std_min, actor.log_std_max
        )
        spread = graph.node("Mul", [graph.node("Exp", [log_std], "sample/std"), "noise"], "sample/spread")
        raw = graph.node("Add", [mean, spread], "sample/raw")
        inputs.append(tensor_info("noise", (actor.action_size,)))
        results += [tensor_info(name, (actor.action_size,)) for name in ("mean", "log_std")]
        graph.output(mean, "mean")
        graph.output(log_std, "log_std")
    graph.bounded(_unscaled(graph, graph.node("Tanh", [raw], "action/squashed"), space), space)
    return graph.model(inputs, results)


def _bounded_log_std(graph: GraphBuilder, raw: str, low: float, high: float) -> str:
    """Squashed: low + (high - low) / 2 * (tanh(raw) + 1)."""
    half = graph.weight("head/log_std.half_range", (high - low) / 2)
    centre = graph.weight("head/log_std.centre", (high + low) / 2)
    scaled = graph.node("Mul", [graph.node("Tanh", [raw], "head/log_std/tanh"), half], "head/log_std/scaled")
    return graph.node("Add", [scaled, centre], "head/log_std/bounded")


def _unscaled(graph: GraphBuilder, squashed: str, space: ActionSpace) -> str:
    """From [-1, 1] to the bounds; no node where they are the same."""
    low, high = (np.array(side, np.float64) for side in (space.low, space.high))
    half, centre = (high - low) / 2, (high + low) / 2
    name = squashed
    if (half != 1).any():
        name = graph.node("Mul", [name, graph.weight("action/half_range", half)], "action/scaled")
    if (centre != 0).any():
        name = graph.node("Add", [name, graph.weight("action/centre", centre)], "action/shifted")
    return name
