"""The policy server's GPU engines on a real GPU, compared with onnxruntime on the CPU."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from small_graphs import make_graph, make_observations

from policy_server.engines import open_engine
from policy_server.engines.gpu import buckets_for
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


def test_buckets_end_with_the_largest_batch() -> None:
    assert buckets_for((1, 4, 16, 64), 20) == (1, 4, 16, 20)
    assert buckets_for((64,), 20) == (20,)
