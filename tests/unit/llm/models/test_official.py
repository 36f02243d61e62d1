"""Checkpoints in the released format, loaded as they are, against plain tensor algebra."""

import json
from typing import Any

import pytest
import torch
from checkpoint_factory import make_official, reference_logits

from gated_serving.attention.config import GateConfig, Position
from gated_serving.llm.models import GatedQwen3ForCausalLM, GatedQwen3MoeForCausalLM

TOKENS = [1, 5, 6, 7, 900, 42, 5]

VARIANTS: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "sharded": {"weights": "sharded"},
    "bin": {"weights": "bin"},
    "sharded_bin": {"weights": "sharded_bin", "gate": "elementwise"},
    "bias": {"qkv_bias": True},
    "bias_without_qk_norm": {"qkv_bias": True, "qk_norm": False, "gate": "elementwise"},
    "tied": {"tied": True, "weights": "bin"},
    "one_group": {"heads": 6, "kv_heads": 1, "gate": "elementwise"},
    "no_groups": {"heads": 4, "kv_heads": 4},
    "qwen3": {"model_type": "qwen3"},
    "moe": {"model_type": "qwen3_moe"},
    "moe_sharded_bin": {"model_type": "qwen3_moe", "weights": "sharded_bin", "gate": "elementwise"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gives_the_reference_logits(tmp_path, variant):
    folder = make_official(tmp_path, **VARIANTS[variant])
    assert_logits(folder, reference_logits(folder, TOKENS))


def test_dropped_gate_would_be_noticed(tmp_path):
    folder = make_official(tmp_path)
    wrong = reference_logits(folder, TOKENS, drop_gate=True)
    assert (wrong - reference_logits(folder, TOKENS)).abs().max() > 1


def test_absent_head_dim_means_what_qwen2_takes_for_it(tmp_path):
    folder = make_official(tmp_path, hidden=128, heads=4, kv_heads=2, head_dim=32)
    expected = reference_logits(folder, TOKENS)
    config = json.loads((folder / "config.json").read_text())
    del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    assert_logits(folder, expected)


@pytest.mark.parametrize("field", ["headwise_attn_output_gate", "qkv_bias"])
def test_flag_that_is_neither_true_nor_false(tmp_path, field):
    folder = make_official(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {field: "false"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{field}='false': must be true or false"):
        GatedQwen3ForCausalLM.from_pretrained(folder)


def test_fields_that_are_no_names_are_left_alone():
    assert GateConfig.from_fields({1: 2, "gate_position": "G2"}) == GateConfig(position=Position.G2)  # pyright: ignore[reportArgumentType]


def test_saved_again_it_is_in_the_own_format(tmp_path):
    folder = make_official(tmp_path / "official", model_type="qwen3_moe", gate="elementwise")
    model = GatedQwen3MoeForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "own")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == "gated_qwen3_moe"
    assert_logits(tmp_path / "own", reference_logits(folder, TOKENS))


def assert_logits(folder, expected):
    is_moe = "moe" in json.loads((folder / "config.json").read_text())["model_type"]
    model_class = GatedQwen3MoeForCausalLM if is_moe else GatedQwen3ForCausalLM
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-4)
