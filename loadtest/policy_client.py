"""One request to a policy server: JSON, the Open Inference Protocol's binary tensors, or openpi's WebSocket.

Requests are made once from the observations and sent again and again, so that making them is not measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import orjson
from numpy.typing import NDArray
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import parse_uri

from loadtest.deadline import DeadlineExceededError
from loadtest.http_connection import HttpConnection, RequestFailedError
from loadtest.records import RequestRecord
from loadtest.settings import PolicySettings
from policy_server.wire_msgpack import pack

Observation = Mapping[str, NDArray[Any]]
"""Every field, [rows, *shape]."""

_DATATYPES = {"float32": "FP32", "int64": "INT64"}
_MAX_MESSAGE = 400
_READ_BYTES = 1 << 16


class PolicyClient:
    """Asks over one kept connection; one greenlet at a time.

    Args:
        settings: Whom and how to ask; the policy has to be resolved.
        timeout_s: For one request.
    """

    def __init__(self, settings: PolicySettings, *, timeout_s: float) -> None:
        headers = settings.headers
        if settings.api_key is not None:
            headers = (*headers, ("Authorization", f"Bearer {settings.api_key}"))
        self._settings = settings
        self._timeout_s = timeout_s
        self._connection = HttpConnection(settings.url, timeout_s=timeout_s, headers=headers)
        self._headers = headers
        self._socket: _WebSocket | None = None

    def send(self, message: EncodedObservation, *, intended_s: float | None = None) -> RequestRecord:
        """Sends one request and waits for its answer; whatever goes wrong is in the record.

        Args:
            message: What to send, of the protocol that the settings name.
            intended_s: When it was meant to be sent, seconds since the epoch; None for now.
        """
        sent_s, started = time.time(), time.perf_counter()
        record = RequestRecord(
            kind="act",
            intended_s=sent_s if intended_s is None else intended_s,
            sent_s=sent_s,
            rows=message.rows,
            sent_bytes=len(message.body),
        )
        try:
            if self._settings.protocol == "websocket":
                self._send_frame(message, record)
            else:
                self._send_http(message, record)
        except RequestFailedError as error:
            record.error, record.message = error.kind, str(error)
        record.service_ms = 1e3 * (time.perf_counter() - started)
        if record.error is None:
            record.latency_ms = record.service_ms + 1e3 * (record.sent_s - record.intended_s)
        return record

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()
        self._socket = None

    def _send_http(self, message: EncodedObservation, record: RequestRecord) -> None:
        pieces: list[bytes] = []
        record.status = self._connection.request(
            "POST", message.path, message.body, lambda piece, _: pieces.append(piece), kind=message.kind
        )
        answer = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        record.received_bytes = len(answer)
        if record.status != 200:
            record.error, record.message = f"http_{record.status}", message_of(answer)
        elif message.answer_mark not in answer:
            record.error = "bad_answer"
            record.message = f"no action in the answer: {answer[:_MAX_MESSAGE].decode(errors='replace')}"

    def _send_frame(self, message: EncodedObservation, record: RequestRecord) -> None:
        try:
            with self._connection.deadline:
                if self._socket is None:
                    self._socket = _WebSocket(self._connection, self._settings.url, message.path, self._headers)
                answer = self._socket.ask(message.body)
        except DeadlineExceededError:
            self.close()
            raise RequestFailedError("timeout", f"no answer within {self._timeout_s:g} s") from None
        except RequestFailedError:
            if self._socket is None or not self._socket.is_open:
                self.close()
            raise
        except BaseException:  # a greenlet that is killed leaves an answer on its way
            self.close()
            raise
        record.received_bytes, record.status = len(answer), 200
        if message.answer_mark not in answer:
            record.error = "bad_answer"
            record.message = f"no action in the answer: {answer[:_MAX_MESSAGE].decode(errors='replace')}"


class EncodedObservation:
    """A request's bytes.

    Args:
        settings: Whom and how to ask.
        observation: Every field, [rows, *shape].
        batched: Send the rows as a batch even if it is one.

    Attributes:
        path: Where to.
        kind: The content's type, and header lines that go with it.
        body: The content.
        rows: Observations in it.
        answer_mark: Bytes that every good answer holds.
    """

    __slots__ = ("answer_mark", "body", "kind", "path", "rows")

    def __init__(self, settings: PolicySettings, observation: Observation) -> None:
        self.rows = len(next(iter(observation.values())))
        self.kind = "application/json"
        self.answer_mark = b'"action"'
        if settings.protocol == "json":
            self.path = f"/v1/policies/{settings.policy}/act"
            values = {name: _rows(rows).tolist() for name, rows in observation.items()}
            content: dict[str, Any] = {"observation": values}
            if not settings.deterministic:
                content["deterministic"] = False
            self.body = orjson.dumps(content)
        elif settings.protocol == "binary":
            self.path = f"/v2/models/{settings.policy}/infer"
            self.body, header_length = _binary(observation, deterministic=settings.deterministic)
            self.kind = f"application/octet-stream\r\nInference-Header-Content-Length: {header_length}"
        else:
            flag = "" if settings.deterministic else "?deterministic=false"
            self.path = f"/v1/policies/{settings.policy}/ws{flag}"
            self.body = pack({name: rows[0] for name, rows in observation.items()})
            self.answer_mark = b"action"


def _rows(rows: NDArray[Any]) -> NDArray[Any]:
    return rows[0] if len(rows) == 1 else rows


def _binary(observation: Observation, *, deterministic: bool) -> tuple[bytes, int]:
    tensors = {name: np.ascontiguousarray(rows) for name, rows in observation.items()}
    header: dict[str, Any] = {
        "inputs": [
            {
                "name": name,
                "shape": list(rows.shape),
                "datatype": _DATATYPES[rows.dtype.name],
                "parameters": {"binary_data_size": rows.nbytes},
            }
            for name, rows in tensors.items()
        ],
        "outputs": [{"name": "action", "parameters": {"binary_data": True}}],
    }
    if not deterministic:
        header["parameters"] = {"deterministic": False}
    text = orjson.dumps(header)
    return text + b"".join(rows.tobytes() for rows in tensors.values()), len(text)


class _WebSocket:
    """websockets' protocol without its transport, over the connection's gevent socket."""

    def __init__(self, connection: HttpConnection, url: str, path: str, headers: Sequence[tuple[str, str]]) -> None:
        self._socket = connection.connect()
        self._protocol = ClientProtocol(parse_uri(url.replace("http", "ws", 1) + path), max_size=None)
        self._buffer = bytearray(_READ_BYTES)
        self._frames: list[bytes] = []
        request = self._protocol.connect()
        for name, value in headers:
            request.headers[name] = value
        self._protocol.send_request(request)
        self._flush()
        while self._protocol.state is State.CONNECTING:
            self._read()
        self._next()  # the policy's description

    @property
    def is_open(self) -> bool:
        """Whether the next frame can be sent over it; an answer that is an error does not end it."""
        return self._protocol.state is State.OPEN

    def ask(self, content: bytes) -> bytes:
        """Sends a frame and waits for the next one that comes."""
        self._protocol.send_binary(content)
        self._flush()
        return self._next()

    def _next(self) -> bytes:
        while not self._frames:
            self._read()
        return self._frames.pop(0)

    def _flush(self) -> None:
        try:
            for data in self._protocol.data_to_send():
                if data:
                    self._socket.sendall(data)
        except OSError as error:
            raise RequestFailedError("cut_off", f"the server closed the WebSocket: {error.strerror or error}") from None

    def _read(self) -> None:
        try:
            number = self._socket.recv_into(self._buffer)
        except OSError as error:
            raise RequestFailedError("cut_off", f"the server closed the WebSocket: {error.strerror or error}") from None
        if number:
            self._protocol.receive_data(bytes(self._buffer[:number]))
        else:
            self._protocol.receive_eof()
        for event in self._protocol.events_received():
            if isinstance(event, Response):
                if event.status_code != 101:
                    raise RequestFailedError(f"http_{event.status_code}", event.reason_phrase)
            else:
                self._take(cast("Frame", event))
        self._flush()
        if self._protocol.handshake_exc is not None:
            raise RequestFailedError("bad_answer", str(self._protocol.handshake_exc))
        if self._protocol.state is not State.OPEN and not self._frames:
            closed = self._protocol.close_rcvd
            reason = f" ({closed.code} {closed.reason})" if closed is not None else ""
            raise RequestFailedError("cut_off", f"the server closed the WebSocket{reason}")

    def _take(self, frame: Frame) -> None:
        """A binary frame is an answer; a text frame says ``CODE: what is wrong``, in openpi's protocol too."""
        if frame.opcode is Opcode.BINARY:
            self._frames.append(bytes(frame.data))
        elif frame.opcode is Opcode.TEXT:
            code, _, text = bytes(frame.data).decode(errors="replace").partition(": ")
            known = code.isidentifier() and len(code) < 40 and text
            raise RequestFailedError(code if known else "error", text if known else code[:_MAX_MESSAGE])


def message_of(answer: bytes) -> str:
    """What an error answer says, in the server's shape or in the Open Inference Protocol's."""
    try:
        content = json.loads(answer)
        error = content["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:_MAX_MESSAGE]
    except (ValueError, KeyError, TypeError):
        return answer[:_MAX_MESSAGE].decode(errors="replace")
