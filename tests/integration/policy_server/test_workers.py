"""Several workers behind one port: changes reach all of them, and a killed one is replaced."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from served_policies import RunningPolicyServer, running_policy_server, write_policy

from policy_server.supervisor import pass_on

BODY = json.dumps({"observation": [1, 1, 1]})


@pytest.fixture(autouse=True)
def hangups_are_heard() -> Iterator[None]:
    """Whoever runs the tests under nohup has processes inherit that a hangup is ignored; the servers respect that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def live_everywhere(server: RunningPolicyServer, version: int, *, num_asked: int = 30) -> bool:
    """Asks over new connections, which the kernel spreads over the workers."""
    found = {server.act([1, 1, 1])[1].get("version") for _ in range(num_asked)}
    return found == {version}


class Load:
    """Threads that ask over kept connections, and check that each answer is the one of the version it names."""

    def __init__(self, port: int, num_threads: int) -> None:
        self.port = port
        self.versions: set[int] = set()
        self.num_answers = 0
        self.wrong: list[str] = []
        self.broken: list[str] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(num_threads)]

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        while not self._ended.is_set():
            try:
                connection.request("POST", "/v1/policies/tiny/act", BODY, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                content = json.loads(answer.read())
            except (OSError, http.client.HTTPException) as error:
                self.broken.append(repr(error))
                connection.close()
                continue
            if answer.status != 200 or content["action"] != [float(content["version"])] * 3:
                self.wrong.append(f"{answer.status} {content}")
            else:
                self.versions.add(content["version"])
                self.num_answers += 1
        connection.close()

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)


def until(condition: object, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # pyright: ignore[reportCallIssue]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_changes_reach_every_worker_and_no_request_is_lost(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for version in (1, 2):
        write_policy(repository, version=version)
    with running_policy_server(repository, tmp_path / "log", "--workers", "3") as server:
        assert live_everywhere(server, 2)
        with Load(server.port, 4) as load:
            until(lambda: load.num_answers > 50)
            assert server.request("/v1/policies/tiny/rollback", {})[0] == 200
            assert live_everywhere(server, 1)
            until(lambda: 1 in load.versions)
            status, content, _ = server.request("/v1/policies/tiny/load", {"version": 2})
            assert (status, content["version"]) == (200, 2)
            assert live_everywhere(server, 2)
            write_policy(repository, version=3)
            until(lambda: live_everywhere(server, 3, num_asked=10))
            until(lambda: 3 in load.versions)
            assert server.request("/v1/policies/tiny/canary", {"version": 1, "share": 1.0}, method="PUT")[0] == 200
            by_session = {
                server.request("/v1/policies/tiny/act", {"observation": [1, 1, 1], "session_id": str(index)})[1][
                    "version"
                ]
                for index in range(20)
            }
            assert by_session == {1}
            assert server.request("/v1/policies/tiny/canary", method="DELETE")[0] == 200
        assert load.wrong == []
        assert load.broken == []
        assert {1, 2, 3} <= load.versions
        assert server.request("/v1/policies/tiny/unload", {})[0] == 200
        assert {server.act([1, 1, 1])[0] for _ in range(30)} == {404}
        assert server.request("/v1/policies/tiny/load", {})[0] == 200
        assert live_everywhere(server, 3)


def test_a_killed_worker_is_replaced_and_knows_what_was_asked_for(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for version in (1, 2):
        write_policy(repository, version=version)
    with running_policy_server(repository, tmp_path / "log", "--workers", "2") as server:
        server.request("/v1/policies/tiny/rollback", {})
        supervisor = psutil.Process(server.process.pid)
        before = {child.pid for child in supervisor.children()}
        with Load(server.port, 6) as load:
            until(lambda: load.num_answers > 50)
            victim = min(before)
            os.kill(victim, signal.SIGKILL)
            until(lambda: len({child.pid for child in supervisor.children()} - before) == 1)
            answered = load.num_answers
            until(lambda: load.num_answers > answered + 200)
        assert load.wrong == []
        assert len(load.broken) <= 6  # those that were under way on it, one a connection
        assert load.versions == {1}
        until(lambda: live_everywhere(server, 1))
        assert "ended with signal SIGKILL; starting another one" in server.text()
        _, text, _ = server.request("/metrics")
        counted = sum(
            float(line.split()[-1])
            for line in text.decode().splitlines()
            if line.startswith("policy_requests_total") and 'policy="tiny"' in line and 'status="200"' in line
        )
        assert counted > 50


def test_the_others_answer_for_a_worker_until_it_is_back(tmp_path: Path) -> None:
    """The kernel goes on giving its socket half of the connections; stopped, its successor never takes one."""
    repository = tmp_path / "repository"
    write_policy(repository)
    with running_policy_server(repository, tmp_path / "log", "--workers", "2") as server:
        supervisor = psutil.Process(server.process.pid)
        before = {child.pid for child in supervisor.children()}
        os.kill(max(before), signal.SIGKILL)
        until(lambda: len({child.pid for child in supervisor.children()} - before) == 1)
        (successor,) = [child for child in supervisor.children() if child.pid not in before]
        successor.suspend()
        assert live_everywhere(server, 1)
        successor.resume()
        assert live_everywhere(server, 1)


def test_a_worker_that_comes_back_answers_even_if_the_repository_was_broken_meanwhile(tmp_path: Path) -> None:
    """Its connections would wait for ever otherwise: the kernel goes on giving them to its socket."""
    repository = tmp_path / "repository"
    folder = write_policy(repository)
    model = folder / "policy.onnx"
    whole = model.read_bytes()
    with running_policy_server(repository, tmp_path / "log", "--workers", "2") as server:
        model.write_bytes(b"broken")
        supervisor = psutil.Process(server.process.pid)
        before = {child.pid for child in supervisor.children()}
        os.kill(min(before), signal.SIGKILL)
        found: set[int] = set()
        until(lambda: found.add(server.act([1, 1, 1])[0]) or len(found) > 1)
        assert found == {200, 404}  # the other one still has what it had
        model.write_bytes(whole)
        until(lambda: {server.act([1, 1, 1])[0] for _ in range(20)} == {200})
        assert len({child.pid for child in supervisor.children()} - before) == 1


@pytest.mark.parametrize("by", ["supervisor", "hangup"])
def test_neither_processes_nor_files_are_left(tmp_path: Path, by: str) -> None:
    """The runtime folder holds the API keys."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    write_policy(tmp_path / "repository")
    options = ("--workers", "2", "--api-key", "secret")
    environment = {"TMPDIR": str(temporary)}
    with running_policy_server(tmp_path / "repository", tmp_path / "log", *options, environment=environment) as server:
        workers = psutil.Process(server.process.pid).children()
        assert any(b"secret" in file.read_bytes() for file in temporary.rglob("settings.json"))
        if by == "supervisor":
            server.process.kill()
        else:
            assert server.stop(signal.SIGHUP) == 0
        until(lambda: not any(worker.is_running() for worker in workers))
        assert list(temporary.glob("policy-server-*")) == []
        assert "Traceback" not in server.text()


def test_a_reader_that_has_gone_does_not_hold_up_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, _line: bytes) -> int:
            raise BrokenPipeError

        buffer = property(lambda self: self)

    monkeypatch.setattr(sys, "stderr", Gone())
    talks = "import sys; [print('a line of a log', file=sys.stderr) for _ in range(20_000)]"  # more than a pipe holds
    with subprocess.Popen([sys.executable, "-c", talks], stderr=subprocess.PIPE) as process:
        started = threading.Event()
        started.set()
        lines: list[bytes] = []
        pass_on(process, lines, started)
        assert process.wait(30) == 0
    assert lines[-1] == b"a line of a log\n"


def test_stopping_finishes_what_grpc_has_begun(tmp_path: Path) -> None:
    grpc = pytest.importorskip("tritonclient.grpc", reason="the extra grpc is not installed")
    repository = tmp_path / "repository"
    write_policy(repository)
    (repository / "tiny" / "serving.json").write_text('{"batching": {"max_delay_ms": 2000}}')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with running_policy_server(repository, tmp_path / "log", "--grpc-port", str(port)) as server:
        client = grpc.InferenceServerClient(f"127.0.0.1:{port}")
        tensor = grpc.InferInput("observation", [1, 3], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 3), np.float32))
        answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.async_infer("tiny", [tensor], callback=lambda result, error: answers.put((result, error)))
        assert all(client.is_server_live() for _ in range(20))  # behind it on the same connection: it has arrived
        assert server.stop() == 0
        result, error = answers.get(timeout=20)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("action"), np.ones((1, 3), np.float32))
        client.close()
