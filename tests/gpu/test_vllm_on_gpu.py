"""The plugin on vLLM's CUDA build: the answers are the reference's there too."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_factory import make_official, reference_logits
from tiny_models import VARIANTS, tiny_model
from vllm_engine import EngineProcess, assert_right


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    process = EngineProcess(tmp_path_factory.mktemp("engine") / "log")
    yield process
    process.close()


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
@pytest.mark.parametrize("gate", ["headwise", "elementwise"])
def test_official_checkpoint_is_served_right(engine: EngineProcess, tmp_path: Path, gate: str, eager: bool) -> None:
    folder = make_official(tmp_path, gate=gate, head_dim=64)
    generated = engine.generate(folder, enforce_eager=eager, gpu_memory_utilization=0.2)
    assert_right(generated, lambda tokens: reference_logits(folder, tokens).log_softmax(-1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_is_served_right(engine: EngineProcess, tmp_path: Path, variant: str) -> None:
    model = tiny_model(**({"head_dim": 64} | VARIANTS[variant]))
    model.save_pretrained(tmp_path)

    @torch.no_grad()
    def log_probabilities(tokens: list[int]) -> torch.Tensor:
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)

    assert_right(engine.generate(tmp_path, enforce_eager=True, gpu_memory_utilization=0.2), log_probabilities)
