"""What an environment says wrongly is refused where it is said, with its name, the value and what it must be."""

import numpy as np
import pytest

from gated_serving.rl.environments import EnvironmentFailedError, UnusableEnvironmentError, make_vector_environment
from gated_serving.rl.settings import EnvironmentSettings, RuntimeSettings

FAULTY = "faulty_goal_environments"


def step_once(environment_id: str, **kwargs):
    environment = make_vector_environment(environment_id, num_environments=2, num_processes=0, seed=0, kwargs=kwargs)
    environment.reset()
    return environment.step(np.zeros((2, 2), np.float32))


@pytest.mark.parametrize("value", [float("nan"), "False", 2, [True], None])
def test_success_that_is_neither_true_nor_false_is_refused(value):
    with pytest.raises(EnvironmentFailedError, match=r"is_success is .*must be True or False"):
        step_once(f"{FAULTY}:Saying", info={"is_success": value})


@pytest.mark.parametrize("value", [True, np.bool_(True), 1, 1.0, np.float32(1)])
def test_success_may_be_said_in_any_usual_way(value):
    assert step_once(f"{FAULTY}:Saying", info={"is_success": value}).success.all()


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        ({"observation": [1e300, 0.0]}, "not a finite number in float32"),
        ({"desired_goal": [float("inf"), 0.0]}, "not a finite number in float32"),
        ({"observation": 3.0}, r"observation has shape \(\)"),
        ({"observation": [1.0, 2.0, 3.0]}, r"observation has shape \(3,\)"),
        ({"observation": [[1.0], [2.0]]}, r"observation has shape \(2, 1\)"),
        ({"observation": "here"}, "gave no observation of 2 numbers"),
        ({"achieved_goal": None}, "gave no achieved_goal of 2 numbers"),
    ],
)
def test_observations_that_do_not_fit_are_refused(observation, message):
    with pytest.raises(EnvironmentFailedError, match=message):
        step_once(f"{FAULTY}:Saying", observation=observation)


def test_an_environment_cannot_end_the_program():
    with pytest.raises(EnvironmentFailedError, match="SystemExit"):
        step_once(f"{FAULTY}:Leaving")


def test_wide_action_bounds_are_scaled_without_overflow():
    np.testing.assert_allclose(step_once(f"{FAULTY}:WideActions").final.observation, 0.0, atol=1e-6)


def test_an_environment_without_values_is_refused():
    with pytest.raises(UnusableEnvironmentError, match="observation has no values"):
        step_once("tiny_goal_environment:PointReach", num_axes=0)


@pytest.mark.parametrize("length", [0, -1, 1.5, "20", True])
def test_episode_lengths_are_whole_numbers(length):
    with pytest.raises(UnusableEnvironmentError, match="max_episode_steps="):
        step_once("tiny_goal_environment:PointReach", max_episode_steps=length)


def test_settings_refuse_what_cannot_be_passed_on():
    with pytest.raises(ValueError, match="environment_id"):
        EnvironmentSettings(id="FetchReach-v4", kwargs={"environment_id": "a"})
    with pytest.raises(ValueError, match="num_threads"):
        RuntimeSettings(num_threads=10**18)
