from __future__ import annotations

import pytest

from gated_serving.llm.recipes import find_recipe
from gated_serving.llm.training.overrides import apply_overrides


def test_fields_are_exchanged_and_the_rest_stays() -> None:
    run = find_recipe("tiny-python")
    changed = apply_overrides(
        run,
        [
            "model.gate_position=G2",
            "optimisation.learning_rate=1e-4",
            "optimisation.compile=true",
            "data.max_documents=null",
            "data.source=/some/path=with/equals",
            'model.extra={"rms_norm_eps": 1e-5}',
            "optimisation.num_tokens=123",
        ],
    )
    assert changed.model.gate_position == "G2"
    assert changed.optimisation.learning_rate == 1e-4
    assert changed.optimisation.compile is True
    assert changed.data.source == "/some/path=with/equals"
    assert changed.model.extra == {"rms_norm_eps": 1e-5}
    assert changed.optimisation.num_tokens == 123
    assert changed.model.hidden_size == run.model.hidden_size
    assert apply_overrides(run, []) == run


def test_text_that_looks_like_a_number_stays_text_where_text_is_asked() -> None:
    assert apply_overrides(find_recipe("tiny-python"), ["tokenizer.path=123"]).tokenizer.path == "123"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimisation.learning_rat=1", "optimisation.learning_rat: .*did you mean 'learning_rate'"),
        ("optimizer.learning_rate=1", "optimizer.learning_rate: there is no section 'optimizer'"),
        ("learning_rate=1", "'learning_rate=1': an override is written section.field=value"),
        ("model.hidden_size", "'model.hidden_size': an override is written"),
        ("model.hidden_size=wide", "model.hidden_size='wide': .*integer"),
        ("model.hidden_size=8.5", "model.hidden_size='8.5': .*integer"),
        ("optimisation.compile=maybe", "optimisation.compile='maybe': .*bool"),
        ("optimisation.schedule=step", "optimisation.schedule='step': .*'wsd' or 'cosine'"),
        ("optimisation.num_tokens=0", "optimisation.num_tokens=0: must be at least 1"),
        ("data.held_out_share=1.5", "data.held_out_share=1.5: must be above 0 and below 1"),
        ("model.gate_position=G9", "model.gate_position='G9': must be one of 'G1'"),
        ("model.gate_packing=per_head model.gate_position=G2", "gate_packing='per_head' at gate_position='G2'"),
        ("runtime.save_steps=7", "runtime.save_steps=7: must be a multiple of log_steps"),
        ("data.sequence_length=4096", "data.sequence_length=4096: must be at most model.max_position_embeddings"),
        ("model.num_experts=4", "model.num_experts=4: must be left out"),
    ],
)
def test_what_is_wrong_is_named(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_overrides(find_recipe("tiny-python"), override.split())


def test_an_ungated_family_takes_no_gate() -> None:
    with pytest.raises(ValueError, match=r"model.gate_position='G2': the family 'qwen3' has no such gate"):
        apply_overrides(find_recipe("tiny-python-ungated"), ["model.gate_position=G2"])
