"""Builds a TensorRT engine from a policy's graph; TensorRT and the GPU are looked for when it is called.

An engine holds kernels that were timed on one GPU: it runs on no other model and with no other TensorRT version, so
both are recorded beside it. ``policy.onnx`` stays the portable form.

Networks are strongly typed, the only kind TensorRT 11 has (10.x takes a flag): every layer runs in the type written in
the graph. For fp16 the graph is therefore rewritten first: linear layers in half precision, LayerNorm, activations and
the residual sum in fp32.

Legend: B batch.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import onnx
import onnxruntime  # pyright: ignore[reportMissingTypeStubs]

from policy_server.export.errors import ExportError
from policy_server.export.precision import to_half_compute
from policy_server.export.tensorrt_profile import BatchProfile, input_shapes, provider_options, refuse_int8
from policy_server.export.verify import Session
from policy_server.gpu import Gpu, NoGpuError, find_gpu
from policy_server.manifest import Precision

logger = logging.getLogger(__name__)

ENGINE_FILE = "policy.plan"
PROVIDER = "TensorrtExecutionProvider"
WORKSPACE_BYTES = 1 << 30
INSTALL = "pip install 'gated-serving[policy-gpu]' brings it"

_OLDEST_MAJOR = 10


class TensorRTUnavailableError(ExportError):
    """TensorRT, its provider in onnxruntime or a GPU is missing; the message says which and what to install."""


def check_available(precision: Precision) -> tuple[Any, Gpu]:
    """Finds out before any work whether an engine can be built here.

    Returns:
        The module ``tensorrt``, and the GPU.

    Raises:
        TensorRTUnavailableError: TensorRT or a GPU is missing.
        ExportError: int8 is asked for.
    """
    refuse_int8(precision)
    return load_tensorrt(), require_gpu()


def build(
    model: onnx.ModelProto,
    folder: Path,
    *,
    precision: Precision,
    profile: BatchProfile | None = None,
    timing_cache: Path | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> dict[str, Any]:
    """Builds the engine and writes ``policy.plan``.

    Args:
        model: The fp32 graph.
        folder: Where the engine goes.
        precision: fp32, or fp16 with LayerNorm in fp32.
        profile: Which batches it takes.
        timing_cache: File with kernel timings of earlier builds, read and written; one for this GPU and version below
            the user's cache folder if None. With it a second build takes seconds.
        workspace_bytes: GPU memory a kernel may use while it runs.

    Returns:
        What is to be said of the engine: GPU, version, batches, input shapes, layers in half precision.

    Raises:
        TensorRTUnavailableError: TensorRT or a GPU is missing.
        ExportError: TensorRT cannot build the graph, or int8 is asked for.
    """
    chosen = profile or BatchProfile()
    shapes = input_shapes(model)
    trt, gpu = check_available(precision)
    half_layers: list[str] = []
    if precision == Precision.FP16:
        model, half_layers = to_half_compute(model)
    trt_logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(trt_logger)
    network = builder.create_network(_network_flags(trt))
    _parse(trt, network, trt_logger, model)
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_bytes)
    optimization = builder.create_optimization_profile()
    for name, shape in shapes.items():
        optimization.set_shape(name, *chosen.of(shape))
    config.add_optimization_profile(optimization)
    cache_file = timing_cache or default_timing_cache(gpu, str(trt.__version__))
    _use_timings(config, cache_file)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ExportError("TensorRT could not build an engine; its own messages above say why")
    _keep_timings(config, cache_file)
    try:
        (folder / ENGINE_FILE).write_bytes(bytes(plan))
    except OSError as error:
        raise ExportError(f"{folder / ENGINE_FILE}: cannot be written ({error.strerror})") from error
    return {
        "file": ENGINE_FILE,
        "gpu": gpu.name,
        "compute_capability": list(gpu.compute_capability),
        "tensorrt_version": str(trt.__version__),
        "precision": str(precision),
        "batch": {"smallest": chosen.smallest, "usual": chosen.usual, "largest": chosen.largest},
        "inputs": {name: list(shape) for name, shape in shapes.items()},
        "num_half_precision_layers": len(half_layers),
    }


def check_portable(record: Mapping[str, Any]) -> None:
    """Compares what ``build`` said of an engine with this machine.

    Args:
        record: What ``build`` returned.

    Raises:
        TensorRTUnavailableError: TensorRT or a GPU is missing.
        ExportError: The engine is for another GPU model or TensorRT version.
    """
    version, gpu = str(load_tensorrt().__version__), require_gpu()
    for field, here in (("gpu", gpu.name), ("tensorrt_version", version)):
        if record.get(field) != here:
            raise ExportError(
                f"{ENGINE_FILE}: {field}={record.get(field)!r}, here it is {here!r}; engines are not portable, export "
                "the policy again on this machine"
            )


def open_provider_session(
    path: Path,
    cache: Path,
    *,
    precision: Precision = Precision.FP32,
    profile: BatchProfile | None = None,
    device_id: int = 0,
) -> Session:
    """Opens ``policy.onnx`` in onnxruntime's TensorRT provider.

    Args:
        path: The file.
        cache: Folder for engines and timings.
        precision: fp32, or fp16 with LayerNorm in fp32.
        profile: Which batches it takes.
        device_id: Which GPU.

    Raises:
        TensorRTUnavailableError: The provider is missing, or onnxruntime fell back to another one.
    """
    refuse_int8(precision)
    runtime = cast("Any", onnxruntime)
    if PROVIDER not in runtime.get_available_providers():
        raise TensorRTUnavailableError(
            f"onnxruntime {runtime.__version__} here has no {PROVIDER}: replace the package onnxruntime by "
            f"onnxruntime-gpu ({INSTALL}) and install TensorRT"
        )
    require_gpu()
    shapes = input_shapes(cast("Any", onnx).load(path, load_external_data=False))
    options = provider_options(shapes, cache, profile=profile, precision=precision, device_id=device_id)
    cache.mkdir(parents=True, exist_ok=True)
    try:
        session = runtime.InferenceSession(str(path), providers=[(PROVIDER, options)])
    except Exception as error:  # onnxruntime raises a class of its own for every kind of fault
        raise TensorRTUnavailableError(f"onnxruntime's {PROVIDER} refuses {path}: {error}") from error
    if (used := session.get_providers()[0]) != PROVIDER:
        raise TensorRTUnavailableError(
            f"onnxruntime fell back from {PROVIDER} to {used}: TensorRT's or CUDA's libraries do not load; {INSTALL}"
        )
    return session


def default_timing_cache(gpu: Gpu, version: str) -> Path:
    """A file of its own for each GPU model and TensorRT version, below the user's cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{gpu.name}-{version}")
    return base / "gated-serving" / "tensorrt" / f"{name}.timing"


def load_tensorrt() -> Any:
    """The module ``tensorrt``.

    Raises:
        TensorRTUnavailableError: It is missing or too old.
    """
    try:
        trt = cast("Any", importlib.import_module("tensorrt"))
    except ImportError as error:
        raise TensorRTUnavailableError(
            f"TensorRT is not installed ({error}); {INSTALL}, or take --engine onnx"
        ) from error
    if int(str(trt.__version__).partition(".")[0]) < _OLDEST_MAJOR:
        raise TensorRTUnavailableError(f"TensorRT {trt.__version__} is too old, {_OLDEST_MAJOR} is needed; {INSTALL}")
    return trt


def require_gpu() -> Gpu:
    """The GPU.

    Raises:
        TensorRTUnavailableError: There is none.
    """
    try:
        return find_gpu()
    except NoGpuError as error:
        raise TensorRTUnavailableError(
            f"TensorRT needs an NVIDIA GPU, as it times kernels on it: {error}; or take --engine onnx"
        ) from error


def _network_flags(trt: Any) -> int:
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _parse(trt: Any, network: Any, trt_logger: Any, model: onnx.ModelProto) -> None:
    parser = trt.OnnxParser(network, trt_logger)
    if not parser.parse(model.SerializeToString()):
        errors = "; ".join(str(parser.get_error(index).desc()) for index in range(parser.num_errors))
        raise ExportError(f"TensorRT cannot read the graph: {errors}")


def _use_timings(config: Any, file: Path) -> None:
    try:
        blob = file.read_bytes()
    except FileNotFoundError:
        blob = b""
    except OSError as error:
        logger.warning("%s: the timing cache cannot be read (%s); building without it", file, error)
        blob = b""
    cache = config.create_timing_cache(blob)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        logger.warning("%s: the timing cache is of another GPU or TensorRT version; starting a new one", file)
        config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)


def _keep_timings(config: Any, file: Path) -> None:
    cache = config.get_timing_cache()
    if cache is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(cache.serialize()))
    except OSError as error:
        logger.warning(
            "%s: the timing cache cannot be written (%s); the next build times its kernels again", file, error
        )
