"""The same fault in every layer is one line of the report, and one entry each in the JSON."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from checkpoint_factory import make_official, read_weights, write_weights
from typer.testing import CliRunner

from gated_serving.cli import app
from gated_serving.llm.checkpoints.doctor import Problem
from gated_serving.llm.checkpoints.problem_groups import problem_lines


def missing(tensor: str, shape: tuple[int, ...] = (4, 8)) -> Problem:
    return Problem(
        kind="missing", tensor=tensor, expected=shape, message=f"{tensor} is missing, expected {list(shape)}"
    )


def test_layers_with_the_same_fault_share_a_line() -> None:
    problems = [missing(f"model.layers.{layer}.self_attn.q_proj.weight") for layer in (0, 1, 2, 5)]
    assert problem_lines(problems) == [
        "model.layers.0-2,5.self_attn.q_proj.weight is missing, expected [4, 8] (4 tensors)"
    ]


def test_experts_are_gathered_within_the_layers_that_have_the_same_ones() -> None:
    problems = [
        missing(f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight")
        for layer, experts in ((0, (0, 1)), (1, (0, 1)), (2, (0,)))
        for expert in experts
    ]
    assert problem_lines(problems) == [
        "model.layers.0-1.mlp.experts.0-1.up_proj.weight is missing, expected [4, 8] (4 tensors)",
        "model.layers.2.mlp.experts.0.up_proj.weight is missing, expected [4, 8]",
    ]


def test_other_shapes_kinds_and_names_stay_apart_and_in_order() -> None:
    problems = [
        Problem(kind="config", message="hidden_size=0: must be at least 1"),
        missing("model.layers.0.a.weight"),
        missing("model.norm.weight"),
        missing("model.layers.1.a.weight", (5, 8)),
        missing("model.layers.1.b.weight"),
        missing("model.layers.2.a.weight"),
    ]
    assert problem_lines(problems) == [
        "hidden_size=0: must be at least 1",
        "model.layers.0,2.a.weight is missing, expected [4, 8] (2 tensors)",
        "model.norm.weight is missing, expected [4, 8]",
        "model.layers.1.a.weight is missing, expected [5, 8]",
        "model.layers.1.b.weight is missing, expected [4, 8]",
    ]


def test_the_command_gathers_in_its_text_and_not_in_its_json(tmp_path: Path) -> None:
    folder = make_official(tmp_path, layers=3)
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3)]
    write_weights(folder, read_weights(folder) | {name: torch.ones(128, 96) for name in names}, "safetensors")
    text = CliRunner().invoke(app, ["doctor", str(folder)])
    lines = [line for line in text.stdout.splitlines() if line.startswith("problem")]
    assert len(lines) == 1
    assert "model.layers.0-2.self_attn.q_proj.weight has the shape [128, 96], expected [132, 96]" in lines[0]
    assert lines[0].endswith("(3 tensors)")
    found = json.loads(CliRunner().invoke(app, ["doctor", str(folder), "--json"]).stdout)["problems"]
    assert [problem["tensor"] for problem in found] == names
