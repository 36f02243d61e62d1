"""An OpenAI-compatible server that does what a test wants it to do wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Mode = str
"""``stream``, or a fault: ``json`` (not streamed), ``html``, ``error_event``, ``not_json``, ``cut`` (the connection
ends in mid-answer), ``no_done`` (the stream ends without [DONE]), ``empty`` (no chunk), ``silent`` (never answers),
``drop`` (closes without an answer), ``not_http``, or a status such as ``503``."""


class FakeLlmServer:
    """Answers on a thread of its own.

    Attributes:
        mode: What it does with a completion.
        num_chunks: Chunks of an answer; ``max_tokens`` of the request if None.
        chunk_s: Time before each chunk.
        first_chunk_s: Time before the first one, if it is another.
        usage: Whether it tells its usage.
        stall: Cleared while nothing is answered.
        requests: Every completion's body.
        num_connections: Connections that were opened.
        close_after: Close a kept connection after so many answers, as servers may; None for never.
    """

    def __init__(self) -> None:
        self.mode: Mode = "stream"
        self.num_chunks: int | None = None
        self.chunk_s = 0.0
        self.first_chunk_s = 0.0
        self.usage = True
        self.api_key: str | None = None
        self.requests: list[dict[str, Any]] = []
        self.num_connections = 0
        self.close_after: int | None = None
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._going = asyncio.Event()
        self._going.set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def thread_id(self) -> int:
        """Of the thread that answers, for the operating system."""
        assert self._thread.native_id is not None
        return self._thread.native_id

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        """Ends at once."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def stall(self, stalled: bool) -> None:
        """Answers nothing, or goes on."""
        self._loop.call_soon_threadsafe(self._going.clear if stalled else self._going.set)

    def _run(self) -> None:
        async def start() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
            self.port = server.sockets[0].getsockname()[1]
            self._ready.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                self._loop.run_until_complete(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        answered = 0
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while self.close_after is None or answered < self.close_after:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                line, *lines = head.split("\r\n")
                headers = {name.lower(): value for name, _, value in (text.partition(": ") for text in lines if text)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self._answer(line.split()[1], headers, body, writer):
                    break
                answered += 1
        writer.close()

    async def _answer(self, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        await self._going.wait()
        if self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}":
            return await _whole(writer, 401, {"error": {"message": "wrong key"}})
        if path == "/v1/models":
            return await _whole(writer, 200, {"object": "list", "data": [{"id": "fake"}, {"id": "other"}]})
        if not path.endswith("completions"):
            return await _whole(writer, 404, {"error": {"message": f"nothing at {path}"}})
        content = json.loads(body)
        self.requests.append(content)
        return await self._complete(content, "chat" in path, writer)

    async def _complete(self, content: dict[str, Any], is_chat: bool, writer: asyncio.StreamWriter) -> bool:
        mode = self.mode
        wholes: dict[str, Any] = {
            "json": {"choices": [{"message": {"content": "all at once"}}]},
            "html": "<html>a proxy's page</html>",
        }
        if mode.isdecimal():
            return await _whole(writer, int(mode), {"error": {"message": f"told to answer {mode}"}})
        if mode in wholes:
            return await _whole(writer, 200, wholes[mode])
        if mode in ("drop", "silent", "not_http"):
            writer.write(b"what?\r\n\r\n" if mode == "not_http" else b"")
            await asyncio.sleep(3600 if mode == "silent" else 0)
            return False
        asked = content.get("max_completion_tokens") or content.get("max_tokens") or 16
        number = self.num_chunks if self.num_chunks is not None else asked
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for index in range(0 if mode == "empty" else number):
            await asyncio.sleep(self.chunk_s if index else self.first_chunk_s or self.chunk_s)
            if mode == "cut" and index == 1:
                return False
            part = {"delta": {"content": f" {index}"}} if is_chat else {"text": f" {index}"}
            await _event(writer, json.dumps({"choices": [{"index": 0, **part}], "usage": None}))
        for event in self._last_events(content, number):
            await _event(writer, event)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _last_events(self, content: dict[str, Any], number: int) -> Iterator[str]:
        if self.mode == "error_event":
            yield json.dumps({"error": {"message": "out of memory", "code": 500}})
        if self.mode == "not_json":
            yield "{half"
        if self.usage:
            prompt = json.dumps(content.get("messages") or content.get("prompt"))
            usage = {"prompt_tokens": 7 + len(prompt.split()), "completion_tokens": number}
            yield json.dumps({"choices": [], "usage": usage})
        if self.mode != "no_done":
            yield "[DONE]"


async def _whole(writer: asyncio.StreamWriter, status: int, content: Any) -> bool:
    body = (content if isinstance(content, str) else json.dumps(content)).encode()
    writer.write(b"HTTP/1.1 %d Status\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
    await writer.drain()
    return True


async def _event(writer: asyncio.StreamWriter, data: str) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(event), event))
    await writer.drain()


@contextmanager
def fake_llm_server() -> Iterator[FakeLlmServer]:
    """A server for the length of a test."""
    server = FakeLlmServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()
