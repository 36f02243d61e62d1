from __future__ import annotations

import pytest

from gated_serving.llm.recipes import RECIPES, find_recipe
from gated_serving.llm.training.architecture import build_on_meta, count_active_parameters, count_parameters
from gated_serving.llm.training.overrides import apply_overrides


@pytest.mark.parametrize(
    ("recipe", "millions", "active_millions"),
    [
        ("tiny-python", 5.488, 5.488),
        ("tiny-python-ungated", 5.476, 5.476),
        ("gated-1.7b", 1721.8, 1721.8),
        ("gated-1.7b-elementwise", 1728.2, 1728.2),
        ("gated-moe-15a2b", 15579.3, 1989.8),
    ],
)
def test_parameters_on_the_meta_device(recipe: str, millions: float, active_millions: float) -> None:
    run = find_recipe(recipe)
    settings = run.model
    if settings.vocab_size is None:
        settings = apply_overrides(run, [f"model.vocab_size={run.tokenizer.vocab_size}"]).model
    model, config = build_on_meta(settings)
    assert count_parameters(model) / 1e6 == pytest.approx(millions, rel=1e-4)
    assert count_active_parameters(model, config) / 1e6 == pytest.approx(active_millions, rel=1e-4)


@pytest.mark.parametrize(("granularity", "millions"), [("headwise", 1.6), ("elementwise", 201.3)])
def test_the_mixture_has_the_gates_that_the_paper_counts(granularity: str, millions: float) -> None:
    gated = apply_overrides(find_recipe("gated-moe-15a2b"), [f"model.gate_granularity={granularity}"]).model
    ungated = apply_overrides(find_recipe("gated-moe-15a2b"), ["model.family=qwen3_moe", "model.gate_init_scale=1"])
    difference = count_parameters(build_on_meta(gated)[0]) - count_parameters(build_on_meta(ungated.model)[0])
    assert difference / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_recipe_has_its_name_and_says_what_it_is(name: str) -> None:
    assert find_recipe(name).name == name
    assert RECIPES[name].__doc__


def test_gated_models_learn_faster_by_the_multiplier() -> None:
    gated, ungated = find_recipe("tiny-python"), find_recipe("tiny-python-ungated")
    assert ungated.peak_learning_rate == ungated.optimisation.learning_rate
    assert gated.peak_learning_rate == pytest.approx(1.5 * ungated.peak_learning_rate)


def test_both_sides_of_the_comparison_have_one_budget_and_one_shape() -> None:
    gated, ungated = find_recipe("tiny-python"), find_recipe("tiny-python-ungated")
    assert (gated.data, gated.tokenizer, gated.optimisation) == (ungated.data, ungated.tokenizer, ungated.optimisation)
    assert gated.num_steps() == ungated.num_steps()


def test_recurrent_layers_refuse_packed_documents() -> None:
    with pytest.raises(ValueError, match=r"data.layout='packed': the recurrent layers"):
        apply_overrides(find_recipe("tiny-qwen3-next"), ["data.layout=packed"])


def test_an_unknown_recipe_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no recipe 'tiny'; known are tiny-python, "):
        find_recipe("tiny")
