from __future__ import annotations

from pathlib import Path

import pytest
from tiny_training import tiny_run

from gated_serving.attention import GateConfig
from gated_serving.llm.models import GatedQwen3Config, GatedQwen3MoeConfig
from gated_serving.llm.training.architecture import build_config, build_on_meta


@pytest.mark.parametrize(
    ("override", "requirement"),
    [
        ("optimisation.learning_rate=Infinity", "a finite number above 0"),
        ("optimisation.learning_rate=NaN", "a finite number above 0"),
        ("optimisation.gated_lr_multiplier=Infinity", "a finite number above 0"),
        ("optimisation.weight_decay=NaN", "a finite number, at least 0"),
        ("optimisation.weight_decay=-1", "a finite number, at least 0"),
        ("optimisation.max_grad_norm=-1", "a finite number, at least 0"),
        ("optimisation.adam_beta1=2", "from 0 to below 1"),
        ("optimisation.adam_beta2=1", "from 0 to below 1"),
        ("optimisation.min_lr_share=NaN", "from 0 to 1"),
        ("optimisation.seed=99999999999", "from 0 to 2"),
        ("runtime.num_threads=0", "at least 1"),
        ("runtime.num_threads=-3", "at least 1"),
        ("data.num_processes=0", "at least 1"),
        ("data.pattern=/abs", "a pattern of paths inside the folder"),
        ("data.pattern=", "a pattern of paths inside the folder"),
        ("model.num_hidden_layers=0", "at least 1"),
        ("model.num_key_value_heads=0", "at least 1"),
        ("model.num_key_value_heads=3", "a multiple of num_key_value_heads"),
        ("model.vocab_size=0", "at least 1"),
        ("model.head_dim=15", "even"),
        ("model.rope_theta=0", "a finite number above 0"),
        ("model.initializer_range=-1", "a finite number above 0"),
        ("model.gate_init_bias=NaN", "a finite number"),
    ],
)
def test_a_value_out_of_range_is_named(override: str, requirement: str) -> None:
    with pytest.raises(ValueError, match=f"=.*: must be {requirement}") as refused:
        tiny_run(Path("unused"), override)
    assert override.partition(".")[0] == str(refused.value).partition(".")[0]  # the section
    assert override.partition("=")[0].removeprefix("model.") in str(refused.value)


def test_a_token_cannot_use_more_experts_than_there_are() -> None:
    with pytest.raises(ValueError, match="num_experts_per_tok=5: must be at most num_experts, which is 4"):
        tiny_run(
            Path("unused"), family="gated_qwen3_moe", num_experts=4, num_experts_per_tok=5, moe_intermediate_size=8
        )


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"hidden_size": 8}, "hidden_size has a setting of its own"),
        ({"slidign_window": 8}, "GatedQwen3Config has no field 'slidign_window'"),
    ],
)
def test_a_further_field_must_be_one_of_the_config(extra: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_config(tiny_run(Path("unused"), extra=extra).model, vocab_size=300)


def test_a_further_field_reaches_the_config() -> None:
    config = build_config(tiny_run(Path("unused"), extra={"hidden_act": "gelu"}).model, vocab_size=300)
    assert config.to_dict()["hidden_act"] == "gelu"


def test_a_config_that_makes_no_model_is_refused() -> None:
    settings = tiny_run(Path("unused"), vocab_size=300, extra={"hidden_act": "banana"}).model
    with pytest.raises(ValueError, match=r"model: these settings make no gated_qwen3 model: .*banana"):
        build_on_meta(settings)


def test_the_gate_that_is_meant_without_saying_so_is_the_same_everywhere() -> None:
    """Settings and configs must spell out the gate's fields, for their types and documentation."""
    assert tiny_run(Path("unused")).model.gate_fields() == GateConfig().to_fields()
    assert GatedQwen3Config().gate == GatedQwen3MoeConfig().gate == GateConfig()
