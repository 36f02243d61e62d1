import numpy as np
import pytest

from gated_serving.rl.environments.rendering import RenderingError, render_episode


def forward(observation) -> np.ndarray:
    gap = observation.desired_goal - observation.achieved_goal
    return np.append(np.clip(10 * gap, -1, 1), [[0.0]], axis=1)


def test_an_episode_is_rendered_to_frames():
    try:
        episode = render_episode("FetchReach-v4", forward, seed=0, max_frames=20)
    except RenderingError as error:
        pytest.skip(f"no OpenGL here: {error}")
    assert episode.frames.dtype == np.uint8
    assert episode.frames.shape == (17, 480, 480, 3)  # every third of 50 steps
    assert episode.frames_per_second == pytest.approx(25 / 3)
    assert episode.num_steps == 50
    assert episode.success
    assert (episode.frames[0] != episode.frames[-1]).any()
    assert episode.frames.std() > 5


def test_an_opengl_that_is_not_there_is_an_error_and_not_the_end_of_the_process(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    monkeypatch.setenv("PYOPENGL_PLATFORM", "no-such-platform")
    with pytest.raises(RenderingError, match=r"FetchReach-v4 cannot be rendered: (.|\n)*install EGL"):
        render_episode("FetchReach-v4", forward, seed=0, kwargs={"max_episode_steps": 2})


def test_an_environment_without_pictures_says_so():
    with pytest.raises(RenderingError, match="tiny_goal_environment:PointReach cannot be rendered"):
        render_episode("tiny_goal_environment:PointReach", lambda _: np.zeros((1, 2)), seed=0)
