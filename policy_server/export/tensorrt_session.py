"""Runs a TensorRT engine on arrays, so that it can be compared with its source as every export is.

Legend: B batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from policy_server.export.errors import ExportError
from policy_server.export.tensorrt_engine import TensorRTUnavailableError, load_tensorrt, require_gpu


@dataclass(frozen=True)
class _Tensor:
    name: str


class EngineSession:
    """Runs an engine with arrays in the processor's memory, for comparing it with its source; serving keeps them there.

    Args:
        plan: The engine.

    Raises:
        TensorRTUnavailableError: TensorRT, a GPU, or torch with CUDA is missing.
        ExportError: The engine is for another GPU or version, or damaged.
    """

    def __init__(self, plan: Path) -> None:
        self._trt = load_tensorrt()
        require_gpu()
        self._torch = cast("Any", importlib.import_module("torch"))
        if not self._torch.cuda.is_available():
            raise TensorRTUnavailableError(
                f"torch {self._torch.__version__} is a build without CUDA, which running an engine here needs; install "
                "the CUDA build of torch"
            )
        self._runtime = self._trt.Runtime(self._trt.Logger(self._trt.Logger.WARNING))
        self._engine = self._runtime.deserialize_cuda_engine(plan.read_bytes())
        if self._engine is None:
            raise ExportError(f"{plan}: is no engine for this GPU and TensorRT version; export the policy again here")
        self._context = self._engine.create_execution_context()
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        inputs = {name for name in names if self._engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT}
        self._inputs = [_Tensor(name) for name in names if name in inputs]
        self._outputs = [_Tensor(name) for name in names if name not in inputs]

    def get_inputs(self) -> Sequence[Any]:
        """The inputs, each with a ``name``."""
        return self._inputs

    def get_outputs(self) -> Sequence[Any]:
        """The outputs, each with a ``name``."""
        return self._outputs

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Sequence[Any]:
        """Runs the engine on one batch; see ``verify.Session``."""
        torch = self._torch
        held: dict[str, Any] = {}
        for name, values in input_feed.items():
            held[name] = torch.from_numpy(values).contiguous().cuda()
            self._context.set_input_shape(name, tuple(values.shape))
            self._context.set_tensor_address(name, held[name].data_ptr())
        for one in self._outputs:
            kind = torch.int64 if self._engine.get_tensor_dtype(one.name) == self._trt.int64 else torch.float32
            held[one.name] = torch.empty(tuple(self._context.get_tensor_shape(one.name)), dtype=kind, device="cuda")
            self._context.set_tensor_address(one.name, held[one.name].data_ptr())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        if not self._context.execute_async_v3(stream.cuda_stream):
            raise ExportError("TensorRT could not run the engine; its own messages above say why")
        stream.synchronize()
        wanted = output_names if output_names is not None else [one.name for one in self._outputs]
        return [held[name].cpu().numpy() for name in wanted]
