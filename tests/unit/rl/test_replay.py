import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from gated_serving.rl.hindsight_reference import goal_probabilities
from gated_serving.rl.replay import EpisodeReplay, ReplayError

NUM_ENVIRONMENTS = 3


def make_replay(capacity: int, **changes) -> EpisodeReplay:
    sizes = {"num_environments": NUM_ENVIRONMENTS, "observation_size": 3, "goal_size": 2, "action_size": 1}
    return EpisodeReplay(capacity_per_environment=capacity, **{**sizes, **changes})


def starts_of(rng: np.random.Generator, num_steps: int, share: float) -> np.ndarray:
    starts = rng.random((num_steps, NUM_ENVIRONMENTS)) < share
    starts[0] = True
    return starts


def fill(replay: EpisodeReplay, starts: np.ndarray, first: int = 0) -> None:
    """Every value says which environment and step it is of."""
    numbers = np.arange(NUM_ENVIRONMENTS)
    for step, start in enumerate(starts, first):
        steps = np.full(NUM_ENVIRONMENTS, step)
        replay.append(
            observation=np.stack([numbers, steps, np.ones(NUM_ENVIRONMENTS)], axis=1),
            action=np.stack([steps / 1000], axis=1),
            next_achieved_goal=np.stack([numbers, steps + 1], axis=1),
            episode_start=start,
        )


def draws(replay: EpisodeReplay, num_draws: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Environment, step, and the moment its goal was achieved at; checks that they belong together."""
    batch = replay.sample(num_draws, np.random.default_rng(seed))
    observation, action, goal = batch.observation.numpy(), batch.action.numpy(), batch.goal.numpy()
    assert all(part.dtype == np.float32 for part in (observation, action, goal))
    environment, step = observation[:, 0].astype(int), observation[:, 1].astype(int)
    np.testing.assert_allclose(action[:, 0], step / 1000, rtol=1e-6)
    np.testing.assert_array_equal(goal[:, 0], environment)
    return environment, step, goal[:, 1].astype(int)


def same(a: EpisodeReplay, b: EpisodeReplay) -> bool:
    batches = [replay.sample(5000, np.random.default_rng(11)) for replay in (a, b)]
    parts = ("observation", "action", "goal")
    return a.num_episodes == b.num_episodes and all(
        np.array_equal(getattr(batches[0], part), getattr(batches[1], part)) for part in parts
    )


@pytest.mark.parametrize("seed", range(40))
def test_goals_lie_ahead_in_the_same_episode_whatever_the_layout(seed: int):
    rng = np.random.default_rng(seed)
    capacity, num_steps = int(rng.integers(1, 60)), int(rng.integers(1, 200))
    starts = starts_of(rng, num_steps, share=rng.choice([0.02, 0.1, 0.5, 1.0]))
    replay = make_replay(capacity)
    fill(replay, starts)
    environment, step, goal_moment = draws(replay, 3000, seed)
    episode = starts.cumsum(axis=0)
    assert (goal_moment > step).all()
    assert (episode[goal_moment - 1, environment] == episode[step, environment]).all()
    oldest = max(0, num_steps - capacity)
    assert step.min() >= oldest
    assert replay.num_steps == (num_steps - oldest) * NUM_ENVIRONMENTS
    assert replay.num_episodes == sum(len(set(episode[oldest:, e])) for e in range(NUM_ENVIRONMENTS))


def test_every_kept_step_is_drawn_and_its_goal_may_be_the_final_observation():
    replay = make_replay(10)
    fill(replay, starts_of(np.random.default_rng(0), 25, share=0.3))
    environment, step, goal_moment = draws(replay, 5000)
    assert set(zip(environment, step, strict=True)) == {(e, s) for e in range(NUM_ENVIRONMENTS) for s in range(15, 25)}
    assert goal_moment.max() == 25


def test_goals_over_the_seam_of_the_ring_follow_the_reference():
    # 50 slots, 70 steps: the episode of steps 40 to 64 lies over the end of the ring, that of 20 to 39 is whole.
    starts = np.zeros((70, NUM_ENVIRONMENTS), dtype=bool)
    starts[[0, 20, 40, 65]] = True
    replay = make_replay(50, gamma=0.9)
    fill(replay, starts)
    num_draws = 400_000
    _, step, goal_moment = draws(replay, num_draws)
    expected = goal_probabilities([20, 25, 5], 0.9) / 50 * num_draws
    observed = np.zeros((50, 50))
    np.add.at(observed, (step - 20, goal_moment - 21), 1)
    assert observed[expected == 0].sum() == 0
    cells = expected >= 5
    chi_square = ((observed[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    assert abs(chi_square - cells.sum()) < 5 * np.sqrt(2 * cells.sum())


def test_an_episode_longer_than_the_ring_keeps_its_newest_steps():
    replay = make_replay(8)
    starts = np.zeros((100, NUM_ENVIRONMENTS), dtype=bool)
    starts[0] = True
    fill(replay, starts)
    _, step, goal_moment = draws(replay, 2000)
    assert step.min() == 92
    assert goal_moment.max() == 100
    assert replay.num_episodes == NUM_ENVIRONMENTS


def test_the_same_generator_draws_the_same_batch():
    replay = make_replay(50)
    fill(replay, starts_of(np.random.default_rng(0), 80, share=0.1))
    assert same(replay, replay)
    first, second = (replay.sample(100, np.random.default_rng(seed)) for seed in (1, 2))
    assert not np.array_equal(first.observation, second.observation)


def test_memory_and_files_draw_the_same(tmp_path: Path):
    starts = starts_of(np.random.default_rng(3), 130, share=0.1)
    in_memory = make_replay(50)
    on_disk = make_replay(50, folder=tmp_path / "replay")
    fill(in_memory, starts)
    fill(on_disk, starts)
    assert same(in_memory, on_disk)


def test_batches_are_not_views_of_the_ring():
    replay = make_replay(5)
    fill(replay, starts_of(np.random.default_rng(0), 5, share=0.1))
    before = replay.sample(50, np.random.default_rng(0))
    replay.sample(50, np.random.default_rng(0)).observation.fill_(99)
    assert np.array_equal(before.observation, replay.sample(50, np.random.default_rng(0)).observation)


@pytest.mark.parametrize("steps_before", [1, 20, 50, 63, 140])
@pytest.mark.parametrize("steps_lost", [0, 1, 30])
def test_restoring_is_exact_and_later_steps_do_not_show(tmp_path: Path, steps_before: int, steps_lost: int):
    rng = np.random.default_rng(steps_before)
    starts = starts_of(rng, steps_before + 30, share=0.07)
    unbroken = make_replay(50)
    fill(unbroken, starts[:steps_before])
    written = make_replay(50, folder=tmp_path, max_unsaved_steps=30)
    saved = 0
    while saved < steps_before:
        part = starts[saved : min(saved + 30, steps_before)]
        fill(written, part, saved)
        saved += len(part)
        state = json.loads(json.dumps(written.state()))
    fill(written, starts[steps_before : steps_before + steps_lost], steps_before)
    del written

    found = make_replay(50, folder=tmp_path, max_unsaved_steps=30)
    found.restore(state)
    assert same(found, unbroken)

    again = starts_of(rng, 30, share=0.2)
    fill(found, again, steps_before)
    fill(unbroken, again, steps_before)
    assert same(found, unbroken)


def test_the_state_before_the_last_is_restored_too(tmp_path: Path):
    starts = starts_of(np.random.default_rng(5), 160, share=0.1)
    unbroken = make_replay(50)
    fill(unbroken, starts[:100])
    written = make_replay(50, folder=tmp_path, max_unsaved_steps=30)
    states = []
    for first in range(0, 160, 20):
        fill(written, starts[first : first + 20], first)
        if first < 140:
            states.append(written.state())
    with pytest.raises(ReplayError, match="only the last two states"):
        make_replay(50, folder=tmp_path, max_unsaved_steps=30).restore(states[0])
    found = make_replay(50, folder=tmp_path, max_unsaved_steps=30)
    found.restore(states[4])  # of step 100; two more were taken, and 20 steps after them
    assert same(found, unbroken)


def test_steps_that_could_not_be_taken_back_are_refused(tmp_path: Path):
    replay = make_replay(50, folder=tmp_path, max_unsaved_steps=10)
    fill(replay, starts_of(np.random.default_rng(0), 60, share=0.1))
    replay.state()
    fill(replay, np.zeros((10, NUM_ENVIRONMENTS), dtype=bool), 60)
    replay.state()
    fill(replay, np.zeros((10, NUM_ENVIRONMENTS), dtype=bool), 70)
    with pytest.raises(ReplayError, match="at least every max_unsaved_steps=10"):
        fill(replay, np.zeros((1, NUM_ENVIRONMENTS), dtype=bool), 80)
    replay.state()
    fill(replay, np.zeros((10, NUM_ENVIRONMENTS), dtype=bool), 80)


def _write_until_killed(folder: Path, starts: np.ndarray, sender) -> None:
    replay = make_replay(50, folder=folder, max_unsaved_steps=30)
    fill(replay, starts[:90])
    sender.send(replay.state())
    fill(replay, starts[90:115], 90)
    os.kill(os.getpid(), signal.SIGKILL)


def test_kill_9_loses_nothing_of_the_last_state(tmp_path: Path):
    starts = starts_of(np.random.default_rng(8), 115, share=0.1)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_write_until_killed, args=(tmp_path, starts, sender))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    found, unbroken = make_replay(50, folder=tmp_path, max_unsaved_steps=30), make_replay(50)
    found.restore(receiver.recv())
    fill(unbroken, starts[:90])
    assert same(found, unbroken)


def test_a_first_step_must_begin_an_episode_everywhere(tmp_path: Path):
    middle = np.array([[True, False, True]])
    with pytest.raises(ValueError, match="environment 1"):
        fill(make_replay(5), middle)
    replay = make_replay(5, folder=tmp_path)
    fill(replay, np.ones((3, NUM_ENVIRONMENTS), dtype=bool))
    replay.restore(replay.state())
    with pytest.raises(ValueError, match="environment 1"):
        fill(replay, middle, 3)


def test_another_layout_or_another_format_is_refused(tmp_path: Path):
    replay = make_replay(5, folder=tmp_path)
    fill(replay, np.ones((3, NUM_ENVIRONMENTS), dtype=bool))
    state = replay.state()
    with pytest.raises(ReplayError, match=r"observation\.npy holds"):
        make_replay(6, folder=tmp_path)
    with pytest.raises(ReplayError, match="format_version=2"):
        replay.restore({**state, "format_version": 2})
    with pytest.raises(ReplayError, match="goal_size is 7"):
        replay.restore({**state, "layout": {**state["layout"], "goal_size": 7}})
    with pytest.raises(ReplayError, match="not in its files"):
        replay.restore({**state, "num_steps_taken": 4})


def test_what_is_asked_wrongly_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"gamma=1\.5"):
        make_replay(5, gamma=1.5)
    with pytest.raises(ValueError, match="capacity_per_environment=0"):
        make_replay(0)
    replay = make_replay(5)
    with pytest.raises(ReplayError, match="empty"):
        replay.sample(1, np.random.default_rng(0))
    with pytest.raises(ReplayError, match="in memory only"):
        replay.state()
    with pytest.raises(ValueError, match=r"action has the shape \(3, 2\)"):
        replay.append(
            observation=np.zeros((3, 3)), action=np.zeros((3, 2)), next_achieved_goal=np.zeros((3, 2)),
            episode_start=np.ones(3, bool),
        )  # fmt: skip
    (tmp_path / "file").write_text("")
    with pytest.raises(ReplayError, match="give another folder"):
        make_replay(5, folder=tmp_path / "file")


def test_the_size_foretold_is_the_size_on_disk(tmp_path: Path):
    sizes = {"num_environments": 3, "observation_size": 3, "goal_size": 2, "action_size": 1}
    make_replay(500, folder=tmp_path, max_unsaved_steps=100)
    found = sum(path.stat().st_size for path in tmp_path.iterdir())
    foretold = EpisodeReplay.num_bytes(capacity_per_environment=500, max_unsaved_steps=100, **sizes)
    assert foretold < found < foretold + 6 * 256  # and a header each
