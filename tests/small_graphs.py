"""Small policy graphs for tests: a linear layer, LayerNorm and swish repeated, with weights of a realistic size."""

import numpy as np
import onnx

from policy_server.export.graph import GraphBuilder, tensor_info


def make_graph(
    *,
    depth: int = 6,
    width: int = 32,
    inputs: int = 13,
    outputs: int = 4,
    seed: int = 0,
    outlier_layer: int | None = None,
) -> onnx.ModelProto:
    """A plain chain; ``outlier_layer`` gets one weight so large that 8 bits leave nothing of the row's others."""
    rng = np.random.default_rng(seed)
    graph = GraphBuilder()

    def weights(rows: int, columns: int, outlier: bool = False) -> np.ndarray:
        bound = 1 / np.sqrt(columns)
        values = rng.uniform(-bound, bound, (rows, columns)).astype(np.float32)
        if outlier:
            values[:, 0] = 200 * bound
        return values

    x = "observation"
    for layer in range(depth):
        matrix = weights(width, inputs if layer == 0 else width, outlier=layer == outlier_layer)
        x = graph.linear(x, matrix, rng.normal(0, 0.1, width).astype(np.float32), f"layer{layer}/linear")
        gain, shift = rng.normal(1, 0.1, width), rng.normal(0, 0.1, width)
        norm = [x, graph.weight(f"layer{layer}/gain", gain), graph.weight(f"layer{layer}/shift", shift)]
        x = graph.node("LayerNormalization", norm, f"layer{layer}/norm", axis=-1, epsilon=1e-6)
        x = graph.swish(x, f"layer{layer}/swish")
    x = graph.linear(x, weights(outputs, width), np.zeros(outputs, np.float32), "head/mean")
    graph.output(graph.node("Tanh", [x], "action/squashed"), "action")
    return graph.model([tensor_info("observation", (inputs,))], [tensor_info("action", (outputs,))])


def make_observations(num: int, inputs: int = 13, seed: int = 1) -> dict[str, np.ndarray]:
    return {"observation": np.random.default_rng(seed).standard_normal((num, inputs)).astype(np.float32)}
