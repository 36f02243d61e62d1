"""One streamed request to an OpenAI-compatible server, timed as ``vllm bench serve`` times it.

A chunk is an event with ``choices``. It is timed when its bytes are read from the socket; chunks that are read together
share that time. TTFT counts to the first chunk, each later one gives an inter-token latency, and the request ends with
the last; the usage that follows it does not count. A chunk whose text is empty counts like any other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import orjson

from loadtest.http_connection import HttpConnection, RequestFailedError
from loadtest.records import RequestRecord
from loadtest.settings import LlmSettings
from loadtest.sse import EventStream

Messages = Sequence[Mapping[str, Any]]

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_MAX_MESSAGE = 400


@dataclass(slots=True)
class Ask:
    """What one request asks for.

    Attributes:
        prompt: Messages for the chat endpoint, text for completions.
        max_tokens: Longest answer.
        turn: Which turn of its conversation, from 0.
    """

    prompt: Messages | str
    max_tokens: int
    turn: int = 0


@dataclass(slots=True)
class _Stream:
    """What has come of a streamed answer."""

    is_chat: bool
    events: EventStream = field(default_factory=EventStream)
    chunk_times: list[float] = field(default_factory=list[float])
    text: list[str] = field(default_factory=list[str])
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    fault: str | None = None
    done: bool = False
    num_bytes: int = 0
    raw: list[bytes] = field(default_factory=list[bytes])

    def on_body(self, piece: bytes, read_at: float) -> None:
        self.num_bytes += len(piece)
        if self.num_bytes - len(piece) < _MAX_MESSAGE:
            self.raw.append(piece)
        for data in self.events.feed(piece):
            if data == b"[DONE]":
                self.done = True
                continue
            try:
                chunk = orjson.loads(data)
            except orjson.JSONDecodeError:
                self.fault = self.fault or f"an event is not JSON: {_shown(data)}"
                continue
            if not isinstance(chunk, dict):
                self.fault = self.fault or f"an event is no object: {_shown(data)}"
            elif chunk.get("error"):
                self.fault = self.fault or f"an error in the stream: {_shown(data)}"
            else:
                self._on_chunk(chunk, read_at)

    def _on_chunk(self, chunk: dict[str, Any], read_at: float) -> None:
        if usage := chunk.get("usage"):
            self.usage = usage
        if choices := chunk.get("choices"):
            self.chunk_times.append(read_at)
            choice = choices[0]
            text = (choice.get("delta") or {}).get("content") if self.is_chat else choice.get("text")
            if text:
                self.text.append(text)


class LlmClient:
    """Asks over one kept connection; one greenlet at a time.

    Args:
        settings: Whom and what to ask; the model has to be resolved.
        timeout_s: For one request.
    """

    def __init__(self, settings: LlmSettings, *, timeout_s: float) -> None:
        headers = settings.headers
        if settings.api_key is not None:
            headers = (*headers, ("Authorization", f"Bearer {settings.api_key}"))
        self._settings = settings
        self._path = PATHS[settings.endpoint]
        self._connection = HttpConnection(settings.url, timeout_s=timeout_s, headers=headers)
        self.last_text = ""
        """What the last request was answered; for the next turn of a conversation."""

    def send(self, ask: Ask, *, intended_s: float | None = None) -> RequestRecord:
        """Sends one request and waits for the whole of its answer; whatever goes wrong is in the record.

        Args:
            ask: What to ask for.
            intended_s: When it was meant to be sent, seconds since the epoch; None for now.
        """
        body = self._body(ask)
        stream = _Stream(is_chat=self._settings.endpoint == "chat")
        sent_s, started = time.time(), time.perf_counter()
        record = RequestRecord(
            kind=self._settings.endpoint,
            intended_s=sent_s if intended_s is None else intended_s,
            sent_s=sent_s,
            turn=ask.turn,
            sent_bytes=len(body),
        )
        self.last_text = ""
        try:
            record.status = self._connection.request("POST", self._path, body, stream.on_body)
        except RequestFailedError as error:
            record.error, record.message = error.kind, str(error)
        record.received_bytes = stream.num_bytes
        self._fill(record, stream, started)
        if record.error is None:
            self.last_text = "".join(stream.text)
        else:
            record.service_ms = 1e3 * (time.perf_counter() - started)
        return record

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def _body(self, ask: Ask) -> bytes:
        settings = self._settings
        content: dict[str, Any] = {
            "model": settings.model,
            **({"messages": ask.prompt} if settings.endpoint == "chat" else {"prompt": ask.prompt}),
            "max_tokens": ask.max_tokens,
            "temperature": settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if settings.ignore_eos:
            content["ignore_eos"] = True
        return orjson.dumps(content)

    def _fill(self, record: RequestRecord, stream: _Stream, started: float) -> None:
        if record.error is None:
            record.error, record.message = _fault_of(record.status, stream)
        times = stream.chunk_times
        if not times:
            return
        lag_s = record.sent_s - record.intended_s
        record.ttft_ms = 1e3 * (times[0] - started + lag_s)
        record.itl_ms = [1e3 * (later - earlier) for earlier, later in pairwise(times)]
        if record.error is None:
            record.service_ms = 1e3 * (times[-1] - started)
            record.latency_ms = record.service_ms + 1e3 * lag_s
        record.input_tokens = stream.usage.get("prompt_tokens")
        output_tokens = stream.usage.get("completion_tokens")
        record.tokens_from = "usage" if output_tokens is not None else "chunks"
        record.output_tokens = output_tokens if output_tokens is not None else len(times)


def _fault_of(status: int, stream: _Stream) -> tuple[str | None, str]:
    raw = b"".join(stream.raw)
    if status != 200:
        return f"http_{status}", _message_of(raw)
    if stream.fault is not None:
        return "stream_error" if stream.fault.startswith("an error") else "bad_answer", stream.fault
    if not stream.chunk_times:
        if raw.lstrip().startswith(b"{"):
            return "not_streamed", f"the server answered in one piece although a stream was asked for: {_shown(raw)}"
        return "empty_stream", f"no chunk with choices came: {_shown(raw)}"
    if not stream.done:
        return "cut_off", "the stream ended without [DONE]"
    return None, ""


def _message_of(raw: bytes) -> str:
    """What an error answer says, in OpenAI's shape or any other."""
    try:
        content = json.loads(raw)
        error = content.get("error", content)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:_MAX_MESSAGE]
    except (ValueError, AttributeError):
        return _shown(raw)


def _shown(raw: bytes) -> str:
    return raw[:_MAX_MESSAGE].decode(errors="replace").strip() or "(nothing)"
