"""However the server is stopped, nothing of it stays. (SIGTERM ends the server of ``test_openai_client``.)"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from process_ends import assert_all_end

from gated_serving.llm.serving import RunningServer, running_server

pytestmark = pytest.mark.slow


@contextmanager
def watched(tiny_folder: Path) -> Iterator[tuple[RunningServer, list[psutil.Process]]]:
    """A server and every process below it."""
    with running_server(tiny_folder) as server:
        below = psutil.Process(server.process.pid).children(recursive=True)
        assert len(below) >= 2  # the API and its engine
        yield server, below


def test_ctrl_c_stops_it_cleanly(tiny_folder: Path) -> None:
    with watched(tiny_folder) as (server, below):
        assert server.stop(signal.SIGINT) == 0
        assert_all_end(below)
        assert "Traceback" not in server.log_path.read_text()


def test_killed_outright_it_leaves_nothing(tiny_folder: Path) -> None:
    with watched(tiny_folder) as (server, below):
        server.process.kill()
        server.process.wait()
        assert_all_end(below)


def test_a_dead_engine_ends_the_command_with_a_reason(tiny_folder: Path) -> None:
    with watched(tiny_folder) as (server, below):
        engine = next(process for process in below if "EngineCor" in process.name())
        engine.kill()
        assert server.process.wait(60) == 4
        assert_all_end(below)
        assert "vLLM ended" in server.log_path.read_text()


def test_stopped_while_starting(tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "gated_serving.cli", "serve", str(tiny_folder), "--port", "0"]
    with ExitStack() as cleanup:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        cleanup.callback(process.wait)
        cleanup.callback(process.kill)
        assert process.stdout is not None
        for line in process.stdout:
            if "importing" in line:
                break
        below = psutil.Process(process.pid).children(recursive=True)
        assert below
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert_all_end(below)


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    """No engine or server process may outlive its test."""
    yield
    deadline = time.monotonic() + 10
    while left := [process for process in psutil.Process().children(recursive=True) if _is_server(process)]:
        assert time.monotonic() < deadline, left


def _is_server(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "serve" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
