"""An episode of a policy as a film."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gated_serving.rl.environments import GoalObservation, UnusableEnvironmentError, make_goal_environment, spec_of
from gated_serving.rl.environments.rendering import RenderingError, render_episode
from gated_serving.rl.settings import EnvironmentSettings

VIDEO = "episode.mp4"
_ADVICE = "or set evaluation.video=false"


def check_video(settings: EnvironmentSettings) -> None:
    """Renders an episode of one step, so that what is missing shows before hours of training.

    Raises:
        UnusableEnvironmentError: Films cannot be made here, or the environment cannot be made; says what is missing.
    """
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise UnusableEnvironmentError(
            f"evaluation.video=True: {error}; pip install 'imageio[ffmpeg]', {_ADVICE}"
        ) from error
    environment = make_goal_environment(settings.id, **settings.kwargs)
    try:
        action_size = spec_of(environment, settings.id).action_size
    finally:
        environment.close()
    one_step = {**settings.kwargs, "max_episode_steps": 1}
    try:
        render_episode(settings.id, lambda _: np.zeros((1, action_size), np.float32), seed=0, kwargs=one_step)
    except RenderingError as error:
        raise UnusableEnvironmentError(f"evaluation.video=True: {error}; {_ADVICE}") from error


def record_episode(
    path: Path, act: Callable[[Tensor, Tensor], Tensor], settings: EnvironmentSettings, *, seed: int
) -> None:
    """Writes the first episode of a seed as an MP4 file, as fast as the robot moves.

    Args:
        path: The file.
        act: From observations [1, O] and desired goals [1, G] to actions [1, A] in [-1, 1].
        settings: The environment.
        seed: Of the episodes.

    Raises:
        RenderingError: The environment cannot be rendered any more.
    """
    import imageio.v2 as imageio

    def policy(seen: GoalObservation) -> npt.NDArray[np.float32]:
        return act(torch.from_numpy(seen.observation), torch.from_numpy(seen.desired_goal)).numpy()

    episode = render_episode(settings.id, policy, seed=seed, kwargs=settings.kwargs)
    partial = path.with_name(f".partial.{path.name}")
    imageio.mimwrite(partial, list(episode.frames), fps=episode.frames_per_second, macro_block_size=2)
    partial.replace(path)
