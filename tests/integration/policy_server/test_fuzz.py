"""Malformed requests of every kind: none gets a 5xx, none brings the server down (benchmarks/policy/fuzz.py)."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_frames import broken_frames, broken_infer_bodies, send_bodies, send_frames, send_infer_bodies
from served_policies import RunningPolicyServer, running_policy_server

NUM_FRAMES = 500


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPolicyServer]:
    with running_policy_server(None, tmp_path_factory.mktemp("server") / "log") as running:
        yield running
        assert running.process.poll() is None
        assert "Traceback" not in running.text()


def test_the_openapi_holds(server: RunningPolicyServer, tmp_path: Path) -> None:
    program = str(Path(sys.executable).parent / "schemathesis")
    command = [program, "run", f"{server.address}/openapi.json", "--checks", "not_a_server_error"]
    options = ["--max-examples", "10", "--seed", "0", "--no-color", "--exclude-path-regex", "unload|rollback"]
    result = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )  # it leaves a cache where it runs
    text = result.stdout + result.stderr
    found = set(re.findall(r"\[(\d{3})\] ", text))
    assert found <= {"503", "504"}, text[-4000:]  # a deadline of a femtosecond passes
    assert result.returncode == (1 if found else 0), text[-4000:]


def test_broken_binary_tensors(server: RunningPolicyServer) -> None:
    statuses = send_infer_bodies(server.port, NUM_FRAMES, seed=0).keys()
    assert "400" in statuses
    assert statuses <= {"200", "400", "413", "422"}


def test_broken_act_requests(server: RunningPolicyServer) -> None:
    headers = {"Content-Type": "application/json"}
    requests = ((body, headers) for body, _ in broken_infer_bodies(NUM_FRAMES, seed=1))
    assert send_bodies(server.port, "/v1/policies/fetch-reach/act", requests).keys() == {"400"}


def test_broken_frames(server: RunningPolicyServer) -> None:
    counts = send_frames(server.port, broken_frames(NUM_FRAMES, seed=2))
    assert counts.keys().isdisjoint({"internal_error", "engine_failed", "closed"}), counts
    assert counts.total() == NUM_FRAMES


def test_it_still_acts_afterwards(server: RunningPolicyServer, tmp_path: Path) -> None:
    status, content = server.act([0.0] * 13, name="fetch-reach")
    assert status == 200
    assert len(content["action"]) == 4
