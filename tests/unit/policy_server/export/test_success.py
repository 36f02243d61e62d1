import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
import pytest
from policy_checkpoint import make_policy_checkpoint

from policy_server.export.policy import TrainedPolicy
from policy_server.export.residual_actor import read_residual_actor
from policy_server.export.success import FIRST_SEED, EnvironmentUnavailableError, success_rate
from policy_server.manifest import Outputs

NUM_STEPS = 5


class SeededGoal(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """At its goal in the last step of episodes with an even seed; if asked, early in all too."""

    made: ClassVar[list["SeededGoal"]] = []

    def __init__(self, says_success: bool = True, early: bool = False) -> None:
        self.early = early
        self.says_success, self.seeds, self.actions = says_success, list[int](), list[np.ndarray]()
        self.closed = False
        self.made.append(self)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        assert seed is not None
        self.seeds.append(seed)
        self.rng, self.step_number = np.random.default_rng(seed), 0
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action.shape == (4,)
        self.actions.append(action)
        self.step_number += 1
        last = self.step_number == NUM_STEPS
        at_goal = (last and self.seeds[-1] % 2 == 0) or (self.early and self.step_number == 2)
        info = {"is_success": float(at_goal)} if self.says_success else {}
        return self.observe(), 0.0, False, last, info

    def observe(self) -> dict[str, np.ndarray]:
        return {"observation": self.rng.normal(size=10), "desired_goal": self.rng.normal(size=3)}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def policy(tmp_path: Path) -> TrainedPolicy:
    return read_residual_actor(make_policy_checkpoint(tmp_path / "checkpoint", max_episode_steps=50))


@pytest.fixture
def file(policy: TrainedPolicy, tmp_path: Path) -> Path:
    path = tmp_path / "policy.onnx"
    path.write_bytes(policy.build_graph(Outputs.ACTION).SerializeToString())
    return path


@pytest.fixture(autouse=True)
def made() -> list[SeededGoal]:
    SeededGoal.made = []
    return SeededGoal.made


@pytest.mark.parametrize(("num_episodes", "num_environments"), [(7, 1), (7, 3), (2, 8), (9, 8)])
def test_every_seed_is_played_once_whatever_the_number_of_environments(
    policy: TrainedPolicy, file: Path, num_episodes: int, num_environments: int
) -> None:
    rate = success_rate(
        file, policy, lambda _: SeededGoal(), num_episodes=num_episodes, num_environments=num_environments
    )
    assert rate == (num_episodes + 1) // 2 / num_episodes
    seeds = sorted(seed for one in SeededGoal.made for seed in one.seeds)
    assert seeds == list(range(FIRST_SEED, FIRST_SEED + num_episodes))
    assert len(SeededGoal.made) == min(num_episodes, num_environments)
    assert all(one.closed for one in SeededGoal.made)


def test_actions_are_those_of_the_file_for_each_own_observation(policy: TrainedPolicy, file: Path) -> None:
    success_rate(file, policy, lambda _: SeededGoal(), num_episodes=3, num_environments=3)
    together = {one.seeds[0]: np.array(one.actions) for one in SeededGoal.made}
    SeededGoal.made.clear()
    success_rate(file, policy, lambda _: SeededGoal(), num_episodes=3, num_environments=1)
    alone = np.array(SeededGoal.made[0].actions).reshape(3, NUM_STEPS, 4)
    for index in range(3):
        np.testing.assert_allclose(together[FIRST_SEED + index], alone[index], atol=1e-5)
    assert len({action.tobytes() for action in alone[:, 0]}) == 3


@pytest.mark.parametrize(("success_at", "rate"), [("end", 0.5), ("any", 1.0)])
def test_success_counts_as_training_counted_it(
    policy: TrainedPolicy, file: Path, success_at: Literal["end", "any"], rate: float
) -> None:
    training = policy.training.model_copy(update={"success_at": success_at})
    policy = dataclasses.replace(policy, training=training)
    assert success_rate(file, policy, lambda _: SeededGoal(early=True), num_episodes=4) == rate


def test_an_episode_ends_at_the_policys_own_limit(tmp_path: Path) -> None:
    policy = read_residual_actor(make_policy_checkpoint(tmp_path / "short", max_episode_steps=NUM_STEPS - 1))
    path = tmp_path / "short.onnx"
    path.write_bytes(policy.build_graph(Outputs.ACTION).SerializeToString())
    assert success_rate(path, policy, lambda _: SeededGoal(), num_episodes=4) == 0


def test_an_environment_that_cannot_be_made_is_named(policy: TrainedPolicy, file: Path) -> None:
    def fail(_: str) -> gymnasium.Env[Any, Any]:
        raise ImportError("no module named mujoco")

    with pytest.raises(
        EnvironmentUnavailableError, match=r"FetchReach-v4 cannot be made here \(no module named mujoco"
    ):
        success_rate(file, policy, fail, num_episodes=2)


def test_an_environment_that_is_silent_about_success_is_refused_and_closed(policy: TrainedPolicy, file: Path) -> None:
    with pytest.raises(EnvironmentUnavailableError, match="FetchReach-v4 says in none of"):
        success_rate(file, policy, lambda _: SeededGoal(says_success=False), num_episodes=2)
    assert all(one.closed for one in SeededGoal.made)
