import subprocess
import sys

import numpy as np
import pytest
import tiny_goal_environment
from gymnasium.spaces import Box, Dict, Discrete

from gated_serving.rl.environments import (
    EnvironmentFailedError,
    UnusableEnvironmentError,
    make_goal_environment,
    make_vector_environment,
    spec_of,
)

POINT = "tiny_goal_environment:PointReach"
FAULTY = "faulty_goal_environments"


def play(environment, num_steps: int, seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    shape = (environment.num_environments, environment.spec.action_size)
    return [environment.step(rng.uniform(-1, 1, shape)) for _ in range(num_steps)]


def flat(steps: list) -> np.ndarray:
    rows = []
    for step in steps:
        moments = [part for moment in (step.observation, step.final) for part in vars(moment).values()]
        rows.append(np.concatenate([*moments, np.stack([step.terminated, step.truncated, step.success], 1)], axis=1))
    return np.array(rows)


def test_the_spec_says_what_a_policy_has_to_fit():
    environment = make_vector_environment(POINT, num_environments=3, kwargs={"num_axes": 4})
    spec = environment.spec
    assert (spec.observation_size, spec.goal_size, spec.action_size, spec.num_environments) == (4, 4, 4, 3)
    assert spec.max_episode_steps == tiny_goal_environment.PointReach.max_episode_steps
    assert spec.action_low == (-1.0,) * 4
    assert spec.observation_fields == ("observation", "desired_goal")


def test_an_episode_that_ends_is_followed_by_the_next_in_the_same_step():
    environment = make_vector_environment(POINT, num_environments=2, seed=1, kwargs={"max_episode_steps": 5})
    before = environment.reset()
    for number, step in enumerate(play(environment, 10), start=1):
        ends = number % 5 == 0
        assert step.truncated.tolist() == [ends, ends]
        assert not step.terminated.any()
        np.testing.assert_array_equal(step.final.desired_goal, before.desired_goal)
        moved = np.abs(step.final.observation - before.observation).max()
        assert moved <= tiny_goal_environment.PointReach.step_size + 1e-6
        same_episode = np.array_equal(step.observation.desired_goal, step.final.desired_goal)
        assert same_episode is not ends
        before = step.observation


def test_success_is_what_info_says():
    environment = make_vector_environment(POINT, num_environments=4, seed=1)
    observation = environment.reset()
    ever = np.zeros(4, dtype=bool)
    for _ in range(20):
        gap = observation.desired_goal - observation.achieved_goal
        step = environment.step(np.clip(gap / tiny_goal_environment.PointReach.step_size, -1, 1))
        distance = np.linalg.norm(step.final.achieved_goal - step.final.desired_goal, axis=1)
        np.testing.assert_array_equal(step.success, distance <= tiny_goal_environment.PointReach.radius)
        ever |= step.success
        observation = step.observation
    assert ever.all()


def test_every_environment_and_every_episode_has_a_seed_of_its_own_and_a_run_repeats():
    environment = make_vector_environment(POINT, num_environments=3, seed=5, kwargs={"max_episode_steps": 4})
    first = [environment.reset(), *(step.observation for step in play(environment, 12)[3::4])]
    goals = np.concatenate([observation.desired_goal for observation in first])
    assert len(np.unique(goals, axis=0)) == 12
    again = environment.reset(5)
    np.testing.assert_array_equal(again.desired_goal, first[0].desired_goal)
    assert not np.array_equal(environment.reset(6).desired_goal, first[0].desired_goal)


def test_a_restored_environment_begins_the_next_episodes():
    arguments = {"num_environments": 2, "seed": 5, "kwargs": {"max_episode_steps": 4}}
    unbroken = make_vector_environment(POINT, **arguments)
    unbroken.reset()
    play(unbroken, 6)
    state = unbroken.state()
    resumed = make_vector_environment(POINT, **{**arguments, "seed": 77})
    resumed.restore(state)
    with pytest.raises(ValueError, match="before reset"):
        resumed.step(np.zeros((2, 2)))
    np.testing.assert_array_equal(resumed.reset().desired_goal, unbroken.reset().desired_goal)
    np.testing.assert_array_equal(flat(play(resumed, 9)), flat(play(unbroken, 9)))
    with pytest.raises(ValueError, match="of 2 environments: here are 3"):
        make_vector_environment(POINT, num_environments=3).restore(state)


def test_actions_are_clipped_and_scaled_to_the_environment_s_own_bounds():
    environment = make_vector_environment(f"{FAULTY}:Echo", num_environments=1)
    environment.reset()
    for action, expected in [([-1, -1], [-3, 0]), ([1, 1], [5, 10]), ([0, 0.5], [1, 7.5]), ([-9, 9], [-3, 10])]:
        step = environment.step([action])
        np.testing.assert_allclose(step.final.observation[0], expected)


@pytest.mark.parametrize(
    ("actions", "message"),
    [([[0.0]], r"shape \(1, 1\): must be \(1, 2\)"), ([[0.0, float("nan")]], "not finite, such as nan")],
)
def test_unusable_actions_are_refused(actions: list, message: str):
    environment = make_vector_environment(POINT, num_environments=1)
    environment.reset()
    with pytest.raises(ValueError, match=message):
        environment.step(actions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_environments": 0}, "num_environments=0"),
        ({"num_environments": 4, "num_processes": 3}, "num_processes=3: must be 0, or divide num_environments=4"),
        ({"num_environments": 1, "seed": -1}, "seed=-1"),
    ],
)
def test_numbers_that_do_not_fit_are_named(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_vector_environment(POINT, **changes)


BOX = Box(-1.0, 1.0, (2,), np.float32)
GOAL_SPACE = {"observation": BOX, "achieved_goal": BOX, "desired_goal": BOX}


@pytest.mark.parametrize(
    ("observation_space", "action_space", "message"),
    [
        (BOX, BOX, "its observation space is Box"),
        (Dict({"observation": BOX, "desired_goal": BOX}), BOX, r"Dict without \['achieved_goal'\]"),
        (Dict({**GOAL_SPACE, "observation": Box(0, 255, (8, 8), np.uint8)}), BOX, "observation is Box"),
        (
            Dict({**GOAL_SPACE, "desired_goal": Box(-1.0, 1.0, (3,))}),
            BOX,
            "achieved_goal has 2 values and desired_goal 3",
        ),
        (Dict(GOAL_SPACE), Discrete(4), r"its actions are Discrete\(4\); only continuous ones"),
        (Dict(GOAL_SPACE), Box(-np.inf, np.inf, (2,)), "not bounded"),
    ],
)
def test_what_is_no_goal_environment_is_refused(observation_space, action_space, message: str):
    environment = tiny_goal_environment.PointReach()
    environment.observation_space, environment.action_space = observation_space, action_space
    with pytest.raises(UnusableEnvironmentError, match=message):
        spec_of(environment, "mine")


@pytest.mark.parametrize(
    ("environment_id", "kwargs", "message"),
    [
        ("NoSuchThing-v0", {}, "NoSuchThing-v0: no such environment"),
        ("FetchReach-v4", {"colour": "red"}, "cannot be made with the arguments .*colour"),
        ("no_such_module:Thing", {}, "there is no module 'no_such_module'"),
        ("tiny_goal_environment:Thing", {}, "no class or function 'Thing'"),
        (POINT, {"colour": "red"}, "cannot be made with the arguments .*colour"),
        (f"{FAULTY}:not_an_environment", {}, "made a int, not a gymnasium.Env"),
        (f"{FAULTY}:Endless", {}, "length of its episodes is not known; give max_episode_steps"),
        ("metaworld:dance-v3", {}, "there is no such task; there are .*reach-v3"),
        (POINT, {"render_mode": "human"}, "training renders nothing"),
    ],
)
def test_what_cannot_be_made_is_refused(environment_id: str, kwargs: dict, message: str):
    with pytest.raises(UnusableEnvironmentError, match=message):
        make_vector_environment(environment_id, num_environments=1, kwargs=kwargs)


def test_a_length_can_be_given_to_an_environment_that_has_none():
    environment = make_vector_environment(f"{FAULTY}:Endless", num_environments=1, kwargs={"max_episode_steps": 3})
    assert environment.spec.max_episode_steps == 3
    environment.reset()
    assert [bool(step.truncated[0]) for step in play(environment, 6)] == [False, False, True] * 2


def test_a_registered_id_of_a_module_is_found():
    environment = make_goal_environment(f"{FAULTY}:FaultyTestPoint-v0")
    assert environment.spec is not None
    assert environment.spec.max_episode_steps == 7


def test_modules_in_the_current_folder_are_found(tmp_path, monkeypatch):
    (tmp_path / "environment_of_mine.py").write_text("from tiny_goal_environment import PointReach as Mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert spec_of(make_goal_environment("environment_of_mine:Mine"), "mine").goal_size == 2


def test_a_module_that_fails_to_import_something_says_what(tmp_path, monkeypatch):
    (tmp_path / "broken_environment.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        make_goal_environment("broken_environment:Mine")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raising", "environment 0 failed in step:\n(.|\n)*ValueError: the motor is stuck"),
        ("Silent", r"its info has neither of \['is_success', 'success'\], only \['distance'\]"),
        ("Lost", "achieved_goal is .*nan.* in environment 0: not a finite number"),
    ],
)
def test_an_environment_that_fails_says_how(name: str, message: str):
    environment = make_vector_environment(f"{FAULTY}:{name}", num_environments=1)
    environment.reset()
    with pytest.raises(EnvironmentFailedError, match=message):
        play(environment, 3)


def test_the_achieved_goal_can_be_put_before_the_observation():
    environment = make_goal_environment(POINT, achieved_goal_in_observation=True)
    observation, _ = environment.reset(seed=0)
    np.testing.assert_array_equal(observation["observation"], np.tile(observation["achieved_goal"], 2))
    assert spec_of(environment, POINT).observation_size == 4


@pytest.mark.parametrize(
    ("environment_id", "sizes", "control_period_s", "max_episode_steps"),
    [
        ("FetchReach-v4", (10, 3, 4), 0.04, 50),
        ("FetchPush-v4", (25, 3, 4), 0.04, 50),
        ("FetchSlide-v4", (25, 3, 4), 0.04, 50),
        ("FetchPickAndPlace-v4", (25, 3, 4), 0.04, 50),
        ("PointMaze_UMaze-v3", (4, 2, 2), 0.01, 300),
        ("AntMaze_UMaze-v5", (107, 2, 8), 0.05, 700),
        ("metaworld:reach-v3", (36, 3, 4), 0.0125, 500),
        ("metaworld:push-v3", (36, 3, 4), 0.0125, 500),
    ],
)
def test_known_environments_work_and_repeat_exactly(environment_id, sizes, control_period_s, max_episode_steps):
    environment = make_vector_environment(environment_id, num_environments=1, seed=3)
    spec = environment.spec
    assert (spec.observation_size, spec.goal_size, spec.action_size) == sizes
    assert spec.control_period_s == pytest.approx(control_period_s)
    assert spec.max_episode_steps == max_episode_steps
    environment.reset()
    first = flat(play(environment, 12))
    assert np.isfinite(first).all()
    assert len(np.unique(first[:, 0, 0])) > 1
    other = environment.reset(4).desired_goal
    assert not np.array_equal(other, environment.reset(3).desired_goal)
    np.testing.assert_array_equal(flat(play(environment, 12)), first)
    environment.close()


def test_an_ant_in_a_maze_sees_where_it_is():
    environment = make_vector_environment("AntMaze_UMaze-v5", num_environments=1)
    seen = environment.reset()
    np.testing.assert_array_equal(seen.observation[:, :2], seen.achieved_goal)
    environment.close()


@pytest.mark.parametrize("task", ["reach-v3", "push-v3", "drawer-open-v3", "hammer-v3", "stick-push-v3"])
def test_a_task_of_metaworld_succeeds_where_the_achieved_goal_is_the_desired_one(task: str):
    policies = pytest.importorskip("metaworld.policies", reason="metaworld is not installed")
    policy = policies.ENV_POLICY_MAP[task]()
    environment = make_goal_environment(f"metaworld:{task}")
    observation, _ = environment.reset(seed=0)
    start = np.linalg.norm(observation["achieved_goal"] - observation["desired_goal"])
    for _ in range(200):
        whole = np.concatenate([observation["observation"], observation["desired_goal"]])
        observation, _, _, _, info = environment.step(np.clip(policy.get_action(whole), -1, 1))
        if info["success"]:
            break
    assert info["success"]
    distance = np.linalg.norm(observation["achieved_goal"] - observation["desired_goal"])
    assert distance < min(0.12, start)
    environment.close()


def test_importing_the_simulators_says_nothing_on_the_terminal():
    code = (
        "from gated_serving.rl.environments import make_goal_environment as make\n"
        "for id in ('FetchReach-v4', 'AntMaze_UMaze-v4', 'metaworld:reach-v3'): make(id).reset(seed=0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_torch_is_not_loaded_where_only_environments_are_stepped():
    code = "import sys, gated_serving.rl.environments; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
