from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gated_serving.rl.environments import make_vector_environment
from gated_serving.rl.settings import MAX_SEED
from gated_serving.rl.training.evaluation import EVALUATION_SEED, FINAL_SEED, Evaluation, evaluate

POINT = "tiny_goal_environment:PointReach"


def towards(observation: Tensor, goal: Tensor) -> Tensor:
    return ((goal - observation) / 0.2).clamp(-1, 1)


def stay(observation: Tensor, goal: Tensor) -> Tensor:
    return torch.zeros_like(observation)


def measure(act, *, num_environments: int = 4, num_episodes: int = 10, seed: int = 3, **kwargs) -> Evaluation:
    with make_vector_environment(POINT, num_environments=num_environments, **kwargs) as environments:
        return evaluate(act, environments, num_episodes=num_episodes, seed=seed, success="end")


def test_a_policy_that_goes_to_the_goal_succeeds_and_one_that_stays_does_not() -> None:
    perfect, idle = measure(towards), measure(stay)
    assert perfect.success_rate == perfect.success_rate_end == perfect.success_rate_any == 1
    assert perfect.final_distance == pytest.approx(0, abs=1e-5)
    assert 0.4 < perfect.time_at_goal < 1
    assert idle.success_rate <= 0.1
    assert idle.final_distance > 0.3
    assert perfect.rank > idle.rank
    assert perfect.num_episodes == 10


def test_a_goal_that_is_left_again_counts_at_any_step_only() -> None:
    class Passing:
        step = 0

        def __call__(self, observation: Tensor, goal: Tensor) -> Tensor:
            self.step += 1
            return towards(observation, goal) if self.step % 20 else -torch.ones_like(goal)  # the last of 20 steps

    with make_vector_environment(POINT, num_environments=4) as environments:
        found = evaluate(Passing(), environments, num_episodes=8, seed=1, success="any")
    assert found.success_rate == found.success_rate_any == 1
    assert found.success_rate_end < 0.5  # only where the way back ends at the wall


def test_episodes_are_the_same_again_whatever_happened_before() -> None:
    with make_vector_environment(POINT, num_environments=3, seed=9) as environments:
        first = evaluate(stay, environments, num_episodes=7, seed=5, success="end")
        environments.reset()
        environments.step(np.zeros((3, 2)))
        again = evaluate(stay, environments, num_episodes=7, seed=5, success="end")
        other = evaluate(stay, environments, num_episodes=7, seed=6, success="end")
    assert again == first
    assert other.final_distance != first.final_distance


def test_episodes_are_spread_evenly_over_the_environments() -> None:
    starts: list[tuple[float, ...]] = []

    def remember(observation: Tensor, goal: Tensor) -> Tensor:
        starts.extend(tuple(row) for row in goal.tolist())
        return stay(observation, goal)

    found = measure(remember, num_environments=4, num_episodes=6)
    goals = list(dict.fromkeys(starts))
    assert found.num_episodes == 6
    assert len(goals) == 8  # two rounds of four episodes; the last two are begun and not counted


def test_the_seeds_are_beyond_those_of_any_training() -> None:
    assert len({EVALUATION_SEED, FINAL_SEED}) == 2
    assert min(EVALUATION_SEED, FINAL_SEED) > MAX_SEED
