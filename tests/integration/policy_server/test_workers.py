"""Several workers behind one port: changes reach all of them, and a killed one is replaced."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
from served_policies import RunningPolicyServer, running_policy_server, write_policy

BODY = json.dumps({"observation": [1, 1, 1]})


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
