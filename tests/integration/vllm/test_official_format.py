"""Checkpoints in the released models' format, served by plain vLLM with the plugin installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_factory import greedy_tokens, make_official, reference_logits
from vllm_engine import PROMPTS, EngineProcess, assert_right

ORACLE = Path(__file__).parents[4] / "shared" / "reference" / "official_format.py"

CASES = {
    "headwise": {},
    "elementwise": {"gate": "elementwise"},
    "headwise-bin": {"weights": "bin"},
    "elementwise-sharded-bin": {"gate": "elementwise", "weights": "sharded_bin"},
    "headwise-sharded": {"weights": "sharded", "model_type": "qwen3"},
    "one-kv-head": {"kv_heads": 1},
    "elementwise-one-kv-head": {"gate": "elementwise", "kv_heads": 1, "heads": 3},
    "kv-head-each": {"kv_heads": 4, "gate": "elementwise"},
    "three-groups-of-two": {"heads": 6, "kv_heads": 3, "head_dim": 64},
    "biases": {"qkv_bias": True},
    "elementwise-biases-tied": {"gate": "elementwise", "qkv_bias": True, "tied": True},
    "no-qk-norm": {"qk_norm": False},
    "no-qk-norm-biases": {"qk_norm": False, "qkv_bias": True, "gate": "elementwise"},
    "moe-headwise": {"model_type": "qwen3_moe"},
    "moe-elementwise-one-kv-head": {"model_type": "qwen3_moe", "gate": "elementwise", "kv_heads": 1},
}


def reference(folder: Path):
    return lambda tokens: reference_logits(folder, tokens).log_softmax(-1)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_official_checkpoint_is_served_right(engine: EngineProcess, tmp_path: Path, options) -> None:
    folder = make_official(tmp_path, **options)
    generated = engine.generate(folder)
    assert generated.architecture.startswith("Gated")
    assert_right(generated, reference(folder))


def test_flag_in_hf_overrides_counts_as_if_it_stood_in_the_file(engine: EngineProcess, tmp_path: Path) -> None:
    folder = make_official(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"headwise_attn_output_gate": False}))
    generated = engine.generate(folder, hf_overrides={"headwise_attn_output_gate": True})
    (folder / "config.json").write_text(json.dumps(config))
    assert_right(generated, reference(folder))


@pytest.mark.skipif(not ORACLE.exists(), reason="the independent oracle is not beside this checkout")
def test_tokens_are_the_independent_oracles(engine: EngineProcess, tmp_path: Path) -> None:
    options = ["--gate", "elementwise", "--heads", "6", "--kv-heads", "3", "--qkv-bias", "--seed", "7"]
    subprocess.run([sys.executable, ORACLE, "make", tmp_path, *options], check=True)
    prompt = ",".join(map(str, PROMPTS[1]))
    oracle = subprocess.run(
        [sys.executable, ORACLE, "expect", tmp_path, "--prompt", prompt], check=True, capture_output=True, text=True
    )
    generated = engine.generate(tmp_path, prompts=[PROMPTS[1]])
    assert generated.tokens == [json.loads(oracle.stdout)["tokens"]]


def test_without_the_plugin_vllm_serves_the_same_checkpoint_wrong_and_ungated_models_the_same(
    engine: EngineProcess, tmp_path: Path
) -> None:
    gated = make_official(tmp_path / "gated")
    ungated = make_official(tmp_path / "ungated", gate="none")
    with_plugin = engine.generate(ungated)
    stock = EngineProcess(tmp_path / "log", {"VLLM_PLUGINS": ""})
    try:
        wrong, without_plugin = stock.generate(gated), stock.generate(ungated)
    finally:
        stock.close()
    assert wrong.architecture == "Qwen3ForCausalLM"
    assert wrong.tokens == [greedy_tokens(gated, prompt, 8, drop_gate=True) for prompt in PROMPTS]
    assert wrong.tokens != [greedy_tokens(gated, prompt, 8) for prompt in PROMPTS]

    assert with_plugin.architecture == without_plugin.architecture == "Qwen3ForCausalLM"
    assert with_plugin.tokens == without_plugin.tokens
    assert with_plugin.prompt_logprobs == without_plugin.prompt_logprobs
