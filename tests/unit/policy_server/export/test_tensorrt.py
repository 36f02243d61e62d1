import importlib.util
from pathlib import Path

import onnx
import pytest
from small_graphs import make_graph

from policy_server.export import tensorrt_engine
from policy_server.export.errors import ExportError
from policy_server.export.graph import GraphBuilder, tensor_info
from policy_server.export.tensorrt_engine import (
    PROVIDER,
    TensorRTUnavailableError,
    build,
    check_portable,
    default_timing_cache,
    open_provider_session,
)
from policy_server.export.tensorrt_profile import BatchProfile, input_shapes, provider_options
from policy_server.gpu import Gpu, NoGpuError, find_gpu
from policy_server.manifest import Precision

HAS_TENSORRT = importlib.util.find_spec("tensorrt") is not None


def two_inputs(inner: str | int = 3) -> onnx.ModelProto:
    graph = GraphBuilder()
    graph.output(graph.node("Concat", ["image", "goal"], "joined", axis=1), "action")
    goal = onnx.helper.make_tensor_value_info("goal", onnx.TensorProto.FLOAT, ["batch", inner])
    return graph.model([tensor_info("image", (2, 3)), goal], [tensor_info("action", (2,))])


def test_every_input_has_all_three_shapes_in_the_options(tmp_path: Path) -> None:
    profile = BatchProfile(smallest=1, usual=16, largest=128)
    options = provider_options(input_shapes(two_inputs()), tmp_path, profile=profile)
    assert options["trt_profile_min_shapes"] == "image:1x2x3,goal:1x3"
    assert options["trt_profile_opt_shapes"] == "image:16x2x3,goal:16x3"
    assert options["trt_profile_max_shapes"] == "image:128x2x3,goal:128x3"
    assert options["trt_engine_cache_path"] == options["trt_timing_cache_path"] == str(tmp_path)
    assert options["trt_engine_cache_enable"] == options["trt_timing_cache_enable"] == "True"
    assert "trt_fp16_enable" not in options


def test_half_precision_comes_with_layer_norm_in_fp32(tmp_path: Path) -> None:
    options = provider_options({"x": (3,)}, tmp_path, precision=Precision.FP16)
    assert (options["trt_fp16_enable"], options["trt_layer_norm_fp32_fallback"]) == ("True", "True")


@pytest.mark.parametrize(("smallest", "usual", "largest"), [(0, 1, 2), (2, 1, 4), (1, 8, 4)])
def test_batches_out_of_order_are_refused(smallest: int, usual: int, largest: int) -> None:
    with pytest.raises(ExportError, match=f"smallest={smallest}, usual={usual}, largest={largest}"):
        BatchProfile(smallest=smallest, usual=usual, largest=largest)


def test_a_free_dimension_besides_the_batch_is_named() -> None:
    with pytest.raises(ExportError, match="input goal: dimension 'horizon' is free"):
        input_shapes(two_inputs("horizon"))


def test_int8_is_refused_before_anything_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"precision=int8.*--precision fp16.*--engine onnx"):
        build(make_graph(), tmp_path, precision=Precision.INT8)
    with pytest.raises(ExportError, match="precision=int8"):
        provider_options({"x": (3,)}, tmp_path, precision=Precision.INT8)
    with pytest.raises(ExportError, match="precision=int8"):
        open_provider_session(tmp_path / "policy.onnx", tmp_path, precision=Precision.INT8)


@pytest.mark.skipif(HAS_TENSORRT, reason="TensorRT is installed here")
def test_without_tensorrt_the_message_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(TensorRTUnavailableError, match=r"TensorRT is not installed.*pip install.*--engine onnx"):
        build(make_graph(), tmp_path, precision=Precision.FP32)
    assert list(tmp_path.iterdir()) == []


def test_without_the_provider_the_message_says_what_to_install(tmp_path: Path) -> None:
    import onnxruntime

    if PROVIDER in onnxruntime.get_available_providers():
        pytest.skip(f"this onnxruntime has {PROVIDER}")
    path = tmp_path / "policy.onnx"
    path.write_bytes(make_graph().SerializeToString())
    with pytest.raises(TensorRTUnavailableError, match=f"has no {PROVIDER}.*onnxruntime-gpu"):
        open_provider_session(path, tmp_path / "cache")


def test_without_a_driver_the_message_says_so() -> None:
    with pytest.raises(NoGpuError, match=r"no NVIDIA driver was found.*install the driver"):
        find_gpu("libcuda-that-is-not-there.so.1")


def test_timings_of_another_gpu_or_version_are_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = {
        default_timing_cache(Gpu(name, (9, 0)), version)
        for name in ("NVIDIA H200", "NVIDIA L4")
        for version in ("10.13.0", "11.4.0")
    }
    assert len(files) == 4
    assert all(file.is_relative_to(tmp_path) and " " not in file.name for file in files)


@pytest.mark.parametrize(("field", "other"), [("gpu", "NVIDIA L4"), ("tensorrt_version", "10.0.1")])
def test_an_engine_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch, field: str, other: str) -> None:
    class Installed:
        __version__ = "11.4.0"

    monkeypatch.setattr(tensorrt_engine, "load_tensorrt", Installed)
    monkeypatch.setattr(tensorrt_engine, "require_gpu", lambda: Gpu("NVIDIA H200", (9, 0)))
    record = {"gpu": "NVIDIA H200", "tensorrt_version": "11.4.0"}
    check_portable(record)
    with pytest.raises(ExportError, match=f"{field}='{other}', here it is.*export the policy again"):
        check_portable(record | {field: other})
