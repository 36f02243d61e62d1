from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gated_serving.cli import app

RUNNER = CliRunner()


def test_the_recipes_are_listed() -> None:
    result = RUNNER.invoke(app, ["train-llm", "--list"])
    assert result.exit_code == 0
    for name in ("tiny-python", "tiny-qwen3-next", "gated-1.7b", "gated-1.7b-elementwise", "gated-moe-15a2b"):
        assert f"\n{name} " in f"\n{result.stdout}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a recipe"),
        (["tiny"], "no recipe 'tiny'"),
        (["tiny-python", "model.width=3"], "model.width: there is no field 'width'"),
        (["tiny-python", "optimisation.learning_rate=fast"], "optimisation.learning_rate='fast'"),
        (["tiny-python", "data.source=/no/such/folder"], "data.source='/no/such/folder': no such file or folder"),
    ],
)
def test_what_cannot_be_done_is_named_and_exits_with_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["train-llm", *arguments, "--output", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_recipe_trains_and_says_where_the_model_is(documents: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    result = RUNNER.invoke(
        app,
        ["train-llm", "tiny-python", "--output", str(output), f"data.source={documents}", "data.held_out_share=0.2",
         "data.sequence_length=32", "tokenizer.vocab_size=300", "model.hidden_size=32", "model.num_hidden_layers=1",
         "model.intermediate_size=32", "optimisation.num_tokens=256", "model.gate_position=G2"],
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert str(output) in result.stderr
    assert json.loads((output / "config.json").read_text())["gate_position"] == "G2"
