"""The connection under the load: kept, cut off, late, refused."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from fake_llm_server import fake_llm_server

from loadtest.http_connection import HttpConnection, RequestFailedError

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


@contextmanager
def raw_server(*answers: bytes | Callable[[socket.socket], None]) -> Iterator[str]:
    """Gives each connection the next of the answers, whatever it asks, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65536)
                    if callable(answer):
                        answer(connection)
                    else:
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def get(connection: HttpConnection) -> tuple[int, bytes]:
    pieces: list[bytes] = []
    status = connection.request("GET", "/v1/models", b"", lambda piece, _: pieces.append(piece))
    return status, b"".join(pieces)


def test_a_connection_is_kept() -> None:
    with fake_llm_server() as server:
        connection = HttpConnection(server.url, timeout_s=10)
        answers = {get(connection) for _ in range(20)}
        assert len(answers) == 1
        assert server.num_connections == 1


def test_a_kept_connection_that_the_server_closed_is_opened_again() -> None:
    with fake_llm_server() as server:
        server.close_after = 3
        connection = HttpConnection(server.url, timeout_s=10)
        assert [get(connection)[0] for _ in range(7)] == [200] * 7
        assert server.num_connections == 3


def test_a_server_that_says_close_is_believed() -> None:
    closing = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with raw_server(closing, closing) as url:
        connection = HttpConnection(url, timeout_s=10)
        assert [get(connection), get(connection)] == [(200, b"hi")] * 2


def test_an_answer_may_end_with_its_connection() -> None:
    with raw_server(b"HTTP/1.1 200 OK\r\n\r\nall of it") as url:
        assert get(HttpConnection(url, timeout_s=10)) == (200, b"all of it")


@pytest.mark.parametrize("framing", [b"", b"Content-Length: 9\r\n", b"Connection: close\r\nContent-Length: 9\r\n"])
def test_an_answer_may_come_byte_by_byte(framing: bytes) -> None:
    answer = b"HTTP/1.1 200 OK\r\n" + framing + b"\r\nall of it"

    def drip(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in answer:
            connection.sendall(bytes([byte]))
            time.sleep(1e-3)

    with raw_server(drip) as url:
        assert get(HttpConnection(url, timeout_s=10)) == (200, b"all of it")


def test_answers_over_one_connection_do_not_mix() -> None:
    """Some in pieces, some with an empty body, some an error, all parsed by the connection's one parser."""
    bodies = [b"x" * size for size in (0, 1, 70_000, 0, 5)]

    def answer_all(connection: socket.socket) -> None:
        for number, body in enumerate(bodies):
            if number:
                connection.recv(65536)
            head = f"HTTP/1.1 {400 + number} No\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            connection.sendall(head)
            time.sleep(0.01)
            connection.sendall(body)

    with raw_server(answer_all) as url:
        connection = HttpConnection(url, timeout_s=10)
        assert [get(connection) for _ in bodies] == [(400 + number, body) for number, body in enumerate(bodies)]


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (b"", "cut_off", "without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nhalf", "cut_off", "in the middle"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "cut_off", "in the middle"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 20\r\n\r\nhalf", "cut_off", "in the middle"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", "cut_off", "in the middle"),
        (b"SSH-2.0-OpenSSH\r\n", "bad_answer", "not HTTP"),
    ],
)
def test_what_is_no_whole_answer(answer: bytes, kind: str, message: str) -> None:
    with raw_server(answer, OK) as url:
        connection = HttpConnection(url, timeout_s=10)
        with pytest.raises(RequestFailedError, match=message) as failed:
            get(connection)
        assert failed.value.kind == kind
        assert get(connection) == (200, b"hi")  # over another connection


def test_silence_ends_in_a_timeout() -> None:
    released = threading.Event()
    with raw_server(lambda _: released.wait(30) and None, OK) as url:
        connection = HttpConnection(url, timeout_s=0.2)
        with pytest.raises(RequestFailedError, match=r"no whole answer within 0\.2 s") as failed:
            get(connection)
        assert failed.value.kind == "timeout"
        released.set()
        assert get(connection) == (200, b"hi")


def test_a_body_that_does_not_fit_into_the_socket_is_sent_whole() -> None:
    body = random.Random(0).randbytes(16 << 20)
    heard = bytearray()

    def read_to_the_end(connection: socket.socket) -> None:
        while not heard.endswith(body[-1024:]):
            heard.extend(connection.recv(1 << 16))
        connection.sendall(OK)

    with raw_server(read_to_the_end) as url:
        connection = HttpConnection(url, timeout_s=30)
        assert connection.request("POST", "/", body, lambda *_: None) == 200
    assert len(heard) > 15 << 20
    assert body.endswith(heard)


def test_a_server_that_reads_nothing_ends_in_a_timeout() -> None:
    released = threading.Event()
    with raw_server(lambda _: released.wait(30) and None) as url:
        with pytest.raises(RequestFailedError, match=r"no whole answer within 0\.3 s"):
            HttpConnection(url, timeout_s=0.3).request("POST", "/", bytes(64 << 20), lambda *_: None)
        released.set()


def test_the_time_limit_counts_from_each_request() -> None:
    with fake_llm_server() as server:
        connection = HttpConnection(server.url, timeout_s=0.5)
        began = time.monotonic()
        while time.monotonic() - began < 1.2:
            assert get(connection)[0] == 200
        assert server.num_connections == 1


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(RequestFailedError, match="Connection refused") as failed:
        get(HttpConnection(f"http://127.0.0.1:{port}", timeout_s=10))
    assert failed.value.kind == "connection"
