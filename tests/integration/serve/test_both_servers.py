"""``scripts/serve.py``, which ``make serve`` runs: two servers, one end. Stand-ins take the place of the real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "serve.py"

# Says what the real ones say; the options are the seconds of life and the exit code.
STAND_IN = """
import os, pathlib, signal, sys, time

verb, *options = sys.argv[1:]
pathlib.Path(f"{verb}.pid").write_text(str(os.getpid()))

def stop(number, frame):
    pathlib.Path(f"{verb}.stopped").write_text(str(number))
    sys.exit(0)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
print(f"{verb} starts with {options}", flush=True)
if verb == "serve":
    print("serving a model. Try:", flush=True)
    print("  curl http://127.0.0.1:8000/v1/chat/completions", flush=True)
else:
    print("serving policies", "try:", "  curl http://127.0.0.1:8100/v1/policies/tiny/act", sep="\\n", flush=True)
if "--fail" in options:
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    print("a fault", file=sys.stderr, flush=True)
    sys.exit(int(options[-1]))
while True:
    time.sleep(0.05)
    if "--talk" in options:
        print("a line", flush=True)
"""


def until(condition: object) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # pyright: ignore[reportCallIssue]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "gated_serving").mkdir()
    (tmp_path / "gated_serving" / "__init__.py").write_text("")
    (tmp_path / "gated_serving" / "__main__.py").write_text(STAND_IN)
    return tmp_path


@pytest.fixture(autouse=True)
def hangups_are_heard() -> Iterator[None]:
    """Whoever runs the tests under nohup has processes inherit that a hangup is ignored; the servers respect that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@contextmanager
def running(folder: Path, *options: str, ready: bool = True) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=(folder / "errors").open("w"),
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    assert process.stdout is not None
    try:
        if ready:
            lines: list[str] = []
            while sum("  curl " in line for line in lines) < 2:
                line = process.stdout.readline()
                assert line, (lines, (folder / "errors").read_text())
                lines.append(line)
            (folder / "said").write_text("".join(lines))
        yield process
    finally:
        for verb in ("serve", "serve-policy"):
            path = folder / f"{verb}.pid"
            if path.exists() and psutil.pid_exists(int(path.read_text())):
                psutil.Process(int(path.read_text())).kill()
        process.kill()
        process.wait()
        process.stdout.close()


def both_have_ended(folder: Path) -> bool:
    pids = [int((folder / f"{verb}.pid").read_text()) for verb in ("serve", "serve-policy")]
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_it_ends_with_a_line_for_each_and_gives_each_its_options(folder: Path) -> None:
    with running(folder, "--port", "1", "--", "--port", "2"):
        lines = (folder / "said").read_text().splitlines()
    assert lines[-3:] == [
        "both are ready; try:",
        "  curl http://127.0.0.1:8100/v1/policies/tiny/act",
        "  curl http://127.0.0.1:8000/v1/chat/completions",
    ]
    assert "[language model] serve starts with ['--port', '1']" in lines
    assert "[policies] serve-policy starts with ['--port', '2']" in lines


@pytest.mark.parametrize(
    ("number", "passed_on"),
    [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM), (signal.SIGHUP, signal.SIGTERM)],
)
def test_a_signal_stops_both(folder: Path, number: signal.Signals, passed_on: signal.Signals) -> None:
    with running(folder) as process:
        process.send_signal(number)
        assert process.wait(60) == 0
        assert both_have_ended(folder)
        for verb in ("serve", "serve-policy"):
            assert int((folder / f"{verb}.stopped").read_text()) == passed_on
        assert (folder / "errors").read_text() == ""


@pytest.mark.parametrize(
    ("options", "name", "other"),
    [
        (("--fail", "3"), "language model", "serve-policy"),
        (("--", "--fail", "3"), "policies", "serve"),
    ],
)
def test_when_one_ends_the_other_is_stopped_and_it_says_which(
    folder: Path, options: tuple[str, ...], name: str, other: str
) -> None:
    with running(folder, *options) as process:
        (folder / "go").write_text("")
        assert process.wait(60) == 3
        assert both_have_ended(folder)
        assert (folder / f"{other}.stopped").exists()
        assert process.stdout is not None
        assert f"[{name}] a fault" in process.stdout.read()
        assert f"the server of the {name} ended with exit code 3" in (folder / "errors").read_text()


def test_a_killed_one_is_named(folder: Path) -> None:
    with running(folder) as process:
        os.kill(int((folder / "serve.pid").read_text()), signal.SIGKILL)
        assert process.wait(60) == 137
        assert both_have_ended(folder)
        assert "the server of the language model ended with signal SIGKILL" in (folder / "errors").read_text()


def test_they_go_on_when_nobody_reads_any_more(folder: Path) -> None:
    with running(folder, "--talk", "--", "--talk") as process:
        assert process.stdout is not None
        process.stdout.close()
        policies = psutil.Process(int((folder / "serve-policy.pid").read_text()))
        written = policies.io_counters().write_count
        until(lambda: policies.io_counters().write_count > written + 20)
        process.terminate()
        assert process.wait(60) == 0
        assert both_have_ended(folder)
        assert (folder / "errors").read_text() == ""
