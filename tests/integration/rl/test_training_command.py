"""The command as a user starts it: what it says, and how it is stopped and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from gated_serving.cli import app
from gated_serving.rl.recipes import RECIPES

TESTS = Path(__file__).parents[2]
SMALL = [
    "environment.id=tiny_goal_environment:PointReach", "networks.actor_depth=4", "networks.critic_depth=4",
    "networks.width=16", "collection.num_environments=4", "collection.round_length=20",
    "collection.num_random_steps=160", "replay.capacity=4000", "evaluation.num_episodes=8", "evaluation.eval_rounds=5",
    "evaluation.num_final_episodes=8", "runtime.num_threads=1", "runtime.save_rounds=5", "runtime.num_processes=2",
]  # fmt: skip
ENDLESS = [
    f"{stage}.{field}" for stage in ("pretrain", "explore", "finetune")
    for field in ("num_updates=100000", "num_environment_steps=1000000", "batch_size=16")
]  # fmt: skip
SHORT = [
    f"{stage}.{field}" for stage in ("pretrain", "explore", "finetune")
    for field in ("num_updates=8", "num_environment_steps=160", "batch_size=16")
]  # fmt: skip


def start(output: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gated_serving", "train-rl", "fetch-reach", "--output", str(output), *arguments]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(TESTS)}
    )


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Reads what the process says until it says this."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if text in line:
            return
    pytest.fail(f"it ended without {text!r}:\n{''.join(said)}")


@pytest.fixture
def endless(tmp_path: Path):
    process = start(tmp_path / "run", *SMALL, *ENDLESS)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_goes_on_from_there(
    endless: subprocess.Popen[str], tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    wait_for(endless, "updates/s")
    children = psutil.Process(endless.pid).children(recursive=True)
    for process in [endless, *children]:  # as a terminal sends the one, and a service manager the other
        process.send_signal(number)
    _, said = endless.communicate()
    assert endless.returncode == exit_code, said
    assert "go on with: gated-serving train-rl fetch-reach --output" in said
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    state = json.loads((tmp_path / "run" / "checkpoints" / "last" / "state.json").read_text())
    assert state["position"]["updates"] > 0

    again = start(tmp_path / "run", "--resume")
    wait_for(again, f"going on from environment step {state['position']['environment_steps']}")
    wait_for(again, "updates/s")
    again.kill()
    again.communicate()


def test_a_second_training_in_its_folder_is_refused(endless: subprocess.Popen[str], tmp_path: Path) -> None:
    wait_for(endless, "updates/s")
    result = CliRunner().invoke(app, ["train-rl", "fetch-reach", "--output", str(tmp_path / "run"), "--resume"])
    assert result.exit_code == 2
    assert "another training is writing here" in result.stderr
    assert endless.poll() is None


def test_killed_outright_it_leaves_no_processes(endless: subprocess.Popen[str]) -> None:
    wait_for(endless, "updates/s")
    children = psutil.Process(endless.pid).children(recursive=True)
    assert len(children) >= 4  # two for training and two for evaluation
    endless.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_dead_environment_process_ends_the_run_with_a_reason(endless: subprocess.Popen[str]) -> None:
    wait_for(endless, "updates/s")
    workers = [
        process for process in psutil.Process(endless.pid).children(recursive=True)
        if "spawn_main" in " ".join(process.cmdline())
    ]  # fmt: skip
    for worker in workers:
        worker.kill()
    _, said = endless.communicate()
    assert endless.returncode == 1, said
    assert "SIGKILL" in said
    assert "Traceback" not in said


def test_a_run_says_only_what_it_has_to_say(tmp_path: Path) -> None:
    process = start(tmp_path / "run", *SMALL, *SHORT)
    printed, said = process.communicate()
    assert process.returncode == 0, said
    assert printed == ""
    lines = said.splitlines()
    stray = [line for line in lines if "gated_serving.rl" not in line]
    assert len(stray) == 2, said  # no greeting of TensorFlow, no warning of a simulator's old names
    assert "unseen episodes (untrained" in stray[0]
    assert stray[1] == f"the policy is in {tmp_path / 'run' / 'checkpoints' / 'best'}"


def test_the_recipes_are_listed() -> None:
    result = CliRunner().invoke(app, ["train-rl", "--list"])
    assert result.exit_code == 0
    for name in RECIPES:
        assert f"\n{name} " in f"\n{result.stdout}"
    assert "finetune" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a recipe"),
        (["fetch"], "no recipe 'fetch'"),
        (["fetch-reach", "networks.depth=3"], "networks.depth: there is no field 'depth'"),
        (["fetch-reach", "finetune.learning_rate=slow"], "finetune.learning_rate='slow'"),
        (["fetch-reach", "runtime.num_processes=5"], "runtime.num_processes=5: must be 0, or divide"),
        (["fetch-reach", "environment.id=NoSuch-v0"], "NoSuch"),
    ],
)
def test_what_cannot_be_done_is_named_and_exits_with_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train-rl", *arguments, "--output", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "run").exists()


def test_a_run_that_diverges_exits_with_1(tmp_path: Path) -> None:
    process = start(tmp_path / "run", *SMALL, *SHORT, "pretrain.learning_rate=1e30", "runtime.num_processes=0")
    _, said = process.communicate()
    assert process.returncode == 1, said
    assert "training diverged; try a lower learning_rate" in said
    assert "Traceback" not in said
