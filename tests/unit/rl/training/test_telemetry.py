from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gated_serving.rl.training.curve import draw_curve
from gated_serving.rl.training.progress import ProgressDisplay
from gated_serving.rl.training.telemetry import MetricsLog, read_metrics

STAGES = [("pretrain", 100, 300), ("explore", 300, 500), ("finetune", 500, 600)]
EVALUATION = {"success_rate": 0.5, "success_rate_end": 0.5, "success_rate_any": 0.75, "success": "end"}


def write_lines(folder: Path, steps: range, *, start: int = 0) -> None:
    with MetricsLog(folder, num_environment_steps=start) as log:
        for step in steps:
            log.write({"environment_steps": step, "stage": "pretrain"}, {"critic_loss": step / 10}, group="train")
        log.write({"environment_steps": steps[-1], "stage": "pretrain"}, EVALUATION, group="evaluation")


def test_a_line_holds_where_the_run_is_and_what_was_measured(tmp_path: Path) -> None:
    write_lines(tmp_path, range(10, 30, 10))
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"environment_steps": 10, "stage": "pretrain", "critic_loss": 1.0},
        {"environment_steps": 20, "stage": "pretrain", "critic_loss": 2.0},
        {"environment_steps": 20, "stage": "pretrain", "evaluation": EVALUATION},
    ]


def test_tensorboard_shows_the_same_over_environment_steps(tmp_path: Path) -> None:
    write_lines(tmp_path, range(10, 30, 10))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/critic_loss")] == [(10, 1.0), (20, 2.0)]
    assert [event.value for event in events.Scalars("evaluation/success_rate_any")] == [0.75]


def test_lines_past_the_checkpoint_are_dropped_when_a_run_goes_on(tmp_path: Path) -> None:
    write_lines(tmp_path, range(10, 50, 10))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"environment_steps": 5')  # what a killed process left
    write_lines(tmp_path, range(30, 50, 10), start=20)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["environment_steps"] for line in lines if "critic_loss" in line] == [10, 20, 30, 40]
    assert sum("evaluation" in line for line in lines) == 1
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/critic_loss")] == [10, 20, 30, 40]


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])


def test_the_curve_is_drawn_of_any_part_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    start: dict[str, Any] = {"environment_steps": 0, "evaluation": EVALUATION}
    train = {"environment_steps": 200, "critic_loss": 1.0, "actor_loss": 2.0, "training_success": 0.1}
    draw_curve(path, [start], STAGES, title="one point")
    first = path.read_bytes()
    draw_curve(path, [start, train, {**start, "environment_steps": 200}], STAGES, title="a line")
    assert png_size(path) == (880, 770)
    assert path.read_bytes() != first
    assert [each.name for each in tmp_path.iterdir()] == ["curve.png"]


VALUES = {"critic_loss": 1.5, "actor_loss": 2.5, "environment_steps_per_s": 412.3, "updates_per_s": 33.3}


def test_without_a_terminal_there_are_plain_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with ProgressDisplay(None, total=10_000, completed=0) as display:
        display.evaluated(0.35)
        display.advance("pretrain", 500)
        display.show("pretrain", 1_000, VALUES)
    assert caplog.messages == [
        "pretrain 1,000/10,000 steps: success 35%, critic 1.500, actor 2.500, 412 steps/s, 33.3 updates/s"
    ]


def test_on_a_terminal_there_is_a_bar(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    console = Console(force_terminal=True, width=160, record=True)
    with ProgressDisplay(console, total=10_000, completed=0) as display:
        display.evaluated(0.35)
        display.show("explore", 1_000, VALUES)
    shown = console.export_text()
    assert "explore" in shown
    assert "1000/10000" in shown
    assert "success 35%" in shown
    assert "412 steps/s" in shown
    assert not caplog.messages


def test_the_file_is_one_json_object_a_line(tmp_path: Path) -> None:
    write_lines(tmp_path, range(10, 30, 10))
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        assert isinstance(json.loads(line), dict)
