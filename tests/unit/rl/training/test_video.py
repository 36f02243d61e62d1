from __future__ import annotations

from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from tiny_policy_training import tiny_run

from gated_serving.rl.environments import UnusableEnvironmentError
from gated_serving.rl.settings import EnvironmentSettings
from gated_serving.rl.training.session import train
from gated_serving.rl.training.video import check_video, record_episode

DRAWN = EnvironmentSettings(id="tiny_drawn_environment:DrawnPointReach")


def test_a_film_shows_the_policy_reach_its_goal(tmp_path: Path) -> None:
    check_video(DRAWN)
    path = tmp_path / "episode.mp4"
    record_episode(path, lambda observation, goal: torch.clamp((goal - observation) * 5, -1, 1), DRAWN, seed=4)
    frames = imageio.imread(path)
    assert frames.shape == (20, 64, 64, 3)  # one a step; 20 steps an episode
    assert imageio.immeta(path)["fps"] == 10

    def red(frame: np.ndarray) -> int:
        return int(((frame[..., 0] > 128) & (frame[..., 1] < 64)).sum())

    assert red(frames[0]) > 40
    assert red(frames[-1]) < 20  # the point covers it
    assert [each.name for each in tmp_path.iterdir()] == ["episode.mp4"]


def test_an_environment_without_pictures_is_refused() -> None:
    with pytest.raises(UnusableEnvironmentError, match=r"evaluation\.video=True: .* or set evaluation\.video=false"):
        check_video(EnvironmentSettings(id="tiny_goal_environment:PointReach"))


def test_a_run_with_a_film_ends_with_it(tmp_path: Path) -> None:
    nothing = [f"{stage}.{field}=0" for stage in ("explore", "finetune")
               for field in ("num_updates", "num_environment_steps")]  # fmt: skip
    run = tiny_run(f"environment.id={DRAWN.id}", "evaluation.video=true", *nothing)
    train(run, tmp_path / "run")
    assert len(imageio.imread(tmp_path / "run" / "episode.mp4")) == 20
