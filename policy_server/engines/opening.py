"""Chooses the engine that was asked for, and says what is missing where it cannot be."""

from __future__ import annotations

from importlib.util import find_spec
from typing import cast

from policy_server.engines.base import Engine
from policy_server.errors import StartError
from policy_server.settings import EngineSettings

PROVIDERS = {
    "onnxruntime": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}


def check_engine(name: str) -> None:
    """Whether this machine can run that engine.

    Raises:
        StartError: It cannot; the message says what to install.
    """
    extra = "policy" if name == "onnxruntime" else "policy-gpu"
    if find_spec("onnxruntime") is None:
        raise StartError(
            f"engine={name!r}: onnxruntime is not installed: pip install 'gated-serving[{extra}]'", exit_code=3
        )
    import onnxruntime  # pyright: ignore[reportMissingTypeStubs]

    available = cast("list[str]", onnxruntime.get_available_providers())  # pyright: ignore[reportUnknownMemberType]
    if PROVIDERS[name] not in available:
        raise StartError(
            f"engine={name!r}: this onnxruntime has no {PROVIDERS[name]} (it has {', '.join(available)}); in an "
            "environment without onnxruntime: pip install 'gated-serving[policy-gpu]'",
            exit_code=3,
        )
    if name != "onnxruntime":
        from policy_server.gpu import NoGpuError, find_gpu

        try:
            find_gpu()
        except NoGpuError as error:
            raise StartError(f"engine={name!r}: {error}", exit_code=3) from None


def open_engine(model: bytes, settings: EngineSettings, *, max_batch: int) -> Engine:
    """Opens an ONNX model given as the bytes of its file.

    Args:
        model: The file's content; a file on disk could be changed between check and use, and could draw in others.
        settings: Which engine, and how.
        max_batch: Rows of its largest run.

    Raises:
        EngineError: The model cannot be opened.
        StartError: The engine is not there on this machine.
    """
    check_engine(settings.engine)
    if settings.engine == "onnxruntime":
        from policy_server.engines.onnxruntime import OnnxRuntimeEngine

        return OnnxRuntimeEngine(model, settings, max_batch=max_batch)
    from policy_server.engines.gpu import CudaEngine, TensorRTEngine

    engine = CudaEngine if settings.engine == "cuda" else TensorRTEngine
    return engine(model, settings, max_batch=max_batch)
