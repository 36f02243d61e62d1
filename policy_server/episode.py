"""A closed-loop episode for the page: the simulator in a process of its own, acting through the server's own HTTP.

The manifest names the environment, and a manifest is not trusted: only environments that gymnasium and
gymnasium-robotics register themselves are made, never a module that an id names, and only with plain numbers and words
as arguments.

Run as ``python -m policy_server.episode``, it prints a line of JSON a step.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from io import BytesIO
from typing import Any, cast

import numpy as np
from starlette.websockets import WebSocket

from policy_server.manifest import Manifest
from policy_server.settings import ServerSettings

MAX_AT_ONCE = 2
"""Simulators of one worker; each takes a good part of a core."""
_ID = re.compile(r"[A-Za-z0-9_]+(?:-v\d+)?")
_KEY_VARIABLE = "GATED_SERVING_EPISODE_KEY"
_LINE_LIMIT = 4 << 20
_FRAME_SIZE = 320
_LONGEST_EPISODE = 1000
_running = 0


class EpisodeError(Exception):
    """No episode can be shown; says why and what to do."""


def check_possible(manifest: Manifest) -> None:
    """Whether this policy's environment can be made here.

    Raises:
        EpisodeError: It cannot.
    """
    training = manifest.training
    if training.environment is None:
        raise EpisodeError("the policy does not say which environment it is from")
    if _ID.fullmatch(training.environment) is None:
        raise EpisodeError(
            f"{training.environment[:60]}: only environments that gymnasium registers by themselves are shown"
        )
    if not all(isinstance(value, str | int | float | bool) for value in training.environment_kwargs.values()):
        raise EpisodeError("the environment's arguments are more than numbers and words")
    missing = [package for package in ("gymnasium", "gymnasium_robotics") if find_spec(package) is None]
    if missing:
        raise EpisodeError(f"{' and '.join(missing)} not installed here: pip install 'gated-serving[train]'")


async def run_episode(
    manifest: Manifest, settings: ServerSettings, socket: WebSocket, *, seed: int, key: str | None
) -> None:
    """Runs one episode and sends every step.

    Args:
        manifest: Names policy and environment.
        settings: Where the server itself listens.
        socket: The page.
        seed: Of the environment's first state.
        key: The API key that the page has shown.

    Raises:
        EpisodeError: It cannot be run.
        WebSocketDisconnect: The page is gone.
    """
    global _running  # how many run in this process
    check_possible(manifest)
    if _running >= MAX_AT_ONCE:
        raise EpisodeError(f"{MAX_AT_ONCE} episodes run already; try again when one has ended")
    _running += 1
    try:
        await _run(manifest, settings, socket, seed, key)
    finally:
        _running -= 1


async def _run(manifest: Manifest, settings: ServerSettings, socket: WebSocket, seed: int, key: str | None) -> None:
    training = manifest.training
    address = f"http://{settings.reachable_host}:{settings.port}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "policy_server.episode", "--address", address, "--policy", manifest.name),
        *("--environment", str(training.environment), "--kwargs", json.dumps(training.environment_kwargs)),
        *("--seed", str(seed), "--period", str(manifest.control_period_s or 0.0)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=_LINE_LIMIT,
        env={**os.environ, **({_KEY_VARIABLE: key} if key is not None else {})},
    )
    assert process.stdout is not None
    hung_up = asyncio.create_task(_until_gone(socket))
    try:
        num_lines = 0
        while line := await process.stdout.readline():
            if hung_up.done():
                return
            num_lines += 1
            await socket.send_text(line.decode())
        if num_lines == 0:
            raise EpisodeError(f"the simulator could not be started (exit code {await process.wait()})")
    finally:
        hung_up.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _until_gone(socket: WebSocket) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


# In the simulator's process.


def main() -> None:
    """One episode; a line a step."""
    parser = argparse.ArgumentParser()
    for name in ("address", "policy", "environment", "kwargs"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--period", type=float, required=True)
    arguments = parser.parse_args()
    os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        environment = _make(arguments.environment, json.loads(arguments.kwargs))
        _play(environment, arguments)
    except EpisodeError as error:
        _say({"error": str(error)})


def _make(name: str, kwargs: dict[str, Any]) -> Any:
    import gymnasium
    import gymnasium_robotics  # pyright: ignore[reportMissingTypeStubs]

    gymnasium.register_envs(gymnasium_robotics)
    if name not in cast("Any", gymnasium).registry:
        raise EpisodeError(f"{name}: gymnasium and gymnasium-robotics have no such environment")
    for mode in ("rgb_array", None):  # without a way to render, the page draws
        environment: Any = None
        try:
            environment = gymnasium.make(
                name, render_mode=mode, width=_FRAME_SIZE, height=_FRAME_SIZE, disable_env_checker=True, **kwargs
            )
            environment.reset(seed=0)
            if mode is not None:
                environment.render()
        except Exception as error:  # gymnasium, mujoco and OpenGL raise whatever they like
            if mode is None:
                raise EpisodeError(f"{name} cannot be made: {type(error).__name__}: {error}"[:300]) from error
            continue
        return environment
    raise AssertionError


def _play(environment: Any, arguments: argparse.Namespace) -> None:
    observation, _ = environment.reset(seed=arguments.seed)
    if not isinstance(observation, dict) or not {"achieved_goal", "desired_goal"} <= observation.keys():
        raise EpisodeError("the environment has no goals to show")
    limit = getattr(environment.spec, "max_episode_steps", None) or _LONGEST_EPISODE
    fields = _fields_of(arguments.address, arguments.policy)
    for step in range(1, min(limit, _LONGEST_EPISODE) + 1):
        started = time.perf_counter()
        action = _act(
            arguments.address,
            arguments.policy,
            {name: np.asarray(cast("Any", observation)[name]).tolist() for name in fields},
        )
        latency_ms = 1e3 * (time.perf_counter() - started)
        observation, _, terminated, truncated, info = environment.step(action)
        _say(
            {
                "step": step,
                "achieved_goal": observation["achieved_goal"].tolist(),
                "desired_goal": observation["desired_goal"].tolist(),
                "success": bool(info.get("is_success", info.get("success", False))),
                "latency_ms": latency_ms,
                "frame": _frame(environment),
                "done": bool(terminated or truncated or step == limit),
            }
        )
        if terminated or truncated:
            break
        time.sleep(max(0.0, arguments.period - (time.perf_counter() - started)))


def _fields_of(address: str, policy: str) -> list[str]:
    return [field["name"] for field in _ask(f"{address}/v1/policies/{policy}")["manifest"]["observation"]]


def _act(address: str, policy: str, observation: dict[str, Any]) -> Any:
    return np.asarray(_ask(f"{address}/v1/policies/{policy}/act", {"observation": observation})["action"], np.float32)


def _ask(url: str, content: Any = None) -> Any:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(_KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {key}"
    data = json.dumps(content).encode() if content is not None else None
    request = urllib.request.Request(url, data, headers)  # noqa: S310  # the server's own address
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise EpisodeError(
            f"the server refused the observation: {error.read().decode(errors='replace')[:200]}"
        ) from None
    except OSError as error:
        raise EpisodeError(f"the server at {url} could not be reached: {error}") from None


def _frame(environment: Any) -> str | None:
    if environment.render_mode != "rgb_array":
        return None
    import imageio.v3 as imageio

    buffer = BytesIO()
    cast("Any", imageio).imwrite(buffer, environment.render(), extension=".jpg", quality=80)
    return base64.b64encode(buffer.getvalue()).decode()


def _say(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
