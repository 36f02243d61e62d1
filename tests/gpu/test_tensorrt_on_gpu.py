"""TensorRT engines on a real GPU: built, run and compared with onnxruntime on the CPU."""

import importlib.util
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from small_graphs import make_graph, make_observations

from policy_server.export.errors import ExportError
from policy_server.export.precision.sensitivity import open_session
from policy_server.export.tensorrt_engine import ENGINE_FILE, PROVIDER, build, check_portable, open_provider_session
from policy_server.manifest import Precision

pytestmark = pytest.mark.gpu
needs_tensorrt = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt") is None, reason="TensorRT is not installed (extra policy-gpu)"
)
needs_provider = pytest.mark.skipif(
    PROVIDER not in onnxruntime.get_available_providers(), reason=f"this onnxruntime has no {PROVIDER}"
)
TOLERANCES = {Precision.FP32: 2e-3, Precision.FP16: 1e-2}  # fp32 products may use TF32


@needs_tensorrt
@pytest.mark.parametrize("precision", list(TOLERANCES))
def test_an_engine_agrees_with_the_file_at_several_batches(tmp_path: Path, precision: Precision) -> None:
    from policy_server.export.tensorrt_session import EngineSession

    model = make_graph(depth=16, width=64)
    cache = tmp_path / "timings"
    record = build(model, tmp_path, precision=precision, timing_cache=cache)
    assert cache.stat().st_size > 0
    assert record["num_half_precision_layers"] == (15 if precision == Precision.FP16 else 0)
    check_portable(record)
    engine, plain = EngineSession(tmp_path / ENGINE_FILE), open_session(model)
    for batch in (1, 3, 64):
        observations = make_observations(batch, seed=batch)
        found = engine.run(["action"], observations)[0]
        np.testing.assert_allclose(found, plain.run(None, observations)[0], atol=TOLERANCES[precision])


@needs_tensorrt
def test_a_second_build_takes_the_timings_of_the_first(tmp_path: Path) -> None:
    cache = tmp_path / "timings"
    for _ in range(2):
        build(make_graph(), tmp_path, precision=Precision.FP32, timing_cache=cache)
    assert (tmp_path / ENGINE_FILE).stat().st_size > 0


@needs_tensorrt
def test_a_damaged_engine_is_refused(tmp_path: Path) -> None:
    from policy_server.export.tensorrt_session import EngineSession

    (tmp_path / ENGINE_FILE).write_bytes(b"no engine")
    with pytest.raises(ExportError, match="is no engine for this GPU"):
        EngineSession(tmp_path / ENGINE_FILE)


@needs_provider
@pytest.mark.parametrize("precision", list(TOLERANCES))
def test_the_provider_agrees_with_the_processor(tmp_path: Path, precision: Precision) -> None:
    model = make_graph(depth=16, width=64)
    path = tmp_path / "policy.onnx"
    path.write_bytes(model.SerializeToString())
    session = open_provider_session(path, tmp_path / "cache", precision=precision)
    for batch in (1, 3, 64):
        observations = make_observations(batch, seed=batch)
        expected = open_session(model).run(None, observations)[0]
        np.testing.assert_allclose(session.run(["action"], observations)[0], expected, atol=TOLERANCES[precision])
    assert list((tmp_path / "cache").iterdir())
