"""Two tensor-parallel or pipeline-parallel ranks: the heads, and their gates, are divided rightly.

The ranks' processes are made as vLLM makes them in one case of each kind, and by a fork in the others.
"""

from pathlib import Path

import pytest
import torch
from checkpoint_factory import make_official, reference_logits
from tiny_models import tiny_model
from vllm_engine import EngineProcess, assert_right

TENSOR_PARALLEL_CASES = {
    "group-divided-biases": {"num_key_value_heads": 1, "attention_bias": True},
    "shared-gate-of-one-kv-head": {
        "num_key_value_heads": 1, "gate_position": "G2", "gate_sharing": "shared", "gate_granularity": "elementwise",
    },
    "top-k-separate": {"gate_packing": "separate", "gate_top_k_share": 0.3, "gate_granularity": "elementwise"},
    "moe-per-head": {"moe": True, "gate_packing": "per_head"},
}  # fmt: skip


def reference(model: torch.nn.Module):
    @torch.no_grad()
    def log_probabilities(tokens: list[int]) -> torch.Tensor:
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)

    return log_probabilities


@pytest.mark.parametrize("options", TENSOR_PARALLEL_CASES.values(), ids=TENSOR_PARALLEL_CASES.keys())
def test_tensor_parallel(parallel_engine: EngineProcess, tmp_path: Path, options) -> None:
    model = tiny_model(**options)
    model.save_pretrained(tmp_path)
    assert_right(parallel_engine.generate(tmp_path, tensor_parallel_size=2, forks_workers=True), reference(model))


def test_tensor_parallel_official_elementwise(parallel_engine: EngineProcess, tmp_path: Path) -> None:
    folder = make_official(tmp_path, gate="elementwise")
    generated = parallel_engine.generate(folder, tensor_parallel_size=2)
    assert_right(generated, lambda tokens: reference_logits(folder, tokens).log_softmax(-1))


def test_tensor_parallel_lora_on_a_divided_group(parallel_engine: EngineProcess, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_model(num_key_value_heads=1)
    model.save_pretrained(tmp_path / "model")
    config = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = get_peft_model(model, config).eval()
    adapted.save_pretrained(str(tmp_path / "adapter"))
    generated = parallel_engine.generate(
        tmp_path / "model", num_logprobs=None, adapters=[tmp_path / "adapter"], enable_lora=True, max_lora_rank=8,
        tensor_parallel_size=2, forks_workers=True,
    )  # fmt: skip
    assert_right(generated, reference(adapted))
    with adapted.disable_adapter():
        base = reference(adapted)([1, 5, 6, 7])[-1]
    assert not torch.allclose(base, reference(adapted)([1, 5, 6, 7])[-1], atol=0.1)


def test_pipeline_parallel(parallel_engine: EngineProcess, tmp_path: Path) -> None:
    folder = make_official(tmp_path, layers=3, tied=True)
    # vLLM makes the buffers between pipeline ranks while it compiles; on the CPU, eager mode has none.
    generated = parallel_engine.generate(folder, pipeline_parallel_size=2, enforce_eager=False)
    assert_right(generated, lambda tokens: reference_logits(folder, tokens).log_softmax(-1))
