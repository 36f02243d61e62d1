"""What can be said of the GPU engines without a GPU: no silent way back to the CPU, and whose engine is whose."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import onnxruntime
import pytest
from small_graphs import make_graph

from policy_server.engines.base import EngineError, TensorInfo
from policy_server.engines.gpu import CudaEngine, TensorRTEngine, buckets_for, engine_cache, tensorrt_options
from policy_server.settings import EngineSettings


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gated-serving" / "tensorrt"


@pytest.mark.parametrize("engine", [CudaEngine, TensorRTEngine])
def test_an_engine_does_not_run_on_the_cpu_in_its_place(
    engine: type[CudaEngine | TensorRTEngine], cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime is the GPU build")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnxruntime's own, about a provider that it does not have
        with pytest.raises(EngineError, match=r"fell back from \w+ to CPUExecutionProvider"):
            engine(make_graph().SerializeToString(), EngineSettings(), max_batch=4)
    assert "Falling back" not in capfd.readouterr().out


def test_versions_with_the_same_graph_have_engines_of_their_own(cache: Path) -> None:
    first, second = (make_graph(seed=seed).SerializeToString() for seed in (1, 2))
    assert engine_cache(first) != engine_cache(second)
    assert engine_cache(first) == engine_cache(first)
    assert engine_cache(first).parent == cache
    assert engine_cache(first).stat().st_mode & 0o777 == 0o700


def test_a_cache_that_cannot_be_made_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(file))
    with pytest.raises(EngineError, match="set XDG_CACHE_HOME"):
        engine_cache(b"model")


def test_every_input_has_its_shapes_and_timings_are_shared(tmp_path: Path) -> None:
    inputs = (
        TensorInfo(name="observation", dtype="float32", shape=(10,), dynamic_batch=True),
        TensorInfo(name="image", dtype="float32", shape=(3, 8), dynamic_batch=True),
    )
    options = tensorrt_options(inputs, 16, tmp_path / "model")
    assert options["trt_profile_min_shapes"] == "observation:1x10,image:1x3x8"
    assert options["trt_profile_opt_shapes"] == options["trt_profile_max_shapes"] == "observation:16x10,image:16x3x8"
    assert options["trt_engine_cache_path"] == str(tmp_path / "model")
    assert options["trt_timing_cache_path"] == str(tmp_path)


def test_buckets_end_with_the_largest_batch() -> None:
    assert buckets_for((1, 4, 16, 64), 20) == (1, 4, 16, 20)
    assert buckets_for((64,), 20) == (20,)
