"""The short way of an act request: from the socket's bytes to the batcher and back, with no framework between.

A control loop sends the same header lines over one connection again and again. So a complete, plain
``POST /v1/policies/NAME[/versions/V]/act`` is recognised in the bytes themselves, its header block looked up among those
already understood, and the answer written straight to the transport: no task, no future, no request object. Whatever is
not plain (chunked bodies, pipelining, ``Expect``, an upgrade, an error in the header block, a body above the limit)
goes the long way through uvicorn and FastAPI, whose route gives the same answers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from policy_server.batcher import RowsDone
from policy_server.errors import InvalidRequestError, PolicyServerError
from policy_server.security import ApiKeys
from policy_server.served import ServedPolicy
from policy_server.wire import (
    check_session_id,
    check_timeout_ms,
    decode_act,
    encode_act,
    encode_json,
    parse_act,
    session_of,
)

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
SESSION_HEADER = "x-session-id"
TIMEOUT_HEADER = "x-timeout-ms"
MAX_REQUEST_ID = 128

_PREFIX = b"POST /v1/policies/"
_REQUEST_LINE = re.compile(
    rb"POST /v1/policies/(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:/versions/(?P<version>[1-9][0-9]{0,17}))?/act HTTP/1\.1"
)
_HEADER_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*?)[ \t]*")
_NOT_PLAIN = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"origin", b"te", b"trailer"})
_SINGLE = frozenset({b"content-length", b"host", b"authorization", b"x-api-key"})
_MAX_HEAD_BYTES = 4096  # longer ones go the long way, and are not kept
_MAX_CACHED_HEADS = 4096
_END = b"\r\n\r\n"
_REQUEST_IDS = re.compile(r"[\x21-\x7e]{1,128}")


class Finder(Protocol):
    """What the lane needs of the host."""

    def find(self, name: str, version: int | None = None, session_id: str | None = None) -> ServedPolicy:
        """The live policy that shall answer."""
        ...


class RequestObserver(Protocol):
    """What the lane tells the metrics."""

    def observe_request(self, policy: str, version: int, status: int, total_s: float, protocol: str) -> None:
        """One answered request."""
        ...


@dataclass(frozen=True, slots=True)
class Head:
    """A header block that was understood.

    Attributes:
        name: The policy asked for.
        version: The version asked for.
        length: Bytes of the body.
        session_id: From the header.
        timeout_ms: From the header.
        request_id: From the header; None when one has to be made.
        close: Whether the connection ends with the answer.
        error: What is wrong with a header, in place of an action.
    """

    name: str
    version: int | None
    length: int
    session_id: str | None
    timeout_ms: float | None
    request_id: str | None
    close: bool
    error: PolicyServerError | None


class FastLaneProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the short way before it. Make it with ``fast_lane``."""

    host: ClassVar[Finder]
    metrics: ClassVar[RequestObserver]
    keys: ClassVar[ApiKeys]
    max_body_bytes: ClassVar[int]
    heads: ClassVar[dict[bytes, Head | None]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_message = False  # uvicorn's parser is inside a message
        self._answering = False  # an answer of the short way is due
        self._closing = False
        self._head: Head | None = None  # understood, its body still coming
        self._body = bytearray()
        self._held: list[bytes] = []  # came while an answer was due
        self._last_active = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Takes the short way if it can, the long one if not."""
        if self._answering:
            self._held.append(data)
            self.transport.pause_reading()
            return
        if self._head is not None:
            self._body += data
            if len(self._body) >= self._head.length:
                self._body_complete()
            return
        if self._in_message or not data.startswith(_PREFIX) or self._cycle_runs():
            super().data_received(data)
            return
        end = data.find(_END)
        head = self._understand(data[:end]) if 0 < end < _MAX_HEAD_BYTES else None
        if head is None:
            super().data_received(data)
            return
        num_body = len(data) - end - len(_END)
        if num_body == head.length:
            self._act(head, data[end + len(_END) :])
        elif num_body < head.length:
            self._unset_keepalive_if_required()
            self._head, self._body = head, bytearray(data[end + len(_END) :])
        else:
            super().data_received(data)

    def _cycle_runs(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _body_complete(self) -> None:
        head, body = self._head, self._body
        assert head is not None
        self._head, self._body = None, bytearray()
        if len(body) > head.length:  # a pipelined request behind it
            self._held.append(bytes(body[head.length :]))
            self.transport.pause_reading()
        self._act(head, bytes(body[: head.length]))

    def _understand(self, block: bytes) -> Head | None:
        head = self.heads.get(block, _UNSEEN)
        if head is _UNSEEN:
            head = read_head(block, self.keys, self.max_body_bytes)
            if (
                head is None or head.request_id is None
            ):  # a new id a request would fill the table with what never returns
                if len(self.heads) >= _MAX_CACHED_HEADS:
                    self.heads.clear()
                self.heads[block] = head
        return head

    def _act(self, head: Head, body: bytes) -> None:
        started = time.perf_counter()
        self._answering = True
        self._last_active = started
        request_id = head.request_id or new_request_id()
        policy, version = head.name, 0
        try:
            if head.error is not None:
                raise head.error
            content = decode_act(body)
            session_id = session_of(content) if "session_id" in content else None
            served = self.host.find(head.name, head.version, session_id or head.session_id)
            version = served.version
            request = parse_act(content, served.observations, timeout_ms=head.timeout_ms)
            served.act(
                request, lambda result: self._done(result, served, request.batched, started, request_id, head.close)
            )
        except PolicyServerError as error:
            self._fail(error, policy, version, started, request_id, head.close)
        except Exception:
            logger.exception("request %s failed", request_id)
            error = PolicyServerError("the server made a mistake; its log says which, under the request's id")
            self._fail(error, policy, version, started, request_id, head.close)

    def _done(
        self,
        result: RowsDone | PolicyServerError,
        served: ServedPolicy,
        batched: bool,
        started: float,
        request_id: str,
        close: bool,
    ) -> None:
        if isinstance(result, PolicyServerError):
            self._fail(result, served.name, served.version, started, request_id, close)
            return
        total_s = time.perf_counter() - started
        body = encode_act(result, served.version, batched=batched, total_s=total_s)
        self.metrics.observe_request(served.name, served.version, 200, total_s, "http")
        self._write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\n%b\r\n%b"
            % (len(body), request_id.encode(), b"connection: close\r\n" if close or self._closing else b"", body),
            close,
        )

    def _fail(
        self, error: PolicyServerError, policy: str, version: int, started: float, request_id: str, close: bool
    ) -> None:
        self.metrics.observe_request(policy, version, error.status, time.perf_counter() - started, "http")
        body = encode_json(error.body(request_id))
        lines = [
            STATUS_LINE[error.status],
            b"content-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\n"
            % (len(body), request_id.encode()),
            *(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in error_headers(error).items()),
            b"connection: close\r\n" if close or self._closing else b"",
            b"\r\n",
            body,
        ]
        self._write(b"".join(lines), close)

    def _write(self, answer: bytes, close: bool) -> None:
        self._answering = False
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.transport.write(answer)
        if close or self._closing:
            self.transport.close()
            return
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._check_idle)
        if self._held:
            held, self._held = b"".join(self._held), []
            self.transport.resume_reading()
            self.data_received(held)

    def _check_idle(self) -> None:
        # One timer a connection that looks now and then, instead of a new one for every answer.
        self._idle_timer = None
        if self.transport.is_closing():
            return
        idle_s = time.perf_counter() - self._last_active
        busy = self._answering or self._head is not None or self._in_message or self._cycle_runs()
        if not busy and idle_s >= self.timeout_keep_alive and self.timeout_keep_alive_task is None:
            self.transport.close()
        else:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._check_idle)

    # What uvicorn calls.

    def on_message_begin(self) -> None:
        """Marks the parser as inside a message."""
        self._in_message = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """Marks the parser as between messages."""
        self._in_message = False
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection; an answer still due is dropped when it comes."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._held = []
        self._head = None
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Closes once the answer that is due is written; at once if none is."""
        if self._answering or self._head is not None:
            self._closing = True
        else:
            super().shutdown()


def fast_lane(host: Finder, metrics: RequestObserver, keys: ApiKeys, *, max_body_bytes: int) -> type[FastLaneProtocol]:
    """The protocol class for ``uvicorn.Config(http=...)``.

    Args:
        host: Knows the live policies.
        metrics: Hears of every answer.
        keys: Who is let in.
        max_body_bytes: Larger bodies go the long way, which refuses them.
    """
    attributes = {"host": host, "metrics": metrics, "keys": keys, "max_body_bytes": max_body_bytes, "heads": {}}
    return type("BoundFastLaneProtocol", (FastLaneProtocol,), attributes)


def read_head(block: bytes, keys: ApiKeys, max_body_bytes: int) -> Head | None:
    """Understands a header block, strictly; None for what has to go the long way.

    Args:
        block: Request line and header lines, without the empty line.
        keys: Who is let in.
        max_body_bytes: The largest body.
    """
    first, *lines = block.split(b"\r\n")
    match = _REQUEST_LINE.fullmatch(first)
    if match is None:
        return None
    headers: dict[bytes, bytes] = {}
    for line in lines:
        parts = _HEADER_LINE.fullmatch(line)
        if parts is None:
            return None
        name = parts[1].lower()
        if name in _NOT_PLAIN or (name in headers and name in _SINGLE):
            return None
        headers.setdefault(name, parts[2])
    length = headers.get(b"content-length", b"")
    connection = headers.get(b"connection", b"keep-alive").lower()
    if not length.isdigit() or len(length) > 12 or int(length) > max_body_bytes or b"host" not in headers:
        return None
    if connection not in (b"keep-alive", b"close") or not _names_json(headers.get(b"content-type")):
        return None
    error: PolicyServerError | None = None
    session_id = timeout_ms = None
    try:
        keys.check({name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()})
        session_id, timeout_ms = read_lane_headers(lambda name: _text(headers.get(name.encode())))
    except PolicyServerError as wrong:
        error = wrong
    return Head(
        name=match["name"].decode(),
        version=None if match["version"] is None else int(match["version"]),
        length=int(length),
        session_id=session_id,
        timeout_ms=timeout_ms,
        request_id=usable_request_id(_text(headers.get(REQUEST_ID_HEADER.encode()))),
        close=connection == b"close",
        error=error,
    )


def read_lane_headers(get: Callable[[str], str | None]) -> tuple[str | None, float | None]:
    """Session id and timeout out of the headers.

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
            f"{TIMEOUT_HEADER}: {text!r}, a number of milliseconds is expected", field=TIMEOUT_HEADER
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


def _names_json(content_type: bytes | None) -> bool:
    return content_type is None or content_type.split(b";")[0].strip().lower() == b"application/json"


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


_UNSEEN: Any = object()
_PROCESS = secrets.token_hex(6)
_COUNTER = itertools.count(1)
