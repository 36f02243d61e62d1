"""A server that does nothing, as fast as it can: what the generator's own ceiling is measured against.

It answers every protocol of the load tests with constants: actions as JSON, as binary tensors and over a WebSocket, and
streams of chunks. ``python -m loadtest.noop_server`` prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import sys
from typing import Any

import httptools  # pyright: ignore[reportMissingTypeStubs]
import orjson

from policy_server.wire_msgpack import pack

_WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
_ACTION = [0.0, 0.0, 0.0, 0.0]
_ACT = orjson.dumps({"action": _ACTION, "version": 1, "timing": {"total_ms": 0.0}})
_INFER_HEADER = orjson.dumps(
    {
        "model_name": "noop",
        "model_version": "1",
        "outputs": [
            {"name": "action", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}},
        ],
    }
)


class NoopProtocol(asyncio.Protocol):
    """One connection.

    Args:
        num_chunks: Chunks of a streamed answer.
    """

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._path = b""
        self._key = b""
        self._frames: bytearray | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        if self._frames is not None:
            self._frames += data
            self._answer_frames(self._frames)
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._upgrade()
        except httptools.HttpParserError:
            self._transport.close()

    # httptools calls these.

    def on_url(self, url: bytes) -> None:
        """The request's path."""
        self._path = url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        if name.lower() == b"sec-websocket-key":
            self._key = value

    def on_message_complete(self) -> None:
        """The whole request has come."""
        if self._key:
            return
        if self._path.endswith(b"/act"):
            self._transport.write(_response(_ACT))
        elif self._path.endswith(b"/infer"):
            extra = b"Inference-Header-Content-Length: %d\r\n" % len(_INFER_HEADER)
            self._transport.write(_response(_INFER_HEADER + bytes(16), extra))
        else:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            self._stream(self._num_chunks, chat=b"chat" in self._path)

    def _stream(self, left: int, *, chat: bool) -> None:
        if left:
            part = {"delta": {"content": " a"}} if chat else {"text": " a"}
            self._transport.write(_chunk({"choices": [{"index": 0, **part}]}))
            asyncio.get_running_loop().call_soon(lambda: self._stream(left - 1, chat=chat))
        else:
            usage = {"prompt_tokens": 1, "completion_tokens": self._num_chunks}
            self._transport.write(_chunk({"choices": [], "usage": usage}) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    # WebSocket.

    def _upgrade(self) -> None:
        digest = base64.b64encode(hashlib.sha1(self._key + _WEBSOCKET_GUID).digest())  # noqa: S324  # RFC 6455
        self._transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + digest + b"\r\n\r\n" + _frame(pack({"name": "noop"}))
        )
        self._frames = bytearray()

    def _answer_frames(self, frames: bytearray) -> None:
        while len(frames) >= 2:
            length, head = frames[1] & 0x7F, 6  # a client's frames are masked: four bytes more
            if length == 126:
                length, head = int.from_bytes(frames[2:4], "big"), 8
            elif length == 127:
                length, head = int.from_bytes(frames[2:10], "big"), 14
            if len(frames) < head + length:
                return
            is_binary = frames[0] & 0x0F == 2
            del frames[: head + length]
            if is_binary:
                self._transport.write(_ACTION_FRAME)


def _response(body: bytes, extra: bytes = b"") -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n" % (extra, len(body)) + body
    )


def _chunk(content: dict[str, Any]) -> bytes:
    event = b"data: " + orjson.dumps(content) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


def _frame(content: bytes) -> bytes:
    size = bytes([len(content)]) if len(content) < 126 else b"\x7e" + len(content).to_bytes(2, "big")
    return b"\x82" + size + content


_ACTION_FRAME = _frame(pack({"action": _ACTION}))


async def serve(num_chunks: int) -> None:
    """Serves until it is ended; prints the port."""
    server = await asyncio.get_running_loop().create_server(lambda: NoopProtocol(num_chunks), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-chunks", type=int, default=64, help="chunks of a streamed answer")
    arguments = parser.parse_args()
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(arguments.num_chunks))
    else:
        uvloop.run(serve(arguments.num_chunks))


if __name__ == "__main__":
    main()
