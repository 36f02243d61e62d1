"""Frames of one episode, for a video.

The episode is played here and rendered in a process of its own, which plays the same actions from the same seed again:
an OpenGL that is missing or broken can end a process without a word, and must not end a training.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from gated_serving.rl.environments.errors import GoalEnvironmentError
from gated_serving.rl.environments.group import EnvironmentGroup, raise_failure
from gated_serving.rl.environments.making import make_goal_environment
from gated_serving.rl.environments.spec import GoalEnvironmentSpec
from gated_serving.rl.environments.vector import GoalObservation, make_vector_environment

Policy = Callable[[GoalObservation], npt.ArrayLike]
"""From what one environment shows, [1, ...], to actions in [-1, 1], [1, A]."""


class RenderingError(GoalEnvironmentError):
    """This machine or this environment cannot render."""


@dataclass(frozen=True)
class RenderedEpisode:
    """One episode as pictures.

    Args:
        frames: [number of frames, height, width, 3], bytes.
        frames_per_second: At which it plays as fast as the environment's own time.
        success: Whether the goal was reached at any step.
        num_steps: Length of the episode.
    """

    frames: npt.NDArray[np.uint8]
    frames_per_second: float
    success: bool
    num_steps: int


def render_episode(
    environment_id: str, policy: Policy, *, seed: int, kwargs: Mapping[str, Any] | None = None, max_frames: int = 300
) -> RenderedEpisode:
    """Plays the first episode of a seed and renders it.

    Args:
        environment_id: See ``make_goal_environment``.
        policy: Called at every step.
        seed: As of ``make_vector_environment``.
        kwargs: Arguments of the environment.
        max_frames: At most so many frames; of longer episodes only every second step, every third, and so on is shown.

    Raises:
        RenderingError: The environment has no pictures, or OpenGL does not work here.
        GoalEnvironmentError: The environment cannot be made, or failed.
    """
    kwargs = dict(kwargs or {})
    actions: list[npt.NDArray[Any]] = []
    success = done = False
    with make_vector_environment(environment_id, num_environments=1, seed=seed, kwargs=kwargs) as environment:
        spec = environment.spec
        observation = environment.reset()
        while not done:
            actions.append(np.asarray(policy(observation), dtype=np.float32))
            step = environment.step(actions[-1])
            observation, done, success = step.observation, bool(step.done[0]), success or bool(step.success[0])
    stride = -(-(len(actions) + 1) // max_frames)
    frames = _render_elsewhere(spec, kwargs, seed, actions, stride)
    return RenderedEpisode(
        frames=frames,
        frames_per_second=1.0 / ((spec.control_period_s or 0.04) * stride),
        success=success,
        num_steps=len(actions),
    )


def _render_elsewhere(
    spec: GoalEnvironmentSpec, kwargs: dict[str, Any], seed: int, actions: list[npt.NDArray[Any]], stride: int
) -> npt.NDArray[np.uint8]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_render, args=(spec, kwargs, seed, actions, stride, sender), daemon=True)
    process.start()
    sender.close()
    frames: list[npt.NDArray[np.uint8]] = []
    try:
        while (received := receiver.recv()) is not None:
            if isinstance(received, str):
                raise RenderingError(f"{spec.id} cannot be rendered: {received}")
            frames.append(received)
    except EOFError:
        process.join()
        raise RenderingError(
            f"{spec.id} cannot be rendered: the process that tried ended with {process.exitcode}; {_ADVICE}"
        ) from None
    finally:
        receiver.close()
        process.kill()
        process.join()
    return np.stack(frames)


_ADVICE = (
    "on a machine without a display install EGL (Debian: libegl1 and libgl1-mesa-dri) and set MUJOCO_GL=egl, or "
    "install OSMesa (Debian: libosmesa6) and set MUJOCO_GL=osmesa"
)


def _render(
    spec: GoalEnvironmentSpec,
    kwargs: dict[str, Any],
    seed: int,
    actions: list[npt.NDArray[Any]],
    stride: int,
    sender: Connection,
) -> None:
    if platform.system() == "Linux" and not os.environ.get("DISPLAY"):
        # Left alone, the first library tried is GLFW, which aborts the process where there is no display.
        os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        environment = make_goal_environment(spec.id, render_mode="rgb_array", **kwargs)
        group = EnvironmentGroup(lambda: environment, spec, 0, 1)
        raise_failure(group.reset(options={"seed": seed, "episodes": [0]})[1])
        for number, action in enumerate(actions):
            if number % stride == 0:
                sender.send(_frame(environment))
            if number == len(actions) - 1:
                break  # the group would begin the next episode before its last frame could be taken
            raise_failure(group.step(action)[-1])
        sender.send(None)
    except BaseException as error:
        last = traceback.format_exception_only(error)[-1].strip()
        sender.send(f"{last}; {_ADVICE}")


def _frame(environment: Any) -> npt.NDArray[np.uint8]:
    frame = environment.render()
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        raise TypeError(f"render() gave {type(frame).__name__} and not a picture")
    return frame.astype(np.uint8)
