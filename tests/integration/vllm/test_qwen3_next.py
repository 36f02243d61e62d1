"""Qwen3-Next hybrids (gated DeltaNet, gated attention, experts) keep their own format and vLLM's own class."""

from pathlib import Path

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from vllm_engine import PROMPTS, EngineProcess


def make_qwen3_next(folder: Path) -> Qwen3NextForCausalLM:
    """A tiny model with random weights, saved in bfloat16 as vLLM's CPU kernels ask; returned in float32."""
    config = Qwen3NextConfig(
        vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_num_key_heads=2, linear_num_value_heads=2, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64, shared_expert_intermediate_size=64, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                scale = 1.0 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
                parameter.normal_(0, scale)
    model = model.bfloat16().eval()
    model.save_pretrained(folder)
    return model.float()


def test_qwen3_next_is_served_by_vllms_own_class(engine: EngineProcess, tmp_path: Path) -> None:
    model = make_qwen3_next(tmp_path)
    generated = engine.generate(tmp_path, dtype="bfloat16", num_tokens=1)
    assert generated.architecture == "Qwen3NextForCausalLM"
    for index, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        for position, entries in enumerate(generated.prompt_logprobs[index] or []):
            for token, logprob in entries.items():
                assert abs(logprob - expected[position, int(token)].item()) < 0.1
        best, second = expected[-1].topk(2).values.tolist()
        if best - second > 0.1:
            assert generated.tokens[index] == [expected[-1].argmax().item()]
