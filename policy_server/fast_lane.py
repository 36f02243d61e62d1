"""The short way of an act request: from the socket's bytes to the batcher and back, with no framework between.

A control loop sends the same header lines over one connection again and again. So a complete, plain
``POST /v1/policies/NAME[/versions/V]/act`` is recognised in the bytes themselves, its head looked up among those that
were understood before, and the answer written straight to the transport: no task, no future, no request object.
Whatever is not plain (chunked bodies, pipelining, ``Expect``, an upgrade, an error in the head, a body above the limit)
goes the long way through uvicorn and FastAPI, whose route gives the same answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, ClassVar, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from policy_server.batch_run import RowsDone
from policy_server.errors import PolicyServerError
from policy_server.request_head import ActHead, error_headers, new_request_id, read_act_head
from policy_server.security import ApiKeys
from policy_server.served import ServedPolicy
from policy_server.wire import decode_act, encode_act, encode_json, parse_act, session_of

logger = logging.getLogger(__name__)

_PREFIX = b"POST /v1/policies/"
_END = b"\r\n\r\n"
_LENGTHS = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")
_LENGTH_BYTES = len(_LENGTHS[0])
_MAX_LENGTH_DIGITS = 12
_MAX_HEAD_BYTES = 4096  # longer ones go the long way, and are not kept
_MAX_KEPT_HEADS = 4096


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


class FastLaneProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the short way before it. Make it with ``fast_lane``.

    One request of a connection at a time: what comes while an answer is due, or while the client does not read its
    answers, is held back, and so is the client.
    """

    host: ClassVar[Finder]
    metrics: ClassVar[RequestObserver]
    keys: ClassVar[ApiKeys]
    max_body_bytes: ClassVar[int]
    heads: ClassVar[dict[bytes, ActHead | None]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_message = False  # uvicorn's parser is inside a message
        self._answering = False  # an answer of the short way is due
        self._write_blocked = False  # the client does not read
        self._closing = False
        self._head: ActHead | None = None  # understood, its body still coming
        self._length = 0
        self._body = bytearray()
        self._held: list[bytes] = []
        self._last_active = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Takes the short way if it can, the long one if not."""
        if self._answering or self._write_blocked:
            self._hold(data)
            return
        if self._head is not None:
            self._body += data
            if len(self._body) >= self._length:
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
        body = data[end + 4 :]
        missing = self._length - len(body)
        if missing == 0:
            self._act(head, body)
        elif missing > 0:
            self._unset_keepalive_if_required()
            self._head, self._body = head, bytearray(body)
        else:
            super().data_received(data)

    def _cycle_runs(self) -> bool:
        return not getattr(self.cycle, "response_complete", True)  # there is none before the first request

    def _understand(self, block: bytes) -> ActHead | None:
        """The head, if it is plain; ``_length`` is its body's then.

        The length differs from one request to the next where nothing else does, so heads are kept without it.
        """
        at = block.find(_LENGTHS[0])
        if at < 0:
            at = block.find(_LENGTHS[1])
            if at < 0:
                return None
        first = at + _LENGTH_BYTES
        last = block.find(b"\r\n", first)
        digits = block[first:] if last < 0 else block[first:last]
        if not digits.isdigit() or len(digits) > _MAX_LENGTH_DIGITS:
            return None
        self._length = int(digits)
        if self._length > self.max_body_bytes:
            return None
        key = block[:first] if last < 0 else block[:first] + block[last:]
        heads = self.heads
        if key in heads:
            return heads[key]
        head = read_act_head(block, self.keys)
        # A head with an id of its own does not return, and would fill the table.
        if head is None or head.request_id is None:
            if len(heads) >= _MAX_KEPT_HEADS:
                heads.clear()
            heads[key] = head
        return head

    def _body_complete(self) -> None:
        head, body, length = self._head, self._body, self._length
        assert head is not None
        self._head, self._body = None, bytearray()
        if len(body) > length:  # the next request is behind it already
            self._hold(bytes(body[length:]))
        self._act(head, bytes(body[:length]))

    def _act(self, head: ActHead, body: bytes) -> None:
        started = time.perf_counter()
        self._answering = True
        self._last_active = started
        if self.timeout_keep_alive_task is not None:  # of an answer that went the long way
            self._unset_keepalive_if_required()
        version = 0
        try:
            if head.error is not None:
                raise head.error
            content = decode_act(body)
            session_id = session_of(content) if "session_id" in content else None
            served = self.host.find(head.name, head.version, session_id or head.session_id)
            version = served.manifest.version
            request = parse_act(content, served.observations, timeout_ms=head.timeout_ms)
            batched = request.batched
            served.act(request, lambda result: self._done(result, head, version, batched, started))
        except Exception as error:
            self._fail(error, head, version, started)

    def _done(
        self, result: RowsDone | PolicyServerError, head: ActHead, version: int, batched: bool, started: float
    ) -> None:
        if isinstance(result, PolicyServerError):
            self._fail(result, head, version, started)
            return
        total_s = time.perf_counter() - started
        try:
            body = encode_act(result, version, batched=batched, total_s=total_s)
        except Exception as error:
            self._fail(error, head, version, started)
            return
        self.metrics.observe_request(head.name, version, 200, total_s, "http")
        self._write(
            b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\ncontent-type: application/json\r\nx-request-id: %b\r\n%b\r\n%b"
            % (
                len(body),
                head.request_id or new_request_id().encode(),
                b"connection: close\r\n" if head.close or self._closing else b"",
                body,
            ),
            head.close,
        )

    def _fail(self, error: Exception, head: ActHead, version: int, started: float) -> None:
        request_id = new_request_id() if head.request_id is None else head.request_id.decode()
        if not isinstance(error, PolicyServerError):
            logger.error("request %s failed", request_id, exc_info=error)
            error = PolicyServerError("the server made a mistake; its log says which, under the request's id")
        self.metrics.observe_request(head.name, version, error.status, time.perf_counter() - started, "http")
        body = encode_json(error.body(request_id))
        lines = [
            STATUS_LINE[error.status],
            *(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in error_headers(error).items()),
            b"x-request-id: %b\r\n" % request_id.encode(),
            b"content-length: %d\r\ncontent-type: application/json\r\n" % len(body),
            b"connection: close\r\n" if head.close or self._closing else b"",
            b"\r\n",
            body,
        ]
        self._write(b"".join(lines), head.close)

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
            self._release()

    def _hold(self, data: bytes) -> None:
        if not self._held and not self.transport.is_closing():
            self.transport.pause_reading()
        self._held.append(data)

    def _release(self) -> None:
        if self._answering or self._write_blocked or self.transport.is_closing():
            return
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

    # What uvicorn and the loop call.

    def on_message_begin(self) -> None:
        """Marks the parser as inside a message."""
        self._in_message = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """Marks the parser as between messages."""
        self._in_message = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client does not read its answers; no more of its requests are taken."""
        self._write_blocked = True
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client reads again."""
        self._write_blocked = False
        super().resume_writing()
        if self._held:
            self._release()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection; an answer still due is dropped when it comes."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
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

    class BoundFastLaneProtocol(FastLaneProtocol):
        pass

    BoundFastLaneProtocol.host = host
    BoundFastLaneProtocol.metrics = metrics
    BoundFastLaneProtocol.keys = keys
    BoundFastLaneProtocol.max_body_bytes = max_body_bytes
    BoundFastLaneProtocol.heads = {}
    return BoundFastLaneProtocol
