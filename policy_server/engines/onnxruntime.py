"""onnxruntime on the CPU, tuned for the small batches of control loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import onnxruntime  # pyright: ignore[reportMissingTypeStubs]

from policy_server.engines.base import Array, EngineError, TensorInfo
from policy_server.settings import EngineSettings

# onnxruntime ships no types; what is used of it is typed where it enters.
_runtime = cast("Any", onnxruntime)
_runtime.disable_telemetry_events()  # a server says nothing to anybody that it was not told to
_DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(bool)": "bool",
}


class OnnxRuntimeEngine:
    """Runs the graph on the calling thread, with as many helpers as the settings say.

    Threads of the pool do not spin: other policies, other workers and the event loop share the cores.
    """

    def __init__(self, model: bytes, settings: EngineSettings, *, max_batch: int) -> None:
        options = session_options(settings)
        self.max_batch = max_batch
        self._session: Any = open_session(model, options, [("CPUExecutionProvider", {})])
        self.inputs = describe_tensors(self._session.get_inputs())
        self.outputs = describe_tensors(self._session.get_outputs())
        self._output_names = [tensor.name for tensor in self.outputs]
        self._run_options = _runtime.RunOptions()

    def run(self, inputs: Mapping[str, Array], /) -> dict[str, Array]:
        """See ``Engine``."""
        try:
            values = cast("list[Array]", self._session.run(self._output_names, inputs, self._run_options))
        except Exception as error:  # onnxruntime raises a class of its own for every kind of fault
            raise EngineError(first_line(error)) from error
        return dict(zip(self._output_names, values, strict=True))

    def stop_run(self) -> None:
        """See ``Engine``."""
        self._run_options.terminate = True

    def close(self) -> None:
        """See ``Engine``."""
        self._session = None


def session_options(settings: EngineSettings) -> Any:
    """Options that all of onnxruntime's engines share."""
    options = _runtime.SessionOptions()
    options.intra_op_num_threads = settings.intra_op_threads
    options.inter_op_num_threads = 1
    options.execution_mode = _runtime.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = _runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3  # errors; they come as exceptions too
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def open_session(model: bytes, options: Any, providers: Sequence[tuple[str, Mapping[str, str]]]) -> Any:
    """A session over a file's bytes, run by the first of the providers and by no other in its place.

    Raises:
        EngineError: onnxruntime does not take the model, or fell back to another provider.
    """
    try:
        session = _runtime.InferenceSession(model, options, providers=list(providers), enable_fallback=0)
    except Exception as error:  # onnxruntime raises a class of its own for every kind of fault
        raise EngineError(f"onnxruntime does not load it: {first_line(error)}") from error
    wanted, used = providers[0][0], session.get_providers()[0]
    if used != wanted:  # it goes on with the CPU when a library of CUDA's or TensorRT's is missing
        raise EngineError(
            f"onnxruntime fell back from {wanted} to {used}: libraries of CUDA, cuDNN or TensorRT do not load; install "
            "those that this onnxruntime-gpu was built for, or choose engine=onnxruntime"
        )
    return session


def describe_tensors(tensors: Sequence[Any]) -> tuple[TensorInfo, ...]:
    """What a session says of its inputs or outputs."""
    described: list[TensorInfo] = []
    for tensor in tensors:
        shape = [size if isinstance(size, int) else None for size in tensor.shape]
        described.append(
            TensorInfo(
                name=str(tensor.name),
                dtype=_DTYPES.get(str(tensor.type), str(tensor.type)),
                shape=tuple(shape[1:]),
                dynamic_batch=bool(shape) and shape[0] is None,
            )
        )
    return tuple(described)


def first_line(error: BaseException) -> str:
    """An exception's text without the source lines that onnxruntime adds."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:500]
