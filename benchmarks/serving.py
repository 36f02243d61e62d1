"""The two servers with what is shipped, on free ports, for the benchmarks of the load tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT_S = 300.0
# Linux may weigh sessions against each other, not processes: the loop's session gets the lowest priority too.
BUSY = """
import os, pathlib
os.sched_setaffinity(0, {{{core}}})
os.nice(19)
session = pathlib.Path("/proc/self/autogroup")
if session.exists():
    session.write_text("19")
while True:
    pass
"""


def split_cores() -> tuple[set[int], set[int]]:
    """Cores for a server and cores for its client, so that what a client costs does not slow the server."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return set(cores), set(cores)
    return set(cores[: len(cores) // 2]), set(cores[len(cores) // 2 :])


@contextmanager
def busy_cores(cores: set[int]) -> Iterator[None]:
    """A loop of the lowest priority on each of these cores.

    Cores that share caches or are threads of one core slow each other, so that a client that needs less processor time
    sees a faster server. With the loop beside them two clients see the same one.
    """
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for core in cores:
            loop = subprocess.Popen([sys.executable, "-c", BUSY.format(core=core)], start_new_session=True)
            loops.append(loop)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def running_llm_server(cores: set[int]) -> Iterator[str]:
    """``gated-serving serve`` on these cores; yields its address."""
    with _running("serve", "/health", cores) as url:
        yield url


@contextmanager
def running_policy_server(cores: set[int], *options: str) -> Iterator[str]:
    """``gated-serving serve-policy`` on these cores; yields its address."""
    with _running("serve-policy", "/readyz", cores, *options) as url:
        yield url


@contextmanager
def _running(verb: str, path: str, cores: set[int], *options: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "gated_serving", verb, *options, "--port", str(port)]
        mine = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)  # the child inherits it
        process = subprocess.Popen(command, stdout=log, stderr=log)
        os.sched_setaffinity(0, mine)
        try:
            deadline = time.monotonic() + LIMIT_S
            while not _answers(url + path):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    sys.exit(f"{verb} did not start:\n{log.read().decode(errors='replace')[-4000:]}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
