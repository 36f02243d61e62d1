"""What users of vLLM switch on: the answers stay the reference's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_factory import make_official, reference_logits
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from vllm_engine import PROMPTS, EngineError, EngineProcess, assert_right

LONG_PROMPT = [(7 * step * step + 3) % 500 for step in range(70)]


def official_reference(folder: Path):
    return lambda tokens: reference_logits(folder, tokens).log_softmax(-1)


def model_reference(model: torch.nn.Module):
    @torch.no_grad()
    def log_probabilities(tokens: list[int]) -> torch.Tensor:
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)

    return log_probabilities


@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "uncached"])
def test_prefix_caching(engine: EngineProcess, tmp_path: Path, is_cached: bool) -> None:
    folder = make_official(tmp_path, gate="elementwise")
    prompts = [LONG_PROMPT, [*LONG_PROMPT[:64], 1, 2, 3]]
    generated = engine.generate(
        folder, prompts=prompts, adapters=(None, None), num_logprobs=None, enable_prefix_caching=is_cached,
        block_size=32,
    )  # fmt: skip
    assert bool(generated.num_cached_tokens[2]) is is_cached
    assert_right(generated, official_reference(folder), prompts)


def test_chunked_prefill(engine: EngineProcess, tmp_path: Path) -> None:
    folder = make_official(tmp_path)
    prompts = [LONG_PROMPT, *PROMPTS]
    generated = engine.generate(
        folder, prompts=prompts, enable_chunked_prefill=True, max_num_batched_tokens=16, enable_prefix_caching=False
    )
    assert_right(generated, official_reference(folder), prompts)


def test_ngram_speculative_decoding(tmp_path: Path) -> None:
    folder = make_official(tmp_path / "model")
    # vLLM cannot make another engine in a process that has loaded its n-gram proposer.
    engine = EngineProcess(tmp_path / "log")
    # The prompt holds its own continuation, so that drafts are found and some are right.
    start = PROMPTS[0]
    try:
        likely = engine.generate(folder, prompts=[start], num_tokens=24, num_logprobs=None).tokens[0]
        prompts = [[*start, *likely, *start]]
        generated = engine.generate(
            folder, prompts=prompts, num_tokens=24, num_logprobs=None,
            speculative_config={
                "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
            },
        )  # fmt: skip
    finally:
        engine.close()
    assert generated.metrics["vllm:spec_decode_num_draft_tokens"] > 0
    assert_right(generated, official_reference(folder), prompts)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_compiled(engine: EngineProcess, tmp_path: Path, moe: bool) -> None:
    gate: dict[str, Any] = (
        {"gate_granularity": "elementwise"} if moe else {"gate_position": "G2", "attention_bias": True}
    )
    model = tiny_model(moe=moe, **gate)
    model.save_pretrained(tmp_path)
    assert_right(engine.generate(tmp_path, enforce_eager=False), model_reference(model))


def test_bfloat16_stays_near_the_reference(engine: EngineProcess, tmp_path: Path) -> None:
    folder = make_official(tmp_path, dtype=torch.bfloat16)
    generated = engine.generate(folder, dtype="bfloat16")
    expected = [official_reference(folder)(prompt) for prompt in PROMPTS]
    for prompt, entries in enumerate(generated.prompt_logprobs):
        for position, logprobs in enumerate(entries or []):
            for token, logprob in logprobs.items():
                assert abs(logprob - expected[prompt][position, int(token)].item()) < 0.2


def make_adapter(model: torch.nn.Module, folder: Path, *targets: str) -> torch.nn.Module:
    """Saves a random adapter of some weight, and returns the model with it."""
    config = LoraConfig(r=4, lora_alpha=16, target_modules=list(targets), init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    adapted.save_pretrained(str(folder))
    return adapted


@pytest.mark.parametrize(
    ("gate", "targets"),
    [
        ({}, ["q_proj"]),
        ({"gate_packing": "per_head", "gate_granularity": "elementwise"}, ["q_proj", "v_proj", "o_proj"]),
        ({"gate_packing": "separate"}, ["q_proj", "g_proj"]),
    ],
    ids=["kv-group", "per-head", "separate"],
)
def test_lora_reaches_the_gate_rows(engine: EngineProcess, tmp_path: Path, gate, targets: list[str]) -> None:
    model = tiny_model(**gate)
    model.save_pretrained(tmp_path / "model")
    without = model_reference(model)
    plain = engine.generate(tmp_path / "model", num_logprobs=None).tokens
    adapted = make_adapter(model, tmp_path / "adapter", *targets)
    generated = engine.generate(
        tmp_path / "model", num_logprobs=None, adapters=[tmp_path / "adapter"], enable_lora=True, max_lora_rank=8
    )
    assert_right(generated, model_reference(adapted))
    assert generated.tokens != plain
    with adapted.disable_adapter():  # pyright: ignore[reportCallIssue]
        assert [without(prompt)[-1].argmax().item() for prompt in PROMPTS] == [tokens[0] for tokens in plain]


def test_adapter_without_the_gate_rows_is_refused(engine: EngineProcess, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    ungated_rows = tiny_model(gate_packing="separate")
    make_adapter(ungated_rows, tmp_path / "adapter", "q_proj")
    with pytest.raises(EngineError, match=r"q_proj.*128.*132"):
        engine.generate(
            tmp_path / "model", num_logprobs=None, adapters=[tmp_path / "adapter"], enable_lora=True, max_lora_rank=8
        )
