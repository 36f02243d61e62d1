from __future__ import annotations

import json
import subprocess
import sys
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


def test_without_a_terminal_the_log_tells_how_far_it_is_and_nothing_draws_bars(documents: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "gated_serving.cli", "train-llm", "tiny-python", "--output", str(tmp_path / "run"),
        f"data.source={documents}", "data.held_out_share=0.2", "data.sequence_length=32", "tokenizer.vocab_size=300",
        "model.hidden_size=32", "model.num_hidden_layers=1", "model.intermediate_size=32", "runtime.log_steps=2",
        "runtime.save_steps=4", "runtime.eval_steps=4", "optimisation.num_tokens=512",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line.partition("telemetry: ")[2] for line in result.stderr.splitlines() if "telemetry: " in line]
    told = [line.split(", ")[:2] for line in lines if "tokens/s" in line]
    assert told == [["step 2/4", "256 tokens"], ["step 4/4", "512 tokens"]]
    assert [line.split(", ")[0] for line in lines if "held-out loss" in line] == ["step 4/4"]
    assert "it/s" not in result.stderr
    assert "examples/s" not in result.stderr
    assert result.stdout == ""
