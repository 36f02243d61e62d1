"""onnxruntime on an NVIDIA GPU: CUDA with graphs over batch sizes, or TensorRT.

Written against onnxruntime's documentation; a machine with a GPU has yet to run it (tests/gpu).

Legend: B batch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime  # pyright: ignore[reportMissingTypeStubs]

from policy_server.engines.base import Array, EngineError, TensorInfo
from policy_server.engines.onnxruntime import describe_tensors, first_line, open_session, session_options
from policy_server.settings import EngineSettings

_runtime = cast("Any", onnxruntime)
_DEVICE = "cuda"


class CudaEngine:
    """CUDA with a captured graph for each batch size of ``batch_buckets``.

    Launching a kernel costs the host more than a small layer costs the GPU, so the launches are captured once and
    replayed. A graph has fixed shapes and addresses: every bucket keeps its own input and output memory on the device,
    bound once, and a batch is padded to the next bucket by repeating its last row.
    """

    def __init__(self, model: bytes, settings: EngineSettings, *, max_batch: int) -> None:
        self.max_batch = max_batch
        options = session_options(settings)
        provider = ("CUDAExecutionProvider", {"enable_cuda_graph": "1", "cudnn_conv_algo_search": "HEURISTIC"})
        self._session: Any = open_session(model, options, [provider])
        self.inputs = describe_tensors(self._session.get_inputs())
        self.outputs = describe_tensors(self._session.get_outputs())
        self._buckets = buckets_for(settings.batch_buckets, max_batch)
        self._bound: dict[int, _Bucket] = {}

    def run(self, inputs: Mapping[str, Array], /) -> dict[str, Array]:
        """See ``Engine``."""
        rows = len(next(iter(inputs.values())))
        size = next(bucket for bucket in self._buckets if bucket >= rows)
        try:
            bucket = self._bound.get(size)
            if bucket is None:
                bucket = self._bound[size] = _Bucket(self._session, self.inputs, self.outputs, size)
            return bucket.run(inputs, rows)
        except Exception as error:  # onnxruntime raises a class of its own for every kind of fault
            raise EngineError(first_line(error)) from error

    def stop_run(self) -> None:
        """A captured graph cannot be stopped; it has no loops that could run for ever."""

    def close(self) -> None:
        """See ``Engine``."""
        self._bound.clear()
        self._session = None


class _Bucket:
    """Memory on the device and its binding for one batch size; the graph of that size is captured at its first run."""

    def __init__(
        self, session: Any, inputs: tuple[TensorInfo, ...], outputs: tuple[TensorInfo, ...], size: int
    ) -> None:
        self._session = session
        self._size = size
        self._binding = session.io_binding()
        self._staging = {tensor.name: _zeros(tensor, size) for tensor in inputs}
        self._on_device = {name: _to_device(values) for name, values in self._staging.items()}
        for name, value in self._on_device.items():
            self._binding.bind_ortvalue_input(name, value)
        self._results = {tensor.name: _to_device(_zeros(tensor, size)) for tensor in outputs}
        for name, value in self._results.items():
            self._binding.bind_ortvalue_output(name, value)
        self._options = _runtime.RunOptions()
        self._options.add_run_config_entry("gpu_graph_id", str(size))

    def run(self, inputs: Mapping[str, Array], rows: int) -> dict[str, Array]:
        for name, values in inputs.items():
            staging = self._staging[name]
            staging[:rows] = values
            staging[rows:] = values[-1]  # padding that is a real row cannot raise what a real row does not
            self._on_device[name].update_inplace(staging)
        self._session.run_with_iobinding(self._binding, self._options)
        return {name: value.numpy()[:rows] for name, value in self._results.items()}


class TensorRTEngine:
    """onnxruntime's TensorRT provider: fp16 with LayerNorm in fp32, engines and timings kept between starts."""

    def __init__(self, model: bytes, settings: EngineSettings, *, max_batch: int) -> None:
        self.max_batch = max_batch
        options = session_options(settings)
        described = describe_tensors(
            open_session(model, session_options(settings), [("CPUExecutionProvider", {})]).get_inputs()
        )
        provider = ("TensorrtExecutionProvider", tensorrt_options(described, max_batch, engine_cache(model)))
        self._session: Any = open_session(model, options, [provider, ("CUDAExecutionProvider", {})])
        self.inputs = describe_tensors(self._session.get_inputs())
        self.outputs = describe_tensors(self._session.get_outputs())
        self._names = [tensor.name for tensor in self.outputs]

    def run(self, inputs: Mapping[str, Array], /) -> dict[str, Array]:
        """See ``Engine``."""
        try:
            values = self._session.run(self._names, dict(inputs))
        except Exception as error:  # onnxruntime raises a class of its own for every kind of fault
            raise EngineError(first_line(error)) from error
        return dict(zip(self._names, values, strict=True))

    def stop_run(self) -> None:
        """A TensorRT engine cannot be stopped."""

    def close(self) -> None:
        """See ``Engine``."""
        self._session = None


def engine_cache(model: bytes) -> Path:
    """The folder for one model's engines, made if it is not there: below the user's own, who alone may write to it.

    The provider names an engine by the graph's structure and not by its weights, so that two versions of a policy would
    share one; hence a folder for each model. Timings do not depend on weights and lie one level above.

    Raises:
        EngineError: It cannot be made.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gated-serving" / "tensorrt"
    folder = base / hashlib.sha256(model).hexdigest()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EngineError(f"{folder}: engines cannot be kept there ({error.strerror}); set XDG_CACHE_HOME") from error
    return folder


def tensorrt_options(inputs: tuple[TensorInfo, ...], max_batch: int, cache: Path) -> dict[str, str]:
    """The provider's options: one profile from one row to a full batch, best at a full one.

    Args:
        inputs: The graph's.
        max_batch: Rows of a full batch.
        cache: Folder for this model's engines.
    """

    def profile(batch: int) -> str:
        return ",".join(
            f"{tensor.name}:{'x'.join(str(size) for size in (batch, *(size or 1 for size in tensor.shape)))}"
            for tensor in inputs
        )

    return {
        "trt_fp16_enable": "1",
        "trt_layer_norm_fp32_fallback": "1",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(cache),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(cache.parent),
        "trt_profile_min_shapes": profile(1),
        "trt_profile_opt_shapes": profile(max_batch),
        "trt_profile_max_shapes": profile(max_batch),
    }


def buckets_for(sizes: tuple[int, ...], max_batch: int) -> tuple[int, ...]:
    """Batch sizes to prepare: those below the largest batch, and it."""
    return (*(size for size in sizes if size < max_batch), max_batch)


def _zeros(tensor: TensorInfo, batch: int) -> Array:
    return np.zeros((batch, *(size or 1 for size in tensor.shape)), tensor.dtype)


def _to_device(values: Array) -> Any:
    return _runtime.OrtValue.ortvalue_from_numpy(values, _DEVICE, 0)
