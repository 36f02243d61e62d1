"""What the header lines of an act request say, and those of its answer; for the short way and the long one alike."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from policy_server.errors import InvalidRequestError, PolicyServerError
from policy_server.security import ApiKeys
from policy_server.wire import check_session_id, check_timeout_ms

REQUEST_ID_HEADER = "x-request-id"
SESSION_HEADER = "x-session-id"
TIMEOUT_HEADER = "x-timeout-ms"

_REQUEST_LINE = re.compile(
    rb"POST /v1/policies/(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,127})"
    rb"(?:/versions/(?P<version>[1-9][0-9]{0,17}))?/act HTTP/1\.1"
)
_HEADER_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*?)[ \t]*")
_NOT_PLAIN = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"origin", b"te", b"trailer"})
_NEEDED = frozenset({"host", "content-length"})
_REQUEST_IDS = re.compile(r"[\x21-\x7e]{1,128}")
_MAX_SHOWN = 40


@dataclass(frozen=True, slots=True)
class ActHead:
    """The head of an act request that was understood, whatever its body's length.

    Attributes:
        name: The policy asked for.
        version: The version asked for.
        session_id: From the header.
        timeout_ms: From the header.
        request_id: From the header; None when one has to be made.
        close: Whether the connection ends with the answer.
        error: What is wrong with a header, in place of an action.
    """

    name: str
    version: int | None
    session_id: str | None
    timeout_ms: float | None
    request_id: bytes | None
    close: bool
    error: PolicyServerError | None


def read_act_head(block: bytes, keys: ApiKeys) -> ActHead | None:
    """Understands a plain head, strictly; None for one that a full HTTP parser has to look at.

    Args:
        block: Request line and header lines, without the empty line.
        keys: Who is let in.
    """
    first, *lines = block.split(b"\r\n")
    match = _REQUEST_LINE.fullmatch(first)
    if match is None:
        return None
    headers: dict[str, str] = {}
    for line in lines:
        parts = _HEADER_LINE.fullmatch(line)
        if parts is None:
            return None
        name = parts[1].lower()
        text = name.decode("ascii")
        if name in _NOT_PLAIN or text in headers:  # which of two values holds is not for this place to say
            return None
        headers[text] = parts[2].decode("latin-1")
    connection = headers.get("connection", "keep-alive").lower()
    if not headers.keys() >= _NEEDED or connection not in ("keep-alive", "close"):
        return None
    if headers.get("content-type", "application/json").split(";")[0].strip().lower() != "application/json":
        return None
    error: PolicyServerError | None = None
    session_id = timeout_ms = None
    try:
        keys.check(headers)
        session_id, timeout_ms = read_act_headers(headers.get)
    except PolicyServerError as wrong:
        error = wrong
    request_id = usable_request_id(headers.get(REQUEST_ID_HEADER))
    return ActHead(
        name=match["name"].decode(),
        version=None if match["version"] is None else int(match["version"]),
        session_id=session_id,
        timeout_ms=timeout_ms,
        request_id=None if request_id is None else request_id.encode(),
        close=connection == "close",
        error=error,
    )


def read_act_headers(get: Callable[[str], str | None]) -> tuple[str | None, float | None]:
    """Session id and timeout out of the headers.

    Args:
        get: Gives a header's value by its name in lower case.

    Raises:
        InvalidRequestError: One of them makes no sense.
    """
    session_id = check_session_id(get(SESSION_HEADER), field=SESSION_HEADER)
    text = get(TIMEOUT_HEADER)
    if text is None:
        return session_id, None
    try:
        number = float(text)
    except ValueError:
        raise InvalidRequestError(
            f"{TIMEOUT_HEADER}: {text[:_MAX_SHOWN]!r}, a number of milliseconds is expected", field=TIMEOUT_HEADER
        ) from None
    return session_id, check_timeout_ms(number, field=TIMEOUT_HEADER)


def error_headers(error: PolicyServerError) -> dict[str, str]:
    """Headers that go with an error."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s + 0.499)))  # whole seconds, says HTTP
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def usable_request_id(text: str | None) -> str | None:
    """A client's request id if it can be sent back as it is."""
    return text if text is not None and _REQUEST_IDS.fullmatch(text) else None


def new_request_id() -> str:
    """An id that no other request of any worker has."""
    return f"{_PROCESS}-{next(_COUNTER):x}"


_PROCESS = secrets.token_hex(6)
_COUNTER = itertools.count(1)
