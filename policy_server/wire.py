"""The JSON of ``POST /v1/policies/NAME/act``, both ways. Pure functions; no HTTP and no engine.

::

    {"observation": [..] | {"field": [..]}, "deterministic": true, "seed": null, "timeout_ms": null, "session_id": null}
    {"action": [..], "version": 1, "timing": {"queue_ms": 0.1, "inference_ms": 0.5, "total_ms": 0.8, "batch_rows": 4}}
"""

from __future__ import annotations

import math
import time
from typing import Any, cast

import numpy as np
import orjson

from policy_server.batch_run import RowsDone
from policy_server.engines.base import Array
from policy_server.errors import InvalidRequestError
from policy_server.observation import ObservationParser, shortened
from policy_server.served import ACTION, MAX_SEED, ActRequest

MAX_SESSION_ID = 256
MAX_TIMEOUT_MS = 3_600_000
_FIELDS = frozenset({"observation", "deterministic", "seed", "timeout_ms", "session_id"})
_MAX_SHOWN = 40
_JUST_OBSERVATION = {"observation"}


def decode_act(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The request's JSON object, its fields known but not looked into.

    Raises:
        InvalidRequestError: No JSON, no object, an unknown field, or no observation.
    """
    try:
        content: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        reason = "the body is empty" if not body else f"the body is not JSON: {error}"
        raise InvalidRequestError(f'{reason}; send {{"observation": ...}}', field="body") from None
    if type(content) is not dict:
        raise InvalidRequestError('the body is no JSON object; send {"observation": ...}', field="body")
    names = cast("dict[str, Any]", content).keys()
    if names != _JUST_OBSERVATION:
        if "observation" not in names:
            raise InvalidRequestError('observation: is missing; send {"observation": ...}', field="observation")
        for name in names:
            if name not in _FIELDS:
                shown = shortened(name)
                known = ", ".join(sorted(_FIELDS))
                raise InvalidRequestError(f"{shown}: there is no such field; there are {known}", field=shown)
    return cast("dict[str, Any]", content)


def session_of(content: dict[str, Any]) -> str | None:
    """The session a request belongs to, if it says so.

    Raises:
        InvalidRequestError: It is no text, or too long.
    """
    return check_session_id(content.get("session_id"))


def check_session_id(value: object, *, field: str = "session_id") -> str | None:
    """A session id as it may be.

    Raises:
        InvalidRequestError: It is no text, empty, or too long.
    """
    if value is None:
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_SESSION_ID:
        raise InvalidRequestError(f"{field}: has to be a text of 1 to {MAX_SESSION_ID} characters", field=field)
    return value


def parse_act(
    content: dict[str, Any], observations: ObservationParser, *, timeout_ms: float | None = None
) -> ActRequest:
    """Checks what ``decode_act`` read against the policy that shall act.

    Args:
        content: The request.
        observations: The policy's.
        timeout_ms: From a header; the body's own wins.

    Raises:
        InvalidRequestError: A field is wrong; the error names it.
        PayloadTooLargeError: More rows than are allowed.
    """
    arrays, rows, batched = observations.from_json(content["observation"])
    if len(content) == 1 and timeout_ms is None:
        return ActRequest(arrays, rows, batched)
    deterministic = content.get("deterministic", True)
    if not isinstance(deterministic, bool):
        raise InvalidRequestError(
            f"deterministic: {_shown(deterministic)}, true or false is expected", field="deterministic"
        )
    own_timeout = content.get("timeout_ms")
    return ActRequest(
        arrays,
        rows,
        batched,
        deterministic,
        check_seed(content.get("seed")),
        deadline_after(check_timeout_ms(own_timeout) if own_timeout is not None else timeout_ms),
        session_of(content),
    )


def check_seed(value: object) -> int | None:
    """A seed as it may be.

    Raises:
        InvalidRequestError: It is no whole number from 0 to 2^64 - 1.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SEED:
        raise InvalidRequestError(
            f"seed: {_shown(value)}, a whole number from 0 to {MAX_SEED} is expected", field="seed"
        )
    return value


def check_timeout_ms(value: object, *, field: str = "timeout_ms") -> float:
    """A timeout in milliseconds as it may be.

    Raises:
        InvalidRequestError: It is no number above 0, or more than an hour.
    """
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 < number <= MAX_TIMEOUT_MS:
        raise InvalidRequestError(
            f"{field}: {_shown(value)}, a number above 0 and up to {MAX_TIMEOUT_MS} is expected", field=field
        )
    return float(number)


def deadline_after(timeout_ms: float | None) -> float | None:
    """The deadline by ``time.monotonic()`` of a request that has just come."""
    return None if timeout_ms is None else time.monotonic() + timeout_ms / 1e3


def encode_act(done: RowsDone, version: int, *, batched: bool, total_s: float) -> bytes:
    """The answer's JSON.

    Args:
        done: The rows' outputs and times.
        version: Which version acted.
        batched: Whether a batch was asked for; else the one row is answered without its batch dimension.
        total_s: From the request's last byte to now.
    """
    action = done.outputs[ACTION]
    return (
        b'{"action":%b,"version":%d,"timing":{"queue_ms":%.3f,"inference_ms":%.3f,"total_ms":%.3f,"batch_rows":%d}}'
        % (
            encode_array(action if batched else action[0]),
            version,
            done.queued_s * 1e3,
            done.inference_s * 1e3,
            total_s * 1e3,
            done.batch_rows,
        )
    )


def encode_array(values: Array) -> bytes:
    """Numbers as nested JSON lists, with the digits that their own type needs; a zero-dimensional one as a number."""
    if values.ndim == 0:
        return orjson.dumps(values.item())
    return orjson.dumps(
        values if values.flags.c_contiguous else np.ascontiguousarray(values), option=orjson.OPT_SERIALIZE_NUMPY
    )


def encode_json(content: Any) -> bytes:
    """Any answer as JSON."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def _shown(value: object) -> str:
    if isinstance(value, list | dict):  # however deep they are
        return "a list" if isinstance(value, list) else "an object"
    return shortened(repr(value[:_MAX_SHOWN] if isinstance(value, str) else value))
