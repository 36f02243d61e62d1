"""``serve-policy`` as its users have it: a process, a port, real requests over both ways in."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_ends import assert_all_end
from served_policies import RunningPolicyServer, running_policy_server, write_policy

ACT = "/v1/policies/tiny/act"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPolicyServer]:
    folder = tmp_path_factory.mktemp("server")
    repository = folder / "repository"
    write_policy(repository, fields={"goal": 2}, distribution=True)
    write_policy(repository, name="plain", version=4)
    with running_policy_server(repository, folder / "log") as running:
        yield running


def raw(server: RunningPolicyServer, *parts: bytes, pause_s: float = 0.02) -> bytes:
    """Sends bytes as they are, in pieces, and reads until the server hangs up or falls silent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause_s)
        connection.settimeout(1)
        received = b""
        try:
            while chunk := connection.recv(65536):
                received += chunk
        except TimeoutError:
            pass
        return received


def plain_request(body: bytes, *headers: str, path: str = ACT, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: here", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


GOOD = json.dumps({"observation": {"observation": [1, 2, 3], "goal": [0, 0]}}).encode()


def without_times(content: Any) -> Any:
    return {**content, "timing": sorted(content["timing"])} if "timing" in content else content


CASES: list[tuple[str, bytes, tuple[str, ...]]] = [
    (ACT, GOOD, ()),
    (ACT, b'{"observation": [1, 2, 3, 0, 0]}', ()),
    (ACT, b'{"observation": [[1, 2, 3, 0, 0], [4, 5, 6, 0, 0]]}', ()),
    (ACT, b'{"observation": [1, 2, 3, 0, 0], "deterministic": false, "seed": 3}', ()),
    (ACT, GOOD, ("X-Session-Id: robot", "X-Timeout-Ms: 5000")),
    ("/v1/policies/tiny/versions/1/act", GOOD, ()),
    ("/v1/policies/plain/act", b'{"observation": [1, 2, 3]}', ()),
    ("/v1/policies/plain/act", b'{"observation": [1, 2, 3], "deterministic": false}', ()),
    ("/v1/policies/tiny/versions/9/act", GOOD, ()),
    ("/v1/policies/nope/act", GOOD, ()),
    (ACT, b"", ()),
    (ACT, b"{", ()),
    (ACT, b'{"observation": [1, 2]}', ()),
    (ACT, b'{"observation": {"observation": [1, 2, "x"], "goal": [0, 0]}}', ()),
    (ACT, b'{"observation": [1, 2, 3, 0, 0], "seed": 3}', ()),
    (ACT, GOOD, ("X-Timeout-Ms: soon",)),
    (ACT, json.dumps({"observation": [[0.0] * 5] * 1025}).encode(), ()),
]


@pytest.mark.parametrize(("path", "body", "headers"), CASES)
def test_both_ways_give_the_same_answer(
    server: RunningPolicyServer, path: str, body: bytes, headers: tuple[str, ...]
) -> None:
    """A request that says ``Expect`` or ``Origin`` goes through FastAPI; without it, it takes the short way."""
    answers: list[tuple[int, Any, dict[str, str]]] = []
    for extra in ((), ("Origin: http://here",)):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        fields = dict(line.split(": ", 1) for line in (*headers, *extra))
        connection.request("POST", path, body, {"Content-Type": "application/json", "X-Request-Id": "same", **fields})
        answer = connection.getresponse()
        content = json.loads(answer.read())
        kept = {name.lower(): value for name, value in answer.getheaders() if name.lower() != "content-length"}
        answers.append((answer.status, without_times(content), kept))
        connection.close()
    assert answers[0] == answers[1]


def test_the_action_is_the_policys(server: RunningPolicyServer) -> None:
    status, content = server.act({"observation": [1, 2, 3], "goal": [9, 9]})
    assert (status, content["action"], content["version"]) == (200, [1.0, 2.0, 3.0], 1)
    assert server.act([1, 2, 3], name="plain")[1]["action"] == [4.0, 8.0, 12.0]


@pytest.mark.parametrize("cut", [1, 20, 60, 90, -1])
def test_requests_that_come_in_pieces(server: RunningPolicyServer, cut: int) -> None:
    request = plain_request(GOOD, "Connection: close")
    answer = raw(server, request[:cut], request[cut:])
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"action":[1.0,2.0,3.0]' in answer


def test_body_byte_by_byte(server: RunningPolicyServer) -> None:
    request = plain_request(GOOD, "Connection: close")
    end = request.index(b"\r\n\r\n") + 4
    pieces = [request[:end], *(bytes([byte]) for byte in GOOD)]
    assert b'"action":[1.0,2.0,3.0]' in raw(server, *pieces, pause_s=0.0005)


def test_pipelined_requests_are_answered_in_their_order(server: RunningPolicyServer) -> None:
    bodies = [json.dumps({"observation": [index, 0, 0, 0, 0]}).encode() for index in range(20)]
    stream = b"".join(plain_request(body) for body in bodies[:-1]) + plain_request(bodies[-1], "Connection: close")
    for parts in ([stream], [stream[:333], stream[333:1000], stream[1000:]]):
        answer = raw(server, *parts)
        found = [
            json.loads(part.split(b"\r\n\r\n")[1].split(b"HTTP/1.1")[0])
            for part in answer.split(b"HTTP/1.1 200 OK")[1:]
        ]
        assert [content["action"][0] for content in found] == list(range(20))


def test_pipelined_requests_of_both_ways_keep_their_order(server: RunningPolicyServer) -> None:
    stream = (
        plain_request(GOOD)
        + plain_request(b"", path="/healthz", method="GET")
        + plain_request(GOOD)
        + plain_request(b"", "Connection: close", path="/readyz", method="GET")
    )
    answer = raw(server, stream)
    order = [answer.index(b'"action"'), answer.index(b'"ok"'), answer.rindex(b'"action"'), answer.index(b'"ready"')]
    assert order == sorted(order)
    assert answer.count(b"HTTP/1.1 200") == 4


def test_chunked_bodies_and_100_continue(server: RunningPolicyServer) -> None:
    chunked = f"POST {ACT} HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
    chunked += f"{len(GOOD):x}\r\n".encode() + GOOD + b"\r\n0\r\n\r\n"
    assert b'"action":[1.0,2.0,3.0]' in raw(server, chunked)
    request = plain_request(GOOD, "Expect: 100-continue", "Connection: close")
    assert b'"action":[1.0,2.0,3.0]' in raw(server, request)


def test_a_connection_is_kept_and_can_change_its_way(server: RunningPolicyServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.connect()
    sock = connection.sock
    for _ in range(3):
        for method, path, body in (
            ("POST", ACT, GOOD),
            ("GET", "/v1/policies", None),
            ("POST", ACT, b"{"),
            ("GET", "/nope", None),
        ):
            connection.request(method, path, body)
            connection.getresponse().read()
            assert connection.sock is sock
    connection.close()


def test_a_client_that_goes_away_harms_nobody(server: RunningPolicyServer) -> None:
    for cut in (30, 100, None):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(plain_request(GOOD)[:cut])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    assert server.act([1, 2, 3, 0, 0])[0] == 200


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"POST /v1/policies/x/act HTTP/9.9\r\n\r\n",
        b"\r\n" * 50,
        b"x" * 100_000,
    ],
)
def test_garbage_is_refused(server: RunningPolicyServer, garbage: bytes) -> None:
    answer = raw(server, garbage)
    assert not answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 5"))
    assert server.act([1, 2, 3, 0, 0])[0] == 200


def test_bodies_above_the_limit_are_refused_however_they_come(server: RunningPolicyServer) -> None:
    large = 5 << 20
    announced = f"POST {ACT} HTTP/1.1\r\nHost: here\r\nContent-Length: {large}\r\n\r\n".encode()
    assert raw(server, announced).startswith(b"HTTP/1.1 413")
    chunked = f"POST {ACT} HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n{large:x}\r\n".encode()
    answer = raw(server, chunked + b"1" * large)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"payload_too_large" in answer


def test_errors_have_one_shape_everywhere(server: RunningPolicyServer) -> None:
    for method, path, body, status in (
        ("GET", "/nope", None, 404),
        ("DELETE", ACT, None, 405),
        ("POST", "/v1/policies/tiny/canary", {}, 405),
        ("PUT", "/v1/policies/tiny/canary", {"version": 1, "share": 7}, 400),
        ("PUT", "/v1/policies/tiny/canary", {"version": 1, "share": 0.5, "x": 1}, 400),
        ("POST", "/v1/policies/tiny/load", {"version": "new"}, 400),
        ("GET", "/v1/policies/%00", None, 400),
        ("GET", "/v1/policies/nope", None, 404),
    ):
        found, content, headers = server.request(path, body, method=method, headers={"X-Request-Id": "mine"})
        assert found == status, (path, content)
        assert {"code", "message", "request_id"} <= set(content["error"]), content
        assert content["error"]["request_id"] == "mine"
        assert headers["x-request-id"] == "mine"
    status, content, _ = server.request("/v2/models/nope/infer", {"inputs": []})
    assert (status, list(content)) == (400, ["error"])
    assert isinstance(content["error"], str)


def test_descriptions(server: RunningPolicyServer) -> None:
    _, content, _ = server.request("/v1/policies")
    assert [(policy["name"], policy["version"], policy["state"]) for policy in content["policies"]] == [
        ("plain", 4, "live"),
        ("tiny", 1, "live"),
    ]
    _, detail, _ = server.request("/v1/policies/tiny")
    assert [field["name"] for field in detail["manifest"]["observation"]] == ["observation", "goal"]
    assert detail["serving"]["engine"] == "onnxruntime"


def test_the_openapi_examples_are_true(server: RunningPolicyServer, tmp_path: Path) -> None:
    _, schema, _ = server.request("/openapi.json")
    act = schema["paths"]["/v1/policies/{name}/act"]["post"]
    assert act["responses"]["504"]["description"]
    examples = act["requestBody"]["content"]["application/json"]["examples"]
    assert len(examples) >= 3
    infer = schema["paths"]["/v2/models/{name}/infer"]["post"]["requestBody"]["content"]["application/json"]["example"]
    with running_policy_server(None, tmp_path / "log") as shipped:
        for example in examples.values():
            assert shipped.request("/v1/policies/fetch-reach/act", example["value"])[0] == 200
        assert shipped.request("/v2/models/fetch-reach/infer", infer)[0] == 200


def test_metrics_are_counted(server: RunningPolicyServer) -> None:
    _, text, _ = server.request("/metrics")
    before = _count(text.decode())
    for _ in range(5):
        server.act([1, 2, 3, 0, 0])
    _, text, _ = server.request("/metrics")
    assert _count(text.decode()) == before + 5


def _count(text: str) -> float:
    line = next(
        line
        for line in text.splitlines()
        if line.startswith("policy_requests_total") and 'policy="tiny"' in line and '"http"' in line and '"200"' in line
    )
    return float(line.split()[-1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_finishes_what_was_begun_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    repository = tmp_path / "repository"
    write_policy(repository)
    (repository / "tiny" / "serving.json").write_text('{"batching": {"max_delay_ms": 1500}}')
    with running_policy_server(repository, tmp_path / "log", "--workers", "2") as server:
        processes = [
            server.process.pid,
            *(child.pid for child in psutil.Process(server.process.pid).children(recursive=True)),
        ]
        found = [psutil.Process(pid) for pid in processes]
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.append(server.act([1, 2, 3])[0]))
        thread.start()
        time.sleep(0.3)  # it waits for its batch to fill
        assert server.stop(number) == 0
        thread.join(20)
        assert answers == [200]
        assert "stopped" in server.text()
        assert "Traceback" not in server.text()
        assert_all_end(found)


def test_a_supervisor_that_is_killed_takes_its_workers_along(tmp_path: Path) -> None:
    write_policy(tmp_path / "repository")
    with running_policy_server(tmp_path / "repository", tmp_path / "log", "--workers", "2") as server:
        workers = psutil.Process(server.process.pid).children(recursive=True)
        assert len(workers) == 2
        server.process.kill()
        assert_all_end(workers)


def run_to_end(*options: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    command = [sys.executable, "-m", "gated_serving", "serve-policy", *options]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **(environment or {})}
    )
    return result.returncode, result.stdout + result.stderr


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    write_policy(tmp_path / "broken", model=b"broken")
    write_policy(tmp_path / "good")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for options, code, words in (
            ((str(tmp_path / "none"),), 2, "no such folder"),
            ((str(tmp_path / "broken"), "--port", "0"), 1, "no ONNX file"),
            ((str(tmp_path / "good"), "--port", port), 3, "choose another --port"),
            ((str(tmp_path / "good"), "--port", "99999"), 2, "port=99999"),
            ((str(tmp_path / "good"), "--engine", "abacus", "--port", "0"), 2, "engine.engine='abacus'"),
            ((str(tmp_path / "good"), "--engine", "cuda", "--port", "0"), 3, "policy-gpu"),
            ((str(tmp_path / "good"), "--host", "256.1.1.1", "--port", "0"), 3, "cannot listen on 256.1.1.1"),
            ((str(tmp_path / "good"), "--max-batch", "0"), 2, "batching.max_batch=0"),
        ):
            found, text = run_to_end(*options)
            assert (found, words in text) == (code, True), text
            assert "Traceback" not in text


def test_keys_are_asked_for_everywhere_but_at_the_health_checks(tmp_path: Path) -> None:
    write_policy(tmp_path / "repository")
    environment = {"GATED_SERVING_POLICY_API_KEYS": '["first-key", "second-key"]'}
    with running_policy_server(tmp_path / "repository", tmp_path / "log", environment=environment) as server:
        for path in ("/healthz", "/readyz", "/", "/docs", "/openapi.json", "/page/page.js"):
            assert server.request(path)[0] == 200, path
        for path in ("/v1/policies", "/v1/policies/tiny", "/metrics", "/v1/stats", "/v2", "/v2/models/tiny", "/nope"):
            assert server.request(path)[0] == 401, path
        body = {"observation": [1, 2, 3]}
        assert server.request(ACT, body)[0] == 401
        assert server.request(ACT, body, headers={"Authorization": "Bearer wrong"})[0] == 401
        status, content, headers = server.request(
            ACT, body, headers={"Authorization": "Bearer wrong", "Origin": "http://x"}
        )
        assert (status, content["error"]["code"], headers["www-authenticate"]) == (401, "unauthorized", "Bearer")
        assert server.request(ACT, body, headers={"Authorization": "Bearer first-key"})[0] == 200
        assert server.request(ACT, body, headers={"X-API-Key": "second-key"})[0] == 200
        assert server.request("/metrics", headers={"Authorization": "Bearer second-key"})[0] == 200
        assert "first-key" not in server.text()


def test_other_origins_may_call_only_when_they_are_let(tmp_path: Path) -> None:
    write_policy(tmp_path / "repository")
    origin = {"Origin": "http://robots.example"}
    with running_policy_server(
        tmp_path / "repository", tmp_path / "log", "--cors-origin", "http://robots.example"
    ) as server:
        _, _, headers = server.request(ACT, {"observation": [1, 2, 3]}, headers=origin)
        assert headers["access-control-allow-origin"] == "http://robots.example"
        _, _, headers = server.request(ACT, {"observation": [1, 2, 3]}, headers={"Origin": "http://other.example"})
        assert "access-control-allow-origin" not in headers


def test_late_requests_and_a_full_queue_are_told_so(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_policy(repository)
    settings = {"batching": {"max_delay_ms": 1000, "max_queue": 2, "max_batch": 64}}
    (repository / "tiny" / "serving.json").write_text(json.dumps(settings))
    with running_policy_server(repository, tmp_path / "log") as server:
        found: list[tuple[int, Any, dict[str, str]]] = []

        def ask(timeout_ms: float) -> None:
            found.append(server.request(ACT, {"observation": [1, 2, 3], "timeout_ms": timeout_ms}))

        threads = [threading.Thread(target=ask, args=(timeout_ms,)) for timeout_ms in (1e-6, 60_000, 60_000, 60_000)]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join(30)
        by_status = {status: (content, headers) for status, content, headers in found}
        assert sorted(status for status, _, _ in found) == [200, 200, 503, 504]
        assert by_status[504][0]["error"]["code"] == "deadline_exceeded"
        assert by_status[503][0]["error"]["code"] == "queue_full"
        assert int(by_status[503][1]["retry-after"]) >= 1
