from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_goal_environment import PointReach
from tiny_policy_training import tiny_run

from gated_serving.rl.environments import EnvironmentFailedError, UnusableEnvironmentError
from gated_serving.rl.settings import TrainingRun
from gated_serving.rl.training import checkpoints
from gated_serving.rl.training.learner import Learner
from gated_serving.rl.training.session import RESULT, UnusableInputError, train
from gated_serving.rl.training.stopping import TrainingStoppedError
from gated_serving.rl.training.telemetry import read_metrics
from gated_serving.rl.training.trainer import TrainingDivergedError
from gated_serving.run_folder import OutputFolderError, locked

TESTS = Path(__file__).parents[3]
SPEEDS = {"seconds", "environment_steps_per_s", "updates_per_s", "collecting_s", "updating_s"}

KILLED = """
import os, signal, sys
from pathlib import Path
from tiny_policy_training import tiny_run
from gated_serving.rl.training import checkpoints, learner
from gated_serving.rl.training.session import train

moment, output, *overrides = sys.argv[1:]
calls = 0

def dying(function, last):
    def call(*args, **kwargs):
        global calls
        calls += args[0].name == ".last.partial" if moment == "checkpoint" else 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

if moment == "checkpoint":  # the third of the last ones: after four rounds of eight
    checkpoints._put_in_place = dying(checkpoints._put_in_place, 3)
else:  # the second update of the sixth round, which no checkpoint holds
    learner.Learner.update = dying(learner.Learner.update, 22)
train(tiny_run(*overrides), Path(output))
"""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny_run(), tmp_path_factory.mktemp("runs") / "unbroken")


def lines_of(output: Path) -> list[dict[str, Any]]:
    """All that was logged but times and speeds."""
    lines = read_metrics(output / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in SPEEDS} for line in lines]


def assert_same_end(output: Path, expected: Path) -> None:
    assert lines_of(output) == lines_of(expected)
    for file in ("last/actor", "last/critic", "last/optimizers", "best/actor"):
        found = load_file(output / f"checkpoints/{file}.safetensors")
        wanted = load_file(expected / f"checkpoints/{file}.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    results = [json.loads((folder / RESULT).read_text()) for folder in (output, expected)]
    assert [result["final"] for result in results] == [results[1]["final"]] * 2
    assert [result["untrained"] for result in results] == [results[1]["untrained"]] * 2


@pytest.mark.parametrize(
    ("moment", "num_processes", "next_round"), [("checkpoint", 0, 2), ("update", 0, 4), ("update", 2, 4)]
)
def test_a_run_killed_at_any_moment_goes_on_as_if_nothing_had_happened(
    unbroken: Path, tmp_path: Path, moment: str, num_processes: int, next_round: int
) -> None:
    output, override = tmp_path / "killed", f"runtime.num_processes={num_processes}"
    died = subprocess.run(
        [sys.executable, "-c", KILLED, moment, str(output), override],
        env=os.environ | {"PYTHONPATH": str(TESTS)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL, died.stderr
    state = json.loads((output / "checkpoints" / "last" / "state.json").read_text())
    assert state["position"]["round"] == next_round

    train(tiny_run(), output, resume=True)  # in this process, whatever it was before: processes change nothing

    assert_same_end(output, unbroken)


def test_a_run_that_is_stopped_amid_a_round_saves_there_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates, update = 0, Learner.update

    def interrupting(self: Learner, *args: Any) -> Any:
        nonlocal updates
        updates += 1
        if updates == 6:  # the second of four updates of the second round
            os.kill(os.getpid(), signal.SIGINT)
        return update(self, *args)

    monkeypatch.setattr(Learner, "update", interrupting)
    handler = signal.getsignal(signal.SIGINT)
    output = tmp_path / "run"
    with pytest.raises(TrainingStoppedError, match="SIGINT"):
        train(tiny_run(), output)
    assert signal.getsignal(signal.SIGINT) is handler
    position = json.loads((output / "checkpoints" / "last" / "state.json").read_text())["position"]
    assert (position["round"], position["updates_in_round"], position["updates"]) == (1, 2, 6)
    assert position["environment_steps"] == 180

    train(tiny_run(), output, resume=True)
    rounds = [line for line in lines_of(output) if "critic_loss" in line]
    assert [line["environment_steps"] for line in rounds] == list(range(140, 421, 40))
    assert [line["updates"] for line in rounds] == list(range(4, 33, 4))
    assert json.loads((output / RESULT).read_text())["num_updates"] == 32


def test_a_run_that_is_stopped_while_it_is_measured_is_measured_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act = Learner.act

    def interrupting(self: Learner, *args: Any, explore: bool) -> Any:
        if not explore and any(state for state in self.optimizers["actor"].state.values()):
            monkeypatch.undo()
            os.kill(os.getpid(), signal.SIGTERM)
        return act(self, *args, explore=explore)

    monkeypatch.setattr(Learner, "act", interrupting)
    output = tmp_path / "run"
    with pytest.raises(TrainingStoppedError, match="SIGTERM"):
        train(tiny_run(), output)
    position = json.loads((output / "checkpoints" / "last" / "state.json").read_text())["position"]
    assert (position["round"], position["measured_round"]) == (4, 0)
    train(tiny_run(), output, resume=True)
    assert [line["environment_steps"] for line in lines_of(output) if "evaluation" in line] == [0, 260, 420]


def test_a_run_logs_rounds_evaluations_and_a_result(unbroken: Path) -> None:
    lines = lines_of(unbroken)
    rounds = [line for line in lines if "critic_loss" in line]
    assert [line["environment_steps"] for line in rounds] == list(range(140, 421, 40))
    assert [line["updates"] for line in rounds] == list(range(4, 33, 4))
    assert [line["stage"] for line in rounds] == ["pretrain"] * 3 + ["explore"] * 3 + ["finetune"] * 2
    for name in ("actor_loss", "alpha", "entropy", "energy", "categorical_accuracy", "learning_rate"):
        assert all(math.isfinite(line[name]) for line in rounds)
    assert rounds[-1]["critic_loss"] < rounds[0]["critic_loss"]
    evaluations = [line for line in lines if "evaluation" in line]
    assert [line["environment_steps"] for line in evaluations] == [0, 260, 420]
    result = json.loads((unbroken / RESULT).read_text())
    assert result["recipe"] == "tiny"
    assert result["num_environment_steps"] == 420
    assert result["num_updates"] == 32
    assert result["untrained"]["num_episodes"] == result["final"]["num_episodes"] == 8
    assert result["untrained"]["seed"] == result["final"]["seed"] != result["best"]["seed"]
    assert result["versions"]["torch"] == torch.__version__
    assert result["settings"] == json.loads(json.dumps(dataclasses.asdict(tiny_run())))
    assert (unbroken / "learning_curve.png").stat().st_size > 0
    assert not list(unbroken.rglob("*.partial*"))
    assert not list(unbroken.rglob("*.pt"))


def test_the_best_checkpoint_is_that_of_the_best_evaluation(unbroken: Path) -> None:
    evaluations = [line for line in lines_of(unbroken) if "evaluation" in line]
    ranks = [(line["evaluation"]["success_rate"], line["evaluation"]["time_at_goal"]) for line in evaluations]
    best = max(range(len(ranks)), key=lambda index: (ranks[index], index))  # the later of equals
    record = checkpoints.read_record(unbroken / "checkpoints" / "best")
    assert record["num_environment_steps"] == evaluations[best]["environment_steps"]
    assert record["selection"]["success_rate"] == ranks[best][0]
    assert record["evaluation"] == json.loads((unbroken / RESULT).read_text())["final"]


def test_another_seed_is_another_run_measured_on_the_same_episodes(unbroken: Path, tmp_path: Path) -> None:
    train(tiny_run("optimisation.seed=1"), tmp_path / "run")
    mine, other = lines_of(tmp_path / "run"), lines_of(unbroken)
    assert [line.get("critic_loss") for line in mine] != [line.get("critic_loss") for line in other]
    assert [line["evaluation"]["seed"] for line in mine if "evaluation" in line] == [
        line["evaluation"]["seed"] for line in other if "evaluation" in line
    ]


def test_a_folder_with_a_run_is_not_overwritten(unbroken: Path) -> None:
    before = (unbroken / RESULT).stat().st_mtime_ns
    with pytest.raises(OutputFolderError, match="holds a run already: go on with --resume"):
        train(tiny_run(), unbroken)
    with pytest.raises(OutputFolderError, match=r"other settings: optimisation\.seed is 0 there and 1 here"):
        train(tiny_run("optimisation.seed=1"), unbroken, resume=True)
    with pytest.raises(OutputFolderError, match=r"explore\.learning_rate is .*, which changes the 8 rounds"):
        train(tiny_run("explore.learning_rate=1e-4"), unbroken, resume=True)
    with pytest.raises(OutputFolderError, match=r"runtime\.save_rounds is 2 there and 3 here"):
        train(tiny_run("runtime.save_rounds=3"), unbroken, resume=True)
    train(tiny_run("runtime.log_rounds=2"), unbroken, resume=True)  # it is finished: nothing is done again
    assert (unbroken / RESULT).stat().st_mtime_ns == before


def test_a_finished_run_may_go_on_with_a_longer_last_stage(unbroken: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    shutil.copytree(unbroken, output)
    train(tiny_run("finetune.num_environment_steps=160", "finetune.num_updates=16"), output, resume=True)
    assert lines_of(output)[: len(lines_of(unbroken))] == lines_of(unbroken)
    assert json.loads((output / RESULT).read_text())["num_updates"] == 40


def test_two_trainings_do_not_share_a_folder(unbroken: Path) -> None:
    with locked(unbroken), pytest.raises(OutputFolderError, match="another training is writing here"):
        train(tiny_run(), unbroken, resume=True)


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(OutputFolderError, match="is not empty and holds no run"):
        train(tiny_run(), tmp_path, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_run_that_diverges_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    output = tmp_path / "run"
    run = tiny_run("explore.learning_rate=1e30")  # rounds 3 to 5; the checkpoint of round 2 is whole
    with pytest.raises(TrainingDivergedError, match=r"is (nan|inf|-inf) in round 3 \(explore, update \d+\)"):
        train(run, output)
    assert not (output / RESULT).exists()
    last = output / "checkpoints" / "last"
    assert checkpoints.read_record(last)["num_environment_steps"] == 180
    for tensors in (load_file(last / "actor.safetensors"), load_file(last / "critic.safetensors")):
        assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_a_damaged_checkpoint_is_named_and_kept(unbroken: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    shutil.copytree(unbroken, output)
    damaged = output / "checkpoints" / "last" / "critic.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:40])
    with pytest.raises(OutputFolderError, match=r"critic\.safetensors: is not the file that was written"):
        train(tiny_run(), output, resume=True)
    assert damaged.exists()


def test_a_checkpoint_that_cannot_be_written_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_put_in_place", full)
    with pytest.raises(OutputFolderError, match="No space left on device"):
        train(tiny_run(), tmp_path / "run")
    assert not (tmp_path / "run").exists()  # the same command works once there is space


def test_an_environment_that_fails_ends_the_run_which_can_go_on(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = 0, PointReach.step

    def failing(self: PointReach, action: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 650:  # 320 for the first evaluations, 100 random ones, 40 a round: after the checkpoint of round 4
            raise RuntimeError("the robot fell over")
        return step(self, action)

    monkeypatch.setattr(PointReach, "step", failing)
    with pytest.raises(EnvironmentFailedError, match="the robot fell over"):
        train(tiny_run(), tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "last").exists()
    train(tiny_run(), tmp_path / "run", resume=True)
    assert_same_end(tmp_path / "run", unbroken)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environment.id=NoSuchThing-v0", "NoSuchThing"),
        ("environment.id=no_such_module:Thing", "there is no module 'no_such_module'"),
        ("environment.id=CartPole-v1", "CartPole-v1: its observation space"),
        ('environment.kwargs={"num_legs": 4}', "cannot be made with the arguments"),
        ("evaluation.video=true", "evaluation.video=True: .*PointReach cannot be rendered"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_at_once(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UnusableEnvironmentError, match=message):
        train(tiny_run(override), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInputError, match=r"runtime\.device='cuda': torch finds no GPU here"):
        train(tiny_run("runtime.device=cuda"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ("runtime.checkpoint_segments=2", "networks.actor_depth=8", "networks.critic_depth=12"),
        ("contrastive.loss=binary_nce", "contrastive.energy=dot", "actor.temperature=none"),
        ("contrastive.loss=nt_xent", "contrastive.energy=cosine", "contrastive.temperature=0.1"),
        ("networks.normalize_inputs=true", "actor.random_goal_share=0.5", "optimisation.max_grad_norm=1"),
        ("collection.num_environments=3", "collection.round_length=7", "evaluation.success=any"),
    ],
)
def test_every_setting_trains(overrides: tuple[str, ...], tmp_path: Path) -> None:
    train(short(*overrides), tmp_path / "run")
    losses = [line["critic_loss"] for line in lines_of(tmp_path / "run") if "critic_loss" in line]
    assert losses
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.slow
def test_compiled_blocks_train_to_the_same_losses(tmp_path: Path) -> None:
    for name, override in (("plain", "runtime.compile=false"), ("compiled", "runtime.compile=true")):
        train(short(override), tmp_path / name)
    plain, compiled = (
        [line["critic_loss"] for line in lines_of(tmp_path / name) if "critic_loss" in line]
        for name in ("plain", "compiled")
    )
    assert compiled == pytest.approx(plain, rel=1e-3)


def short(*overrides: str) -> TrainingRun:
    left_out = [f"{stage}.{field}=0" for stage in ("explore", "finetune")
                for field in ("num_updates", "num_environment_steps")]  # fmt: skip
    return tiny_run(*left_out, *overrides)


def test_a_policy_learns_to_reach_its_goals(tmp_path: Path) -> None:
    """From one episode in a hundred to nearly all, on episodes that neither training nor the choice of the best saw."""
    run = tiny_run(
        "networks.width=64", "networks.representation_size=32", "collection.num_environments=8",
        "collection.round_length=20", "collection.num_random_steps=1600", "replay.capacity=20000", "replay.gamma=0.8",
        "pretrain.num_environment_steps=1600", "pretrain.num_updates=200", "pretrain.batch_size=256",
        "explore.num_environment_steps=1600", "explore.num_updates=200", "explore.batch_size=256",
        "finetune.num_environment_steps=1600", "finetune.num_updates=200", "finetune.batch_size=128",
        "evaluation.eval_rounds=10", "evaluation.num_episodes=40", "evaluation.num_final_episodes=100",
        "runtime.save_rounds=15",
    )  # fmt: skip
    train(run, tmp_path / "run")
    result = json.loads((tmp_path / "run" / RESULT).read_text())
    assert result["untrained"]["success_rate"] <= 0.2
    assert result["final"]["success_rate"] >= 0.9


def test_networks_that_do_not_fit_into_memory_are_refused_by_their_sizes(tmp_path: Path) -> None:
    with pytest.raises(UnusableInputError, match=r"do not fit into this machine's memory: .*networks.width=100000000"):
        train(tiny_run("networks.width=100000000"), tmp_path / "run")
