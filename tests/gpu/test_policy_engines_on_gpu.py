"""The policy server's GPU engines on a real GPU, compared with onnxruntime on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from small_graphs import make_graph, make_observations

from policy_server.engines import open_engine
from policy_server.engines.opening import PROVIDERS
from policy_server.settings import EngineSettings

pytestmark = pytest.mark.gpu
TOLERANCES = {"cuda": 2e-3, "tensorrt": 1e-2}  # TF32, and fp16


@pytest.mark.parametrize("name", list(TOLERANCES))
def test_batches_of_every_size_agree_with_the_cpu(name: str) -> None:
    if PROVIDERS[name] not in onnxruntime.get_available_providers():
        pytest.skip(f"this onnxruntime has no {PROVIDERS[name]} (extra policy-gpu)")
    model = make_graph().SerializeToString()
    on_cpu = open_engine(model, EngineSettings(), max_batch=20)
    on_gpu = open_engine(model, EngineSettings(engine=name, batch_buckets=(1, 4, 16)), max_batch=20)  # pyright: ignore
    for rows in (1, 3, 4, 5, 20, 1, 16):
        observations = make_observations(rows, seed=rows)
        expected = on_cpu.run(observations)["action"]
        np.testing.assert_allclose(on_gpu.run(observations)["action"], expected, atol=TOLERANCES[name])
    on_gpu.close()


@pytest.mark.parametrize("name", list(TOLERANCES))
def test_versions_with_the_same_graph_keep_their_weights(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if PROVIDERS[name] not in onnxruntime.get_available_providers():
        pytest.skip(f"this onnxruntime has no {PROVIDERS[name]} (extra policy-gpu)")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # empty, so that the first version's engine is built here
    observations = make_observations(4)
    for seed in (1, 2, 1):
        model = make_graph(seed=seed).SerializeToString()
        expected = open_engine(model, EngineSettings(), max_batch=4).run(observations)["action"]
        on_gpu = open_engine(model, EngineSettings(engine=name), max_batch=4)  # pyright: ignore
        np.testing.assert_allclose(on_gpu.run(observations)["action"], expected, atol=TOLERANCES[name])
        on_gpu.close()
