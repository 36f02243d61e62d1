"""Minutes under load with a new version every few seconds and one worker killed: is any request lost or wrong?

Clients ask in closed loops over kept HTTP connections and WebSockets. Every version multiplies the observation by its
own number, so each answer is checked against the version that it names; the numbers sent are never zero, and small
enough that no two versions agree. Versions come as folders that appear; old ones are removed. In the middle one of the
workers is killed with SIGKILL: what breaks may only be what was under way on it.

    python benchmarks/policy/soak.py [--minutes 10] [--workers 2] [--reload-s 5]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: benchmarks/ is no package
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from record import keep_record
from served_policies import LIMIT, RunningPolicyServer, running_policy_server, write_policy

from policy_server.wire_msgpack import pack, unpack

NUM_HTTP, NUM_SOCKETS = 6, 2
KEPT_VERSIONS = 3
NUM_PROBES = 16
BACK_LIMIT_S = 5.0
KILL_WINDOW_S = 2.0
STALL_S = 0.5


class Loops:
    """Clients in closed loops, and what became of every request."""

    def __init__(self, port: int, largest: int) -> None:
        self.port = port
        self.largest = largest
        self.counts: Counter[str] = Counter()
        self.broken_at: list[float] = []
        self.wrong: list[str] = []
        self.slowest_s = 0.0
        self.stalls: list[tuple[float, float]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        targets = [self._http] * NUM_HTTP + [self._socket] * NUM_SOCKETS
        self._threads = [threading.Thread(target=target, args=(seed,)) for seed, target in enumerate(targets)]

    def start(self) -> None:
        """All clients at once."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Waits for what is under way."""
        self._ended.set()
        for thread in self._threads:
            thread.join(60)

    def _note(self, kind: str, sent: np.ndarray, action: Any, version: int, took_s: float) -> None:
        expected = sent * np.float32(version)
        with self._lock:
            self.counts[f"{kind} answered"] += 1
            self.slowest_s = max(self.slowest_s, took_s)
            if took_s > STALL_S:
                self.stalls.append((time.monotonic() - took_s, took_s))
            if not np.array_equal(np.asarray(action, np.float32), expected):
                self.wrong.append(f"{kind}: version {version} answered {action} for {sent}")

    def _break(self, kind: str) -> None:
        with self._lock:
            self.counts[f"{kind} connection closed"] += 1
            self.broken_at.append(time.monotonic())

    def _numbers(self, chosen: np.random.Generator) -> np.ndarray:
        return (chosen.integers(1, self.largest + 1, 3) * chosen.choice([-1, 1], 3)).astype(np.float32)

    def _http(self, seed: int) -> None:
        chosen = np.random.default_rng(seed)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        while not self._ended.is_set():
            sent = self._numbers(chosen)
            started = time.monotonic()
            try:
                body = json.dumps({"observation": sent.tolist()})
                connection.request("POST", "/v1/policies/tiny/act", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                content = json.loads(answer.read())
            except (OSError, http.client.HTTPException):
                self._break("HTTP")
                connection.close()
                continue
            if answer.status != 200:
                with self._lock:
                    self.wrong.append(f"HTTP {answer.status}: {content}")
                continue
            self._note("HTTP", sent, content["action"], content["version"], time.monotonic() - started)
        connection.close()

    def _socket(self, seed: int) -> None:
        chosen = np.random.default_rng(seed)
        socket: Any = None
        while not self._ended.is_set():
            sent = self._numbers(chosen)
            started = time.monotonic()
            try:
                if socket is None:
                    socket = connect(f"ws://127.0.0.1:{self.port}/", compression=None, open_timeout=30)
                    socket.recv(30)
                socket.send(pack({"observation": sent}))
                answer = socket.recv(30)
            except (OSError, ConnectionClosed):
                self._break("WebSocket")
                socket = None
                continue
            if isinstance(answer, str):
                with self._lock:
                    self.wrong.append(f"WebSocket: {answer}")
                continue
            content = unpack(answer)
            self._note("WebSocket", sent, content["action"], content["version"], time.monotonic() - started)
        if socket is not None:
            socket.close()


def main() -> None:
    """Runs, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--reload-s", type=float, default=5.0)
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True, help="write benchmarks/results")
    arguments = parser.parse_args()
    # The action of the last version still has to be inside its bounds: what is clipped tells no versions apart.
    largest = int(LIMIT // (arguments.minutes * 60 / arguments.reload_s + 2))
    if largest < 2:
        sys.exit(f"too many versions to tell apart in {arguments.minutes:g} minutes; raise --reload-s")
    with tempfile.TemporaryDirectory() as name:
        repository = Path(name) / "repository"
        write_policy(repository, version=1)
        with running_policy_server(repository, Path(name) / "log", "--workers", str(arguments.workers)) as server:
            row, verdicts = soak(
                server, repository, arguments.minutes * 60, arguments.reload_s, arguments.workers, largest
            )
            log = server.text()
    verdicts.append(f"the server's log has {log.count('Traceback')} tracebacks")
    method = (
        f"{arguments.minutes:g} minutes, {arguments.workers} workers, {NUM_HTTP} HTTP connections and {NUM_SOCKETS} "
        f"WebSockets in closed loops from Python threads, a new version folder every {arguments.reload_s:g} s, one "
        "worker killed with SIGKILL at half time. Every answer is compared with what its version computes."
    )
    if arguments.keep:
        keep_record("policy-soak", method=method, rows=[row], verdicts=verdicts)
    else:
        print(row, *verdicts, sep="\n")


def soak(
    server: RunningPolicyServer, repository: Path, seconds: float, reload_s: float, workers: int, largest: int
) -> tuple[dict[str, Any], list[str]]:
    """The run itself."""
    supervisor = psutil.Process(server.process.pid)
    loops = Loops(server.port, largest)
    loops.start()
    started = time.monotonic()
    version, killed_at, back_s, under_way, slowest_live_s = 1, 0.0, float("nan"), 0, 0.0
    memory_mb: list[float] = []
    while (elapsed := time.monotonic() - started) < seconds:
        version += 1
        write_policy(repository, version=version)
        written = time.monotonic()
        while not _live_in_all(server, version):
            time.sleep(0.02)
            assert time.monotonic() - written < 60, server.text()
        slowest_live_s = max(slowest_live_s, time.monotonic() - written)
        for old in repository.joinpath("tiny").iterdir():
            if old.name.isdecimal() and int(old.name) <= version - KEPT_VERSIONS:
                shutil.rmtree(old)
        if not killed_at and elapsed > seconds / 2:
            victim = supervisor.children()[0]
            # Its connections: each of them may break once, whether its request was under way or about to be sent.
            under_way = sum(1 for found in victim.net_connections("tcp") if found.status == psutil.CONN_ESTABLISHED)
            killed_at = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            back_s = _seconds_until_back(server, supervisor, victim.pid, workers)
        memory_mb.append(sum(child.memory_info().rss for child in supervisor.children()) / 1e6)
        time.sleep(max(0.0, reload_s - (time.monotonic() - written)))
    loops.end()
    lost = [moment for moment in loops.broken_at if not 0 <= moment - killed_at <= KILL_WINDOW_S]
    after_kill = [took for moment, took in loops.stalls if 0 <= moment - killed_at <= KILL_WINDOW_S]
    answered = sum(number for kind, number in loops.counts.items() if kind.endswith("answered"))
    at_kill = len(loops.broken_at) - len(lost)
    early, late = (
        np.median(memory_mb[len(memory_mb) // 4 : len(memory_mb) // 2]),
        np.median(memory_mb[-len(memory_mb) // 4 :]),
    )
    row = {
        "answered": answered,
        "requests/s": answered / seconds,
        "versions": version,
        "wrong answers": len(loops.wrong),
        "closed at the kill": at_kill,
        "connections of the killed": under_way,
        "closed otherwise": len(lost),
        "back after s": back_s,
        "slowest reload s": slowest_live_s,
        "slowest answer s": loops.slowest_s,
        "stalled after the kill": len(after_kill),
        "MB before half": float(early),
        "MB at the end": float(late),
    }
    ok = {True: "reached", False: "NOT reached"}
    verdicts = [
        f"wrong answers: {len(loops.wrong)} (aim 0: {ok[not loops.wrong]}) {'; '.join(loops.wrong[:3])}".rstrip(),
        f"requests lost apart from the killed worker's: {len(lost)} (aim 0: {ok[not lost]}); "
        f"{at_kill} connections closed at the kill, the killed worker had {under_way} ({ok[at_kill <= under_way]})",
        f"the killed worker was back after {back_s:.2f} s (aim {BACK_LIMIT_S:g} s: {ok[back_s <= BACK_LIMIT_S]})",
        f"{len(after_kill)} requests begun within {KILL_WINDOW_S:g} s of the kill waited longer than {STALL_S:g} s, "
        f"the longest {max(after_kill, default=0.0):.2f} s; {len(loops.stalls) - len(after_kill)} others did",
        f"a new version was live in every worker after {slowest_live_s:.2f} s at most",
        f"memory of the workers: {early:.0f} MB before half time, {late:.0f} MB at the end",
    ]
    return row, verdicts


def _live_in_all(server: RunningPolicyServer, version: int) -> bool:
    return all(server.act([1, 1, 1])[1].get("version") == version for _ in range(8))


def _seconds_until_back(server: RunningPolicyServer, supervisor: psutil.Process, victim: int, workers: int) -> float:
    """Until as many workers as before each hold a connection and all of a handful of new ones are answered."""
    started = time.monotonic()
    while True:
        with ExitStack() as held:
            for _ in range(NUM_PROBES):  # kept open: a worker that has accepted none of them is not back
                connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                held.enter_context(closing(connection))
                body = json.dumps({"observation": [1, 1, 1]})
                connection.request("POST", "/v1/policies/tiny/act", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 200, answer.status
            if sum(_holds_connection(child) for child in supervisor.children() if child.pid != victim) >= workers:
                return time.monotonic() - started
        assert time.monotonic() - started < 60, server.text()
        time.sleep(0.05)


def _holds_connection(process: psutil.Process) -> bool:
    try:
        return any(found.status == psutil.CONN_ESTABLISHED for found in process.net_connections("tcp"))
    except psutil.Error:  # it ended in between
        return False


if __name__ == "__main__":
    main()
