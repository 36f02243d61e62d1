"""One kept HTTP/1.1 connection over a gevent socket, cheap enough that the server and not the client is measured.

The response is parsed by llhttp (httptools). What a general client adds between the socket and the caller, pools,
cookies, redirects and objects a request, would count as the server's latency; here the body is handed on as it is read,
with the time at which it was.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httptools  # pyright: ignore[reportMissingTypeStubs]
from gevent import socket

from loadtest.bare_socket import BareSocket
from loadtest.deadline import Deadline, DeadlineExceededError

OnBody = Callable[[bytes, float], None]
"""A piece of the body, and when it was read from the socket, by ``time.perf_counter()``."""

_READ_BYTES = 1 << 16
_CONNECT_TIMEOUT_S = 10.0


class RequestFailedError(Exception):
    """A request got no whole answer.

    Args:
        kind: ``connection`` (refused, unreachable), ``cut_off`` (closed before the answer's end), ``timeout`` or
            ``bad_answer`` (not HTTP).
        message: What happened.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class HttpConnection:
    """Sends one request after the other; not for two greenlets at once.

    Args:
        url: Of the server; only scheme, host and port count.
        timeout_s: For one whole request.
        headers: Sent with every request.

    Attributes:
        deadline: The time limit, for what speaks another protocol after HTTP's.
    """

    def __init__(self, url: str, *, timeout_s: float, headers: tuple[tuple[str, str], ...] = ()) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._tls = parts.scheme == "https"
        self._address = (parts.hostname, parts.port or (443 if self._tls else 80))
        self._timeout_s = timeout_s
        self._common = f"Host: {parts.netloc.rpartition('@')[2]}\r\n" + "".join(
            f"{name}: {value}\r\n" for name, value in headers
        )
        self._socket: Any = None
        self._answers = _Answers()
        self._buffer = bytearray(_READ_BYTES)
        self.deadline = Deadline(timeout_s)
        self._heads: dict[tuple[str, str, str], bytes] = {}

    def request(self, method: str, path: str, body: bytes, on_body: OnBody, *, kind: str = "application/json") -> int:
        """Sends a request and reads its answer.

        Args:
            method: Such as ``POST``.
            path: Path and query.
            body: The content; empty for none.
            on_body: Called with each piece of the answer's body.
            kind: The content's type, with further header lines behind it if need be.

        Returns:
            The HTTP status.

        Raises:
            RequestFailedError: There was no whole answer; the connection is closed.
        """
        head = self._heads.get((method, path, kind))
        if head is None:
            head = f"{method} {path} HTTP/1.1\r\n{self._common}Content-Type: {kind}\r\nContent-Length: ".encode()
            self._heads[method, path, kind] = head
        message = b"%b%d\r\n\r\n%b" % (head, len(body), body)
        kept = self._socket is not None
        try:
            with self.deadline:
                try:
                    return self._exchange(message, on_body)
                except _ClosedEarlyError:
                    # A server may close a kept connection at any time; nothing of the answer had come, so once more.
                    if not kept:
                        raise RequestFailedError(
                            "cut_off", "the server closed the connection without an answer"
                        ) from None
                    return self._exchange(message, on_body)
        except DeadlineExceededError:
            self.close()
            raise RequestFailedError("timeout", f"no whole answer within {self._timeout_s:g} s") from None
        except _ClosedEarlyError:
            raise RequestFailedError("cut_off", "the server closed the connection without an answer") from None
        except RequestFailedError:
            self.close()
            raise
        except BaseException:  # a greenlet that is killed leaves half an answer in the socket
            self.close()
            raise

    def connect(self) -> Any:
        """The connected socket, for what speaks another protocol after HTTP's; closed by ``close``.

        It has ``sendall`` and ``recv_into``.

        Raises:
            RequestFailedError: The server does not accept.
        """
        if self._socket is None:
            self._answers = _Answers()
            try:
                plain = socket.create_connection(self._address, timeout=_CONNECT_TIMEOUT_S)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls:
                    plain.settimeout(None)
                    context = ssl.create_default_context()
                    self._socket = context.wrap_socket(plain, server_hostname=self._address[0])
                else:
                    self._socket = BareSocket(plain)
            except OSError as error:
                host, port = self._address
                raise RequestFailedError("connection", f"{host}:{port}: {error.strerror or error}") from None
        return self._socket

    def close(self) -> None:
        """Closes the connection; the next request opens another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _exchange(self, message: bytes, on_body: OnBody) -> int:
        connected = self.connect()
        answers, buffer, num_read = self._answers, self._buffer, 0
        try:
            connected.sendall(message)
            answers.expect(on_body)  # while it is on its way
            while not answers.complete:
                number = connected.recv_into(buffer)
                if not number:
                    break
                num_read += number
                answers.feed(memoryview(buffer)[:number])
        except OSError as error:
            self.close()
            if not num_read:
                raise _ClosedEarlyError from None
            raise RequestFailedError("cut_off", f"in mid-answer: {error.strerror or error}") from None
        except httptools.HttpParserError as error:
            raise RequestFailedError("bad_answer", f"not HTTP: {error}") from None
        if not answers.complete:
            self.close()
            if not num_read:
                raise _ClosedEarlyError
            if answers.ends_with_connection:
                return answers.status
            raise RequestFailedError("cut_off", "the server closed the connection in the middle of its answer")
        if not answers.keep_alive:
            self.close()
        return answers.status


class _ClosedEarlyError(Exception):
    """The connection ended before the first byte of an answer."""


class _Answers:
    """The answers of a connection, one after the other, as its one parser finds them."""

    def __init__(self) -> None:
        self.complete = False
        self.keep_alive = False
        self._in_body = False
        self._head = b""
        self._read_at = 0.0
        self._on_body: OnBody = lambda *_: None
        self._parser: Any = httptools.HttpResponseParser(self)

    def expect(self, on_body: OnBody) -> None:
        """The next answer is another's."""
        self.complete = self.keep_alive = self._in_body = False
        self._head = b""
        self._on_body = on_body

    def feed(self, piece: memoryview) -> None:
        """What was read just now.

        Raises:
            httptools.HttpParserError: This is not HTTP.
        """
        self._read_at = time.perf_counter()
        if not self._in_body:
            self._head += piece
        self._parser.feed_data(piece)

    @property
    def status(self) -> int:
        """Of the answer."""
        return int(self._parser.get_status_code())

    @property
    def ends_with_connection(self) -> bool:
        """Whether the head does not say where the body ends."""
        head, end, _ = self._head.lower().partition(b"\r\n\r\n")
        return bool(end) and b"\r\ncontent-length:" not in head and b"\r\ntransfer-encoding:" not in head

    def on_body(self, body: bytes) -> None:
        self._in_body = True
        self._on_body(body, self._read_at)

    def on_message_complete(self) -> None:
        self.complete = True
        self.keep_alive = self._parser.should_keep_alive()  # the parser forgets it with what it reads next
