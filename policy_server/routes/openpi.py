"""openpi's WebSocket: observations in, actions out, one after the other, over one connection a control loop.

openpi's client connects to ``/``; the policy is the only live one, or ``?policy=NAME``. ``/v1/policies/NAME/ws`` names
it. Further parameters: ``version``, ``session_id``, ``deterministic=false``, ``seed``, ``timeout_ms``, and ``latest=1``
for latest-wins: an observation that comes while an older one still waits takes its place, and the older one is not
answered with an action but with an error frame, so that every frame has its answer, in order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from policy_server.batch_run import RowsDone
from policy_server.engines.base import Array
from policy_server.errors import InvalidRequestError, PolicyServerError, SupersededError
from policy_server.host import PolicyHost
from policy_server.metrics import Metrics
from policy_server.middleware import request_id_of
from policy_server.routes.answers import host_of, metrics_of
from policy_server.served import MAX_SEED, ActRequest, ServedPolicy
from policy_server.wire import check_seed, check_session_id, check_timeout_ms, deadline_after
from policy_server.wire_msgpack import pack, unpack

logger = logging.getLogger(__name__)
router = APIRouter()

_INTERNAL_ERROR = 1011
_POLICY_VIOLATION = 1008
_PARAMETERS = ("policy", "version", "session_id", "deterministic", "seed", "timeout_ms", "latest")
_WORDS = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True)
class Choices:
    """What a connection asks for in its address.

    Attributes:
        policy: Its name.
        version: A certain version; None for the stable one or its canary.
        session_id: Whose loop it is; the connection's own id if none is given.
        deterministic: The best action, or one drawn.
        seed: For the first drawn action; it rises by one with each.
        timeout_ms: When an observation is too late to begin.
        latest: Whether a newer observation takes the place of one that waits.
    """

    policy: str
    version: int | None
    session_id: str
    deterministic: bool
    seed: int | None
    timeout_ms: float | None
    latest: bool


@router.websocket("/")
@router.websocket("/v1/policies/{name}/ws")
async def act_socket(socket: WebSocket, name: str | None = None) -> None:
    """Serves one control loop until it hangs up."""
    host, metrics = host_of(socket), metrics_of(socket)
    await socket.accept()
    try:
        choices = read_choices(socket.query_params, name, host, request_id_of(socket.scope))
        served = host.find(choices.policy, choices.version, choices.session_id)
    except PolicyServerError as error:
        await _refuse(socket, error)
        return
    metrics.open_websockets += 1
    try:
        await socket.send_bytes(pack(describe(served)))
        await _Loop(socket, host, metrics, choices).run()
    except (WebSocketDisconnect, RuntimeError):  # starlette raises the latter for a socket that is closed already
        pass
    finally:
        metrics.open_websockets -= 1


def read_choices(parameters: Mapping[str, str], name: str | None, host: PolicyHost, connection: str) -> Choices:
    """What the address asks for.

    Raises:
        InvalidRequestError: A parameter is unknown or makes no sense.
    """
    for parameter in parameters:
        if parameter not in _PARAMETERS:
            raise InvalidRequestError(
                f"{parameter[:40]}: there is no such parameter; there are {', '.join(_PARAMETERS)}",
                field=parameter[:40],
            )
    policy = name or parameters.get("policy") or _only_policy(host)
    version = parameters.get("version")
    timeout_ms = parameters.get("timeout_ms")
    seed = parameters.get("seed")
    return Choices(
        policy=policy,
        version=_whole(version, "version") if version is not None else None,
        session_id=check_session_id(parameters.get("session_id")) or connection,
        deterministic=_flag(parameters, "deterministic", default=True),
        seed=check_seed(_whole(seed, "seed")) if seed is not None else None,
        timeout_ms=check_timeout_ms(_number(timeout_ms)) if timeout_ms is not None else None,
        latest=_flag(parameters, "latest", default=False),
    )


def describe(served: ServedPolicy) -> dict[str, Any]:
    """The first frame: what the policy takes and gives."""
    manifest = served.manifest
    return {
        "policy": manifest.name,
        "version": manifest.version,
        "observation": {
            field.name: {"shape": list(field.shape), "dtype": field.dtype} for field in manifest.observation
        },
        "action": {"shape": list(manifest.action.shape), "dtype": manifest.action.dtype},
        "control_period_s": manifest.control_period_s,
        "environment": manifest.training.environment,
    }


class _Loop:
    """One connection. Frames are read while others are under way, and answered in their order."""

    def __init__(self, socket: WebSocket, host: PolicyHost, metrics: Metrics, choices: Choices) -> None:
        self._socket = socket
        self._host = host
        self._metrics = metrics
        self._choices = choices
        self._seed = choices.seed
        self._frames: asyncio.Queue[tuple[float, bytes | str] | None] = asyncio.Queue(1 if not choices.latest else 0)

    async def run(self) -> None:
        """Until the client hangs up."""
        reader = asyncio.create_task(self._read())
        try:
            while (frame := await self._frames.get()) is not None:
                if self._choices.latest:
                    while not self._frames.empty():
                        newer = self._frames.get_nowait()
                        error = SupersededError("a newer observation came before this one was begun")
                        await self._send_error(error, frame[0])
                        if newer is None:
                            return
                        frame = newer
                await self._answer(*frame)
        finally:
            reader.cancel()

    async def _read(self) -> None:
        try:
            while True:
                message = await self._socket.receive()
                if message["type"] == "websocket.disconnect":
                    break
                content = message.get("bytes")
                await self._frames.put(
                    (time.perf_counter(), content if content is not None else message.get("text", ""))
                )
        finally:
            if self._choices.latest:
                self._frames.put_nowait(None)
            else:
                await self._frames.put(None)

    async def _answer(self, started: float, frame: bytes | str) -> None:
        version = 0
        try:
            observation = _observation(frame)
            choices = self._choices
            served = self._host.find(choices.policy, choices.version, choices.session_id)
            version = served.version
            arrays, rows, batched = _parse(served, observation)
            request = ActRequest(
                arrays, rows, batched, choices.deterministic, self._seed, deadline_after(choices.timeout_ms)
            )
            if self._seed is not None:
                self._seed = (self._seed + 1) % (MAX_SEED + 1)
            done = await served.infer(request)
        except PolicyServerError as error:
            await self._send_error(error, started, version)
            return
        except Exception:
            logger.exception("a frame of %s failed", self._choices.policy)
            error = PolicyServerError("the server made a mistake; its log says which")
            await self._send_error(error, started, version)
            return
        total_s = time.perf_counter() - started
        self._metrics.observe_request(self._choices.policy, version, 200, total_s, "websocket")
        await self._socket.send_bytes(pack(_answer_of(done, version, batched=batched, total_s=total_s)))

    async def _send_error(self, error: PolicyServerError, started: float, version: int = 0) -> None:
        total_s = time.perf_counter() - started
        self._metrics.observe_request(self._choices.policy, version, error.status, total_s, "websocket")
        await self._socket.send_text(f"{error.code}: {error.message}")


def _answer_of(done: RowsDone, version: int, *, batched: bool, total_s: float) -> dict[str, Any]:
    action = done.outputs["action"]
    return {
        "action": action if batched else np.asarray(action[0]),
        "version": version,
        "server_timing": {
            "queue_ms": done.queued_s * 1e3,
            "infer_ms": done.inference_s * 1e3,
            "total_ms": total_s * 1e3,
        },
    }


def _observation(frame: bytes | str) -> Any:
    if isinstance(frame, str):
        raise InvalidRequestError("the frame is text; send the observation as msgpack in a binary frame", field="frame")
    return unpack(frame)


def _parse(served: ServedPolicy, observation: Any) -> tuple[dict[str, Array], int, bool]:
    if isinstance(observation, np.ndarray) and len(served.manifest.observation) == 1:
        return served.observations.from_arrays({served.manifest.observation[0].name: cast("Array", observation)})
    if not isinstance(observation, dict):
        raise InvalidRequestError("observation: a map of named arrays is expected", field="observation")
    fields = cast("dict[Any, Any]", observation)
    if all(isinstance(value, np.ndarray) for value in fields.values()) and all(isinstance(key, str) for key in fields):
        return served.observations.from_arrays(cast("dict[str, Array]", fields))
    plain = {
        key if isinstance(key, str) else str(key): value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in fields.items()
    }
    return served.observations.from_json(plain)


async def _refuse(socket: WebSocket, error: PolicyServerError) -> None:
    await socket.send_text(f"{error.code}: {error.message}")
    await socket.close(_POLICY_VIOLATION if error.status < 500 else _INTERNAL_ERROR, error.message[:120])


def _only_policy(host: PolicyHost) -> str:
    live = [status.name for status in host.policies() if status.live is not None]
    if len(live) == 1:
        return live[0]
    known = ", ".join(live) or "there is none yet"
    raise InvalidRequestError(
        f"policy: name one, as ?policy=NAME or /v1/policies/NAME/ws; live: {known}", field="policy"
    )


def _whole(text: str, name: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 20:
        raise InvalidRequestError(f"{name}: {text[:40]!r}, a whole number is expected", field=name)
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidRequestError(f"timeout_ms: {text[:40]!r}, a number is expected", field="timeout_ms") from None


def _flag(parameters: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = parameters.get(name)
    if text is None:
        return default
    if text.lower() not in _WORDS:
        raise InvalidRequestError(f"{name}: {text[:40]!r}, true or false is expected", field=name)
    return _WORDS[text.lower()]
