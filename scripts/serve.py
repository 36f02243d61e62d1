"""Serves the language model and the policies side by side: what ``make serve`` runs.

    python scripts/serve.py [options of gated-serving serve] [-- options of gated-serving serve-policy]

Waits for both and ends with a curl line for each. Ctrl-C stops both; when one ends by itself, the other is stopped too,
and the exit code is that of the first.
"""

from __future__ import annotations

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
    servers = [
        _start("policies", ["serve-policy", *arguments[place + 1 :]], lines),
        _start("language model", ["serve", *arguments[:place]], lines),
    ]

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for server in servers:
            if server.process.poll() is None:
                server.process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    first = _watch(servers, lines)
    for server in servers:
        if server is not first and server.process.poll() is None:
            server.process.terminate()
    for server in servers:
        server.process.wait()
    code = first.process.returncode
    if code:
        print(f"the server of the {first.name} ended with exit code {code}", file=sys.stderr, flush=True)
    return code


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
            print(f"[{server.name}] {line.removesuffix(' Try:')}", flush=True)
        if not announced and all(server.curl for server in servers):
            announced = True
            print("both are ready; try:", *(server.curl for server in servers), sep="\n  ", flush=True)


if __name__ == "__main__":
    sys.exit(main())
