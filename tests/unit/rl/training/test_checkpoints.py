from __future__ import annotations

import hashlib
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_policy_training import tiny_run

from gated_serving.rl.environments import GoalEnvironmentSpec
from gated_serving.rl.replay import ReplayBatch
from gated_serving.rl.training import checkpoints
from gated_serving.rl.training.checkpoints import DamagedCheckpointError
from gated_serving.rl.training.learner import Learner
from gated_serving.rl.training.trainer import policy_of

SPEC = GoalEnvironmentSpec(
    id="Reach-v0", observation_size=5, goal_size=3, action_size=2, action_low=(-1.0, -2.0), action_high=(1.0, 2.0),
    control_period_s=0.04, max_episode_steps=50,
)  # fmt: skip
CPU = torch.device("cpu")


def make_learner(*overrides: str) -> Learner:
    return Learner(tiny_run(*overrides), SPEC, CPU)


def batch(size: int = 6) -> ReplayBatch:
    generator = torch.Generator().manual_seed(1)
    return ReplayBatch(*(torch.randn(size, n, generator=generator) for n in (5, 2, 3)))


def write(folder: Path, learner: Learner, **state: int) -> None:
    record = checkpoints.describe(learner.run, SPEC) | {"num_updates": 1, "evaluation": None}
    checkpoints.write_checkpoint(folder, record, learner, state=state or None)


def test_the_record_says_what_running_the_policy_elsewhere_takes(tmp_path: Path) -> None:
    write(tmp_path / "best", make_learner())
    record = json.loads((tmp_path / "best" / "checkpoint.json").read_text())
    assert record["format"] == "gated-serving-rl"
    assert record["environment"] == {
        "id": "Reach-v0", "kwargs": {}, "control_period_s": 0.04, "max_episode_steps": 50,
    }  # fmt: skip
    assert [(field["name"], field["shape"]) for field in record["observation_fields"]] == [
        ("observation", [5]), ("desired_goal", [3]),
    ]  # fmt: skip
    assert record["action"] == {"shape": [2], "low": [-1.0, -2.0], "high": [1.0, 2.0]}
    assert record["actor"] == {
        "architecture": "residual_gaussian", "input_size": 8, "action_size": 2, "depth": 4, "width": 16,
        "residual_interval": 4, "layer_norm_eps": 1e-6, "log_std_min": -5.0, "log_std_max": 2.0,
    }  # fmt: skip
    content = (tmp_path / "best" / "actor.safetensors").read_bytes()
    assert record["files"] == {"actor.safetensors": hashlib.sha256(content).hexdigest()}
    names = load_file(tmp_path / "best" / "actor.safetensors").keys()
    assert {"trunk.input.linear.weight", "trunk.blocks.0.3.norm.bias", "mean.weight", "log_std.bias"} <= names
    assert not any(name.startswith("normalizer") for name in names)
    assert {path.name for path in (tmp_path / "best").iterdir()} == {"actor.safetensors", "checkpoint.json"}


@pytest.mark.parametrize("normalize", ["true", "false"])
def test_a_policy_that_was_read_acts_like_the_one_that_was_written(tmp_path: Path, normalize: str) -> None:
    learner = make_learner(f"networks.normalize_inputs={normalize}")
    if normalize == "true":
        learner.normalizer.set_from(torch.randn(50, 5).numpy() * 3 + 1, torch.randn(50, 3).numpy() - 2)
    write(tmp_path / "best", learner)
    loaded = checkpoints.load_actor(tmp_path / "best")
    assert (loaded.normalizer is not None) == (normalize == "true")
    observation, goal = torch.randn(4, 5), torch.randn(4, 3)
    expected = learner.act(observation, goal, explore=False)
    assert torch.equal(policy_of(loaded)(observation, goal), expected)


def test_a_learner_goes_on_bit_by_bit(tmp_path: Path) -> None:
    learner = make_learner("actor.random_goal_share=0.5", "optimisation.max_grad_norm=1")
    for _ in range(3):
        learner.update(batch(), 1e-3)
    write(tmp_path / "last", learner, round=3)
    expected = [learner.update(batch(), 1e-3) for _ in range(3)]
    other = make_learner("actor.random_goal_share=0.5", "optimisation.max_grad_norm=1", "optimisation.seed=5")
    assert checkpoints.restore_learner(tmp_path / "last", other) == {"round": 3}
    for metrics in expected:
        found = other.update(batch(), 1e-3)
        assert found.keys() == metrics.keys()
        assert all(torch.equal(found[name], metrics[name]) for name in metrics)
    for mine, its in zip(learner.actor.parameters(), other.actor.parameters(), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("file", ["actor.safetensors", "critic.safetensors", "optimizers.safetensors", "state.json"])
def test_a_damaged_file_is_named(tmp_path: Path, file: str) -> None:
    learner = make_learner()
    write(tmp_path / "last", learner, round=1)
    path = tmp_path / "last" / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=rf"{file}: is not the file that was written"):
        checkpoints.restore_learner(tmp_path / "last", learner)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other", "format_version": 1}'])
def test_a_record_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path / "best", make_learner())
    (tmp_path / "best" / "checkpoint.json").write_text(text)
    with pytest.raises(DamagedCheckpointError, match="best"):
        checkpoints.load_actor(tmp_path / "best")


def test_what_has_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match="none"):
        checkpoints.load_actor(tmp_path / "none")


CALLS = ("mkdir", "write_bytes", "write_text", "rename", "rmtree", "exchange")


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("moment", range(1, 12))
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, moment: int, exchanges: bool) -> None:
    folder = tmp_path / "last"
    learner = make_learner()
    write(folder, learner, round=1)
    child = os.fork()
    if child == 0:
        _write_and_die(folder, learner, moment, exchanges)
    _, status = os.waitpid(child, 0)
    died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert died or os.waitstatus_to_exitcode(status) == 0
    if exchanges:
        assert checkpoints.read_record(folder)  # even before anything was mended
    checkpoints.recover(folder)
    state = checkpoints.restore_learner(folder, learner)
    assert state["round"] in ((1, 2) if died else (2,))
    write(folder, learner, round=3)  # what was left behind is in nobody's way
    assert checkpoints.restore_learner(folder, learner)["round"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def _write_and_die(folder: Path, learner: Learner, moment: int, exchanges: bool) -> None:
    """Kills this process before the call with that number among all that change the disk."""
    calls = 0

    def dying(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("mkdir", "write_bytes", "write_text", "rename"):
        setattr(Path, name, dying(getattr(Path, name)))
    checkpoints.shutil.rmtree = dying(checkpoints.shutil.rmtree)
    exchange = checkpoints._exchange if exchanges else lambda first, second: False
    checkpoints._exchange = dying(exchange)
    write(folder, learner, round=2)
    os._exit(0)


def test_the_learner_s_actions_are_within_bounds_and_random_only_when_exploring() -> None:
    learner = make_learner()
    observation, goal = torch.randn(4, 5) * 10, torch.randn(4, 3) * 10
    once, twice = (learner.act(observation, goal, explore=False) for _ in range(2))
    assert torch.equal(once, twice)
    sampled, again = (learner.act(observation, goal, explore=True) for _ in range(2))
    assert not torch.equal(sampled, again)
    assert sampled.abs().max() <= 1


def test_an_update_leaves_the_actor_s_gradient_out_of_the_critic() -> None:
    """The critic's step is that of its own loss alone: with another actor it is the same."""
    first, second = make_learner(), make_learner()
    with torch.no_grad():
        for parameter in second.actor.parameters():
            parameter.add_(0.1)
    for learner in (first, second):
        learner.update(batch(), 1e-3)
    for mine, its in zip(first.critic.parameters(), second.critic.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_without_a_temperature_there_is_none() -> None:
    learner = make_learner("actor.temperature=none")
    metrics = learner.update(batch(), 1e-3)
    assert learner.log_alpha is None
    assert "alpha" not in metrics
    assert metrics["actor_loss"].item() == pytest.approx(-metrics["energy"].item())


def test_the_temperature_falls_while_the_entropy_is_above_its_target() -> None:
    learner = make_learner("actor.target_entropy_per_action=-10")
    before = learner.update(batch(), 1e-2)["alpha"]
    assert learner.update(batch(), 1e-2)["alpha"] < before


def test_random_goals_change_the_actor_s_loss_only() -> None:
    own, others = make_learner(), make_learner("actor.random_goal_share=1")
    metrics, changed = own.update(batch(), 1e-3), others.update(batch(), 1e-3)
    assert torch.equal(metrics["critic_loss"], changed["critic_loss"])
    assert metrics["actor_loss"] != changed["actor_loss"]


def test_a_network_that_is_no_number_any_more_is_seen() -> None:
    learner = make_learner()
    assert torch.isfinite(learner.parameter_norm())
    with torch.no_grad():
        next(learner.critic.goal_head.parameters())[0, 0] = float("nan")
    assert not torch.isfinite(learner.parameter_norm())


def test_the_normalizer_makes_mean_0_and_deviation_1_and_blows_up_nothing() -> None:
    learner = Learner(tiny_run("networks.normalize_inputs=true"), replace(SPEC, observation_size=2), CPU)
    observations = torch.randn(4000, 2) * torch.tensor([3.0, 0.0]) + 7
    goals = torch.randn(4000, 3)
    learner.normalizer.set_from(observations.numpy(), goals.numpy())
    normalized = learner.normalizer.observation(observations)
    assert normalized.mean(0).tolist() == pytest.approx([0, 0], abs=1e-3)
    assert normalized.std(0)[0].item() == pytest.approx(1, abs=1e-3)
    assert normalized.abs().max() < 10
    together = learner.normalizer(torch.cat([observations, goals], dim=-1))
    assert torch.equal(together, torch.cat([normalized, learner.normalizer.goal(goals)], dim=-1))
