"""Which heads the short way takes, and what it understands of them."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from policy_server.errors import UnauthorizedError
from policy_server.request_head import ActHead, new_request_id, read_act_head
from policy_server.security import ApiKeys

OPEN = ApiKeys([])


def block(*lines: str, first: str = "POST /v1/policies/tiny/act HTTP/1.1") -> bytes:
    headers = ["Host: here", "Content-Length: 12", *lines]
    return "\r\n".join([first, *headers]).encode("latin-1")


def read(*lines: str, keys: ApiKeys = OPEN, **options: str) -> ActHead | None:
    return read_act_head(block(*lines, **options), keys)


def test_a_plain_request_is_understood() -> None:
    head = read("Content-Type: application/json", "X-Session-Id: robot", "x-timeout-ms:  20 ", "X-Request-Id: abc")
    assert head == ActHead(
        name="tiny", version=None, session_id="robot", timeout_ms=20.0, request_id=b"abc", close=False, error=None
    )


def test_a_version_in_the_path_is_understood() -> None:
    head = read(first="POST /v1/policies/a.b-c_1/versions/12/act HTTP/1.1")
    assert head is not None
    assert (head.name, head.version) == ("a.b-c_1", 12)


@pytest.mark.parametrize(
    "first",
    [
        "GET /v1/policies/tiny/act HTTP/1.1",
        "POST /v1/policies/tiny/act HTTP/1.0",
        "POST /v1/policies/tiny/act?x=1 HTTP/1.1",
        "POST /v1/policies/tiny/load HTTP/1.1",
        "POST /v1/policies/ti%6ey/act HTTP/1.1",
        "POST /v1/policies/../tiny/act HTTP/1.1",
        "POST /v1/policies/tiny/versions/0/act HTTP/1.1",
        "POST /v1/policies/tiny/versions/01/act HTTP/1.1",
        "POST /v1/policies//act HTTP/1.1",
        "POST  /v1/policies/tiny/act HTTP/1.1",
    ],
)
def test_other_request_lines_go_the_long_way(first: str) -> None:
    assert read(first=first) is None


@pytest.mark.parametrize(
    "line",
    [
        "Transfer-Encoding: chunked",
        "Expect: 100-continue",
        "Upgrade: websocket",
        "Origin: http://other",
        "Connection: upgrade",
        "Content-Type: text/plain",
        "Content-Length: 13",
        "Host: there",
        "Authorization: Bearer a\r\nAuthorization: Bearer b",
        " folded: yes",
        "no colon",
        "bad name: 1",
        "x: \x00",
        "x : 1",
        ": 1",
    ],
)
def test_whatever_is_not_plain_goes_the_long_way(line: str) -> None:
    assert read(line) is None


def test_a_missing_host_or_length_goes_the_long_way() -> None:
    assert read_act_head(b"POST /v1/policies/tiny/act HTTP/1.1\r\nContent-Length: 5", OPEN) is None
    assert read_act_head(b"POST /v1/policies/tiny/act HTTP/1.1\r\nHost: here", OPEN) is None


def test_a_closing_connection_is_understood() -> None:
    head = read("Connection: close")
    assert head is not None
    assert head.close


@pytest.mark.parametrize(
    "line", ["X-Timeout-Ms: soon", "X-Timeout-Ms: -1", "X-Timeout-Ms: nan", "X-Session-Id: " + "x" * 300]
)
def test_a_header_that_makes_no_sense_is_the_answers_error(line: str) -> None:
    head = read(line)
    assert head is not None
    assert head.error is not None
    assert head.error.field == line.split(":")[0].lower()


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "é"])
def test_request_ids_that_cannot_be_sent_back_are_not(request_id: str) -> None:
    head = read(f"X-Request-Id: {request_id}")
    assert head is not None
    assert head.request_id is None


@pytest.mark.parametrize(
    ("line", "let_in"),
    [
        ("Authorization: Bearer secret", True),
        ("authorization: bearer secret", True),
        ("Authorization: Api-Key other", True),
        ("X-API-Key: secret", True),
        ("Sec-WebSocket-Protocol: json, api-key.secret", True),
        ("Authorization: Bearer secre", False),
        ("Authorization: Bearer secret2", False),
        ("Authorization: secret", False),
        ("Authorization: Basic secret", False),
        ("X-API-Key: ", False),
        ("X-Other: secret", False),
    ],
)
def test_keys(line: str, let_in: bool) -> None:
    head = read(line, keys=ApiKeys([SecretStr("secret"), SecretStr("other")]))
    assert head is not None
    assert isinstance(head.error, UnauthorizedError) is not let_in


def test_request_ids_differ() -> None:
    assert len({new_request_id() for _ in range(1000)}) == 1000
