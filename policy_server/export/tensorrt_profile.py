"""Batch sizes that a TensorRT engine is built for, and onnxruntime's options that say the same.

Both ways to TensorRT need the smallest, the usual and the largest shape of every dynamic input beforehand.

Legend: B batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from policy_server.export.errors import ExportError
from policy_server.manifest import Precision

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BatchProfile:
    """Which batches an engine takes, and which it is fastest for.

    Attributes:
        smallest: The smallest batch.
        usual: The batch its kernels are chosen for.
        largest: The largest batch.
    """

    smallest: int = 1
    usual: int = 8
    largest: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.smallest <= self.usual <= self.largest:
            raise ExportError(
                f"batch profile smallest={self.smallest}, usual={self.usual}, largest={self.largest}: each must be at "
                "least 1 and none below the one before it"
            )

    def of(self, shape: Shape) -> tuple[Shape, Shape, Shape]:
        """Smallest, usual and largest shape of an input [B, *shape]."""
        return (self.smallest, *shape), (self.usual, *shape), (self.largest, *shape)


def input_shapes(model: onnx.ModelProto) -> dict[str, Shape]:
    """Shape of each input without its batch.

    Raises:
        ExportError: An input has a free dimension besides the batch.
    """
    constants = {constant.name for constant in model.graph.initializer}
    shapes: dict[str, Shape] = {}
    for one in model.graph.input:
        if one.name in constants:
            continue
        inner = list(one.type.tensor_type.shape.dim)[1:]
        if free := [dim.dim_param or "?" for dim in inner if not dim.dim_value]:
            raise ExportError(
                f"input {one.name}: dimension {free[0]!r} is free; TensorRT gets only the batch free here"
            )
        shapes[one.name] = tuple(dim.dim_value for dim in inner)
    return shapes


def provider_options(
    shapes: Mapping[str, Shape],
    cache: Path,
    *,
    profile: BatchProfile | None = None,
    precision: Precision = Precision.FP32,
    device_id: int = 0,
) -> dict[str, str]:
    """Options of onnxruntime's ``TensorrtExecutionProvider``.

    Engines and kernel timings are kept in ``cache``: a first start takes minutes, the next ones seconds. Both hold for
    one GPU model and one TensorRT version; onnxruntime builds again when they do not fit.

    Args:
        shapes: Each input's shape without the batch.
        cache: The folder for engines and timings.
        profile: Which batches.
        precision: fp16 multiplies in half precision and keeps LayerNorm in fp32.
        device_id: Which GPU.

    Raises:
        ExportError: int8 is asked for: the int8 files are made of an operator that TensorRT does not have.
    """
    refuse_int8(precision)
    named = {name: (profile or BatchProfile()).of(shape) for name, shape in shapes.items()}

    def written(index: int) -> str:
        return ",".join(f"{name}:{'x'.join(map(str, of_input[index]))}" for name, of_input in named.items())

    options = {
        "device_id": str(device_id),
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": str(cache),
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": str(cache),
        "trt_profile_min_shapes": written(0),
        "trt_profile_opt_shapes": written(1),
        "trt_profile_max_shapes": written(2),
    }
    if precision == Precision.FP16:
        options |= {"trt_fp16_enable": "True", "trt_layer_norm_fp32_fallback": "True"}
    return options


def refuse_int8(precision: Precision) -> None:
    """TensorRT runs fp32 and fp16 here.

    Raises:
        ExportError: int8 is asked for.
    """
    if precision == Precision.INT8:
        raise ExportError(
            "precision=int8: its files are made of onnxruntime's MatMulNBits, which TensorRT does not have; take "
            "--precision fp16 for TensorRT, or --engine onnx for int8"
        )
