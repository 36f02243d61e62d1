"""Serves the language model and the policies side by side: what ``make serve`` runs.

    python scripts/serve.py [options of gated-serving serve] [-- options of gated-serving serve-policy]

Waits for both and ends with a curl line for each. Ctrl-C, and the end of the terminal, stop both; when one ends by
itself, the other is stopped too, and the exit code is that of the first.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from types import FrameType

_POLL_S = 0.2
_CURL = "curl "


@dataclass
class Server:
    """One of the two.

    Attributes:
        name: What its lines begin with.
        process: Runs it.
        curl: The line to try, once it is ready.
    """

    name: str
    process: subprocess.Popen[str]
    curl: str | None = None
    lines: list[str] = field(default_factory=list[str])


def main() -> int:
    """Runs both until the first ends."""
    arguments = sys.argv[1:]
    place = arguments.index("--") if "--" in arguments else len(arguments)
    lines: queue.Queue[tuple[Server, str | None]] = queue.Queue()
    servers: list[Server] = []
    stopped = False

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        # The end of a terminal is passed on as what both know: a wish to stop.
        _signal_all(servers, signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number))

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: they shall outlive the terminal
        signal.signal(signal.SIGHUP, stop)
    try:
        for name, command in (
            ("policies", ["serve-policy", *arguments[place + 1 :]]),
            ("language model", ["serve", *arguments[:place]]),
        ):
            if not stopped:
                servers.append(_start(name, command, lines))
        first = _watch(servers, lines)
    finally:  # whatever happens here, neither is left behind
        _signal_all(servers, signal.SIGTERM)
        for server in servers:
            server.process.wait()
    code = first.process.returncode
    if not stopped:
        print(f"the server of the {first.name} ended with {_ending(code)}; stopped the other", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _signal_all(servers: list[Server], number: signal.Signals) -> None:
    for server in servers:
        if server.process.poll() is None:
            server.process.send_signal(number)


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _start(name: str, command: list[str], lines: queue.Queue[tuple[Server, str | None]]) -> Server:
    process = subprocess.Popen(
        [sys.executable, "-m", "gated_serving", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on once
    )
    server = Server(name, process)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put((server, line.rstrip("\n")))
        lines.put((server, None))

    threading.Thread(target=read, daemon=True).start()
    return server


def _watch(servers: list[Server], lines: queue.Queue[tuple[Server, str | None]]) -> Server:
    """Shows what they say until one of them ends; that one."""
    announced = False
    say = _Output()
    while True:
        try:
            server, line = lines.get(timeout=_POLL_S)
        except queue.Empty:
            continue
        if line is None:
            server.process.wait()
            return server
        if server.curl is None and line.strip().startswith(_CURL):
            server.curl = line.strip()
        elif line.strip() not in ("try:", ""):
            say(f"[{server.name}] {line.removesuffix(' Try:')}")
        if not announced and all(server.curl for server in servers):
            announced = True
            say("\n  ".join(["both are ready; try:", *(server.curl or "" for server in servers)]))


class _Output:
    """Prints lines until nobody reads them any more: servers do not end because a pager did."""

    def __init__(self) -> None:
        self._open = True

    def __call__(self, text: str) -> None:
        if not self._open:
            return
        try:
            print(text, flush=True)
        except BrokenPipeError:
            self._open = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's own flush at the end fails


if __name__ == "__main__":
    sys.exit(main())
