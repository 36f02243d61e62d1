"""Every gate variant in the project's own format, compared with the transformers model."""

from pathlib import Path

import pytest
import torch
from tiny_models import VARIANTS, tiny_model
from vllm_engine import EngineProcess, assert_right

from gated_serving.llm.models import GatedQwen3ForCausalLM, GatedQwen3MoeForCausalLM

MOE_VARIANTS = ("elementwise", "per_head_packing", "g5", "biases")


def reference(model: GatedQwen3ForCausalLM | GatedQwen3MoeForCausalLM):
    @torch.no_grad()
    def log_probabilities(tokens: list[int]) -> torch.Tensor:
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)

    return log_probabilities


@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_variant_is_served_right(engine: EngineProcess, tmp_path: Path, variant: str) -> None:
    model = tiny_model(**VARIANTS[variant])
    model.save_pretrained(tmp_path)
    generated = engine.generate(tmp_path)
    assert generated.architecture == "GatedQwen3ForCausalLM"
    assert_right(generated, reference(model))


@pytest.mark.parametrize("variant", MOE_VARIANTS)
def test_moe_variant_is_served_right(engine: EngineProcess, tmp_path: Path, variant: str) -> None:
    model = tiny_model(moe=True, **VARIANTS[variant])
    model.save_pretrained(tmp_path)
    generated = engine.generate(tmp_path)
    assert generated.architecture == "GatedQwen3MoeForCausalLM"
    assert_right(generated, reference(model))


def test_moe_with_dense_layers_among_the_experts_is_served_right(engine: EngineProcess, tmp_path: Path) -> None:
    mixed, pure = tiny_model(moe=True, mlp_only_layers=[0], gate_position="G2"), tiny_model(moe=True)
    mixed.save_pretrained(tmp_path / "mixed")
    pure.save_pretrained(tmp_path / "pure")
    generated = engine.generate(tmp_path / "mixed")
    assert_right(generated, reference(mixed))
    assert set(generated.packed_modules) == {"qkv_proj", "gate_up_proj"}
    # The one model's packing is its own: another in the same process has no dense layers.
    generated = engine.generate(tmp_path / "pure")
    assert_right(generated, reference(pure))
    assert set(generated.packed_modules) == {"qkv_proj"}


def test_sliding_window_is_kept(engine: EngineProcess, tmp_path: Path) -> None:
    model = tiny_model(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    model.save_pretrained(tmp_path)
    assert model.config.layer_types == ["sliding_attention"] * model.config.num_hidden_layers
    assert_right(engine.generate(tmp_path), reference(model))
