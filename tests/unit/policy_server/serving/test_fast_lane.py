"""The short way over real sockets, with an engine that waits when it is told to."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import uvicorn
import uvloop
from pydantic import SecretStr

from policy_server.engines.base import TensorInfo
from policy_server.engines.fake import FakeEngine
from policy_server.errors import PolicyNotFoundError
from policy_server.fast_lane import FastLaneProtocol, fast_lane
from policy_server.manifest import ActionSpace, Architecture, Manifest, ObservationField, Parity, Training
from policy_server.security import ApiKeys
from policy_server.served import ServedPolicy
from policy_server.settings import BatchingSettings

LONG_WAY = b"the long way"
MAX_BODY_BYTES = 4096
LIMIT_S = 20
OBSERVATION = TensorInfo(name="observation", dtype="float32", shape=(2,), dynamic_batch=True)
MANIFEST = Manifest(
    name="reach",
    version=3,
    observation=(ObservationField(name="observation", shape=(2,)),),
    action=ActionSpace(kind="continuous", dtype="float32", shape=(2,), low=(-10, -10), high=(10, 10)),
    opset=18,
    architecture=Architecture(name="any", num_parameters=1),
    training=Training(framework="none"),
    parity=Parity(largest_error=0, tolerance=1, batch_sizes=(1,), num_observations=1, share_at_bounds=0),
    files={"policy.onnx": "00"},
)


class Lane:
    """A server with the short way, whose long way only says that it was taken."""

    def __init__(self, engine: FakeEngine, served: ServedPolicy, port: int, server: uvicorn.Server) -> None:
        self.engine, self.served, self.port, self.server = engine, served, port, server
        self.observed: list[tuple[str, int, int]] = []
        self.long_way_free = asyncio.Event()
        self.long_way_free.set()

    async def long_way(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await self.long_way_free.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"12")]})
        await send({"type": "http.response.body", "body": LONG_WAY})

    def find(self, name: str, version: int | None = None, session_id: str | None = None) -> ServedPolicy:
        if name != "reach" or version not in (None, 3):
            raise PolicyNotFoundError(f"there is no {name} {version}", field="policy")
        return self.served

    def observe_request(self, policy: str, version: int, status: int, total_s: float, protocol: str) -> None:
        assert total_s >= 0
        assert protocol == "http"
        self.observed.append((policy, version, status))

    async def connect(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port))

    def connections(self) -> list[FastLaneProtocol]:
        return [each for each in self.server.server_state.connections if isinstance(each, FastLaneProtocol)]


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, body if body == LONG_WAY else json.loads(body)

    async def action(self) -> list[float]:
        status, _, body = await self.answer()
        assert status == 200, body
        return body["action"]


@asynccontextmanager
async def lane(*, keys: tuple[str, ...] = (), inline: bool = False, **batching: Any) -> AsyncIterator[Lane]:
    engine = FakeEngine(inputs=(OBSERVATION,))
    served = ServedPolicy(
        manifest=MANIFEST,
        engine=engine,
        batching=BatchingSettings(**batching),
        engine_name="fake",
        observe=lambda record: None,
        run_inline_below_s=1.0 if inline else 0.0,
        batch_s=0.5,
    )
    listening = socket.create_server(("127.0.0.1", 0))
    running = Lane(engine, served, listening.getsockname()[1], None)  # type: ignore[arg-type]
    protocol = fast_lane(running, running, ApiKeys([SecretStr(key) for key in keys]), max_body_bytes=MAX_BODY_BYTES)
    config = uvicorn.Config(
        running.long_way,
        interface="asgi3",
        http=protocol,
        lifespan="off",
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=2,  # a test that failed may have left a connection open
    )
    running.server = uvicorn.Server(config)
    serving = asyncio.create_task(running.server._serve([listening]))
    try:
        while not running.server.started:
            await asyncio.sleep(0)
        yield running
    finally:
        engine.free.set()
        running.server.should_exit = True
        await serving
        await served.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), LIMIT_S)

    uvloop.run(limited())


def request(
    values: Any = (1.0, 2.0), *lines: str, path: str = "/v1/policies/reach/act", body: bytes | None = None
) -> bytes:
    content = json.dumps({"observation": values}).encode() if body is None else body
    head = [f"POST {path} HTTP/1.1", "Host: here", f"Content-Length: {len(content)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + content


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.parametrize("inline", [True, False])
def test_a_connection_is_answered_again_and_again(inline: bool) -> None:
    async def test() -> None:
        async with lane(inline=inline) as server:
            client = await server.connect()
            for number in range(5):
                client.send(request([number, -number]))
                status, headers, body = await client.answer()
                assert (status, body["action"], body["version"]) == (200, [2 * number, -2 * number], 3)
                assert headers["content-type"] == "application/json"
            assert server.observed == [("reach", 3, 200)] * 5

    run(test)


def test_actions_are_within_the_bounds_and_never_anything_but_finite() -> None:
    async def test() -> None:
        async with lane() as server:
            client = await server.connect()
            client.send(request([50, -50]))
            assert await client.action() == [10, -10]
            client.send(request([3e38, 1]))  # twice that is infinity in float32
            status, _, body = await client.answer()
            assert (status, body["error"]["code"]) == (422, "non_finite_action")

    run(test)


def test_a_row_that_is_not_finite_does_not_fail_its_neighbours() -> None:
    async def test() -> None:
        async with lane() as server:
            server.engine.free.clear()
            clients = [await server.connect() for _ in range(4)]
            clients[0].send(request())
            await until(lambda: server.engine.entered.acquire(blocking=False))
            for client, value in zip(clients[1:], (1.0, 3e38, 30.0), strict=True):
                client.send(request([value, 0]))
            await until(lambda: server.served.batcher.queued_rows == 3)
            server.engine.free.set()
            statuses = [(await client.answer())[0] for client in clients]
            assert statuses == [200, 200, 422, 200]
            assert server.engine.batches == [1, 3]
            clients[3].send(request([30, 0]))
            assert await clients[3].action() == [10, 0]

    run(test)


@pytest.mark.parametrize("pieces", [1, 2, 7, 40, 60, 200])
def test_however_the_bytes_arrive(pieces: int) -> None:
    async def test() -> None:
        async with lane() as server:
            client = await server.connect()
            for number in range(3):
                data = request([number, 0.5])
                step = -(-len(data) // pieces)
                for first in range(0, len(data), step):
                    client.send(data[first : first + step])
                    await client.writer.drain()
                    for _ in range(3):
                        await asyncio.sleep(0)
                # A head in pieces goes the long way, which here reads nothing.
                status, _, body = await client.answer()
                assert status == 200
                assert body["action"] == [2 * number, 1.0] if pieces == 1 else body != {}

    run(test)


@pytest.mark.parametrize("split", [-1, -20])
def test_a_body_may_come_behind_its_head(split: int) -> None:
    async def test() -> None:
        async with lane() as server:
            client = await server.connect()
            data = request([4, 5]) + request([5, 5])[:30]
            end = len(request([4, 5])) + split
            client.send(data[:end])
            await until(lambda: any(each._head is not None for each in server.connections()))
            client.send(data[end:])
            assert await client.action() == [8, 10]
            client.send(request([5, 5])[30:])
            assert (await client.answer())[0] == 200

    run(test)


def test_what_comes_before_the_answer_waits_for_its_turn() -> None:
    async def test() -> None:
        async with lane() as server:
            server.engine.free.clear()
            client = await server.connect()
            client.send(request([1, 1]))
            await until(lambda: server.engine.entered.acquire(blocking=False))
            client.send(request([2, 2]))
            await until(lambda: bool(server.connections()[0]._held))
            assert server.served.batcher.queued_rows == 0
            server.engine.free.set()
            assert await client.action() == [2, 2]
            assert await client.action() == [4, 4]

    run(test)


def test_the_short_way_does_not_overtake_the_long_one() -> None:
    async def test() -> None:
        async with lane() as server:
            server.long_way_free.clear()
            client = await server.connect()
            client.send(b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n")
            await until(lambda: any(each.cycle is not None for each in server.connections()))
            client.send(request([1, 1]))
            await until(lambda: bool(server.connections()[0].pipeline) or bool(server.observed))
            server.long_way_free.set()
            assert (await client.answer())[2] == LONG_WAY
            assert (await client.answer())[0] == 200
            client.send(request([2, 2]))
            assert await client.action() == [4, 4]

    run(test)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def test() -> None:
        async with lane() as server:
            client = await server.connect()
            client.send(request([1, 1]) * 20)
            for _ in range(20):
                assert (await client.answer())[0] == 200
            client.send(request([3, 4]))
            assert await client.action() == [6, 8]

    run(test)


@pytest.mark.parametrize(
    "data",
    [
        b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n",
        b"POST /v1/policies/reach/load HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n",
        b"POST /v1/policies/reach/act HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"POST /v1/policies/reach/act HTTP/1.0\r\nHost: here\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n{}",
        request((1, 1), "Expect: 100-continue"),
        request((1, 1), "Origin: http://elsewhere"),
        request((1, 1), "Content-Type: text/plain"),
        request((1, 1), "X-Session-Id: a", "X-Session-Id: b"),
        request((1, 1), "X-Padding: " + "x" * 5000),
        request(path="/v1/policies/reach/act?x=1"),
        request(path="/v1/policies/re%61ch/act"),
        request(path="/v1/policies/reach/versions/0/act"),
        request(path=f"/v1/policies/{'r' * 129}/act"),
        request(body=b"x" * (MAX_BODY_BYTES + 1)),
    ],
)
def test_what_is_not_plain_goes_the_long_way_and_the_connection_goes_on(data: bytes) -> None:
    async def test() -> None:
        async with lane() as server:
            client = await server.connect()
            for _ in range(2):
                client.send(data)
                if b"100-continue" in data:
                    assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
                _, headers, body = await client.answer()
                assert body == LONG_WAY
                if headers.get("connection") == "close":
                    client = await server.connect()
                client.send(request([1, 2]))
                assert await client.action() == [2, 4]

    run(test)


@pytest.mark.parametrize(
    "lines",
    [
        ["Content-Length: 5, 5"],
        ["Content-Length: -1"],
        ["Content-Length: +5"],
        ["Content-Length: 0x5"],
        ["Content-Length: 1.0"],
        ["Content-Length:"],
        ["Content-Length: " + "9" * 30],
        ["Content-Length: 5", "Content-Length: 50"],
        ["Content-Length: 5", "Transfer-Encoding: chunked"],
        ["X\x00: y", "Content-Length: 2"],
        ["Content-Length : 2"],
    ],
)
def test_a_head_that_can_be_read_in_two_ways_is_never_answered_with_an_action(lines: list[str]) -> None:
    async def test() -> None:
        async with lane() as server:
            client = await server.connect()
            head = ["POST /v1/policies/reach/act HTTP/1.1", "Host: here", *lines]
            body = b'{"observation": [1, 2]}'
            client.send("\r\n".join(head).encode() + b"\r\n\r\n" + body)
            client.writer.write_eof()
            assert b'"action"' not in await client.reader.read()
            assert server.engine.batches == []

    run(test)


def test_errors_name_the_field_and_carry_the_request_id() -> None:
    async def test() -> None:
        async with lane() as server:
            client = await server.connect()
            client.send(request([1, "x"], "X-Request-Id: mine"))
            status, headers, body = await client.answer()
            assert (status, headers["x-request-id"]) == (400, "mine")
            assert body["error"]["request_id"] == "mine"
            assert body["error"]["field"] == "observation"
            client.send(request(path="/v1/policies/none/act"))
            status, headers, body = await client.answer()
            assert (status, body["error"]["code"]) == (404, "policy_not_found")
            assert headers["x-request-id"] == body["error"]["request_id"]
            client.send(request((1, 1), "X-Timeout-Ms: soon"))
            assert (await client.answer())[2]["error"]["field"] == "x-timeout-ms"
            client.send(request((1, 1), "X-Session-Id: "))
            assert (await client.answer())[2]["error"]["field"] == "x-session-id"
            client.send(request((1, 1)))
            assert await client.action() == [2, 2]
            assert [status for _, _, status in server.observed] == [400, 404, 400, 400, 200]

    run(test)


def test_ids_are_made_where_there_are_none_or_unusable_ones() -> None:
    async def test() -> None:
        async with lane() as server:
            client = await server.connect()
            ids: list[str] = []
            for line in ("X-A: b", "X-A: b", "X-Request-Id: " + "x" * 129, "X-Request-Id: a b"):
                client.send(request((1, 1), line))
                ids.append((await client.answer())[1]["x-request-id"])
            assert len(set(ids)) == 4
            assert all("-" in each and len(each) < 40 for each in ids)

    run(test)


def test_keys_are_asked_for() -> None:
    async def test() -> None:
        async with lane(keys=("first", "second")) as server:
            client = await server.connect()
            for line, expected in (
                ("X-A: b", 401),
                ("Authorization: Bearer wrong", 401),
                ("Authorization: Bearer second", 200),
                ("Authorization: Api-Key first", 200),
                ("X-API-Key: first", 200),
                ("X-API-Key: firs", 401),
                ("Authorization: Bearer \xe9", 401),
            ):
                data = request((1, 1)).replace(b"Host: here", b"Host: here\r\n" + line.encode("latin-1"))
                client.send(data)
                status, headers, _ = await client.answer()
                assert status == expected, line
                assert ("www-authenticate" in headers) == (status == 401)

    run(test)


def test_a_full_queue_says_when_to_come_again_and_a_late_request_costs_no_compute() -> None:
    async def test() -> None:
        async with lane(max_queue=1) as server:
            server.engine.free.clear()
            clients = [await server.connect() for _ in range(3)]
            clients[0].send(request())
            await until(lambda: server.engine.entered.acquire(blocking=False))
            clients[1].send(request((1, 1), "X-Timeout-Ms: 0.001"))
            await until(lambda: server.served.batcher.queued_rows == 1)
            clients[2].send(request())
            status, headers, body = await clients[2].answer()
            assert (status, body["error"]["code"]) == (503, "queue_full")
            assert int(headers["retry-after"]) >= 1
            server.engine.free.set()
            status, _, body = await clients[1].answer()
            assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
            assert (await clients[0].answer())[0] == 200
            assert server.engine.batches == [1]

    run(test)


def test_a_client_that_has_gone_disturbs_nobody() -> None:
    async def test() -> None:
        async with lane() as server:
            server.engine.free.clear()
            gone, stays = await server.connect(), await server.connect()
            gone.send(request())
            await until(lambda: server.engine.entered.acquire(blocking=False))
            stays.send(request([3, 3]))
            await until(lambda: server.served.batcher.queued_rows == 1)
            gone.writer.transport.abort()
            await until(lambda: len(server.connections()) == 1)
            server.engine.free.set()
            assert await stays.action() == [6, 6]

    run(test)


def test_connection_close_ends_it_after_the_answer() -> None:
    async def test() -> None:
        async with lane() as server:
            client = await server.connect()
            client.send(request((1, 1), "Connection: close"))
            status, headers, _ = await client.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert await client.reader.read() == b""

    run(test)


def test_a_stopping_server_answers_what_it_has_begun() -> None:
    async def test() -> None:
        async with lane() as server:
            server.engine.free.clear()
            client, idle = await server.connect(), await server.connect()
            client.send(request([2, 2]))
            await until(lambda: server.engine.entered.acquire(blocking=False))
            await until(lambda: len(server.connections()) == 2)
            server.server.should_exit = True
            assert await idle.reader.read() == b""
            server.engine.free.set()
            status, headers, body = await client.answer()
            assert (status, headers["connection"], body["action"]) == (200, "close", [4, 4])
            assert await client.reader.read() == b""

    run(test)


def test_a_client_that_does_not_read_is_not_read_from() -> None:
    async def test() -> None:
        async with lane(inline=True) as server:
            client = await server.connect()
            rows = [[0.1, 0.2]] * 100  # so that its answers soon fill the socket
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: bool(server.connections()))
            protocol = server.connections()[0]
            sent = 0
            while not protocol._write_blocked:
                client.send(request(rows))
                sent += 1
                await until(lambda: len(server.observed) == sent)  # noqa: B023  # awaited before it changes
            client.send(request(rows))
            await until(lambda: bool(protocol._held))
            client.send(request(rows))
            for _ in range(100):
                await asyncio.sleep(0)
            assert len(server.observed) == sent
            client.reader._transport.resume_reading()  # type: ignore[attr-defined]
            for _ in range(sent + 2):
                status, _, body = await client.answer()
                assert status == 200
                np.testing.assert_allclose(body["action"], np.asarray(rows) * 2, rtol=1e-6)

    run(test)


def test_heads_are_kept_whatever_the_bodys_length_and_the_table_does_not_grow_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("policy_server.fast_lane._MAX_KEPT_HEADS", 5)

    async def test() -> None:
        async with lane() as server:
            client = await server.connect()
            for value in (1, 1.5, 1.25, 1.125):
                client.send(request([value, 1]))
                assert await client.action() == [2 * value, 2]
            heads = server.connections()[0].heads
            assert len(heads) == 1
            for number in range(30):
                client.send(request((1, 1), f"X-Session-Id: {number}"))
                assert await client.action() == [2, 2]
                assert len(heads) <= 5

    run(test)


def test_heads_with_an_id_of_their_own_are_not_kept() -> None:
    async def test() -> None:
        async with lane() as server:
            client = await server.connect()
            for number in range(5):
                client.send(request((1, 1), f"X-Request-Id: {number}"))
                assert (await client.answer())[1]["x-request-id"] == str(number)
            assert not server.connections()[0].heads

    run(test)
