"""Runs the server process, tells of its progress, and sees to it that nothing of it stays.

One loop and no threads: the server's output, signals and the clock wake it. The server leads a process group of its
own, so a terminal's Ctrl-C reaches this process alone, and the whole group can be ended.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import selectors
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from gated_serving.llm.serving.errors import UsageError, VllmError
from gated_serving.llm.serving.vllm_log import LogReader

Say = Callable[[str], None]
_TICK_S = 0.1
_STOP_TIMEOUT_S = 20.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_USAGE_EXIT_CODE = 2


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where the server will answer.

    Attributes:
        host: As the server was told.
        port: TCP port.
        tls: Whether it speaks https.
        unix_socket: A socket's path, in place of host and port.
    """

    host: str
    port: int
    tls: bool = False
    unix_socket: str | None = None

    @property
    def url(self) -> str:
        """The address that a client on this machine uses."""
        if self.unix_socket:
            return f"unix:{self.unix_socket}"
        host = f"[{self.client_host}]" if ":" in self.client_host else self.client_host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    @property
    def client_host(self) -> str:
        """The host a client names: a wildcard address means this machine."""
        return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104

    def is_healthy(self, timeout_s: float = 2.0) -> bool:
        """Whether ``/health`` answers."""
        connection = self._connection(timeout_s)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self.unix_socket:
            connection = http.client.HTTPConnection("localhost", timeout=timeout_s)
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(timeout_s)
            with contextlib.suppress(OSError):
                connection.sock.connect(self.unix_socket)
            return connection
        if self.tls:  # our own server on this machine, whose certificate names another host
            context = ssl._create_unverified_context()  # noqa: S323
            return http.client.HTTPSConnection(self.client_host, self.port, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(self.client_host, self.port, timeout=timeout_s)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the supervisor starts.

    Attributes:
        command: The server process and its arguments.
        environment: Its whole environment.
        endpoint: Where it will answer.
        verbose: Whether its whole log is shown.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    endpoint: Endpoint
    verbose: bool


def supervise(launch: Launch, say: Say, on_ready: Callable[[], None]) -> None:
    """Run the server until a signal or its own end.

    Args:
        launch: What to run.
        say: Takes lines for the reader.
        on_ready: Called once, when ``/health`` answers.

    Raises:
        UsageError: vLLM does not know an option, or refuses its value.
        VllmError: vLLM ended on its own.
    """
    with _signals() as signals:
        process = subprocess.Popen(  # noqa: S603  # our own command, and no shell
            launch.command,
            stdin=subprocess.PIPE,  # never written to: its end tells the server that we are gone
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(launch.environment),
            start_new_session=True,
        )
        try:
            _Watch(launch, process, signals, say, on_ready).run()
        finally:
            _end_group(process)


class _Watch:
    """The loop of ``supervise``."""

    def __init__(
        self, launch: Launch, process: subprocess.Popen[bytes], signals: int, say: Say, on_ready: Callable[[], None]
    ) -> None:
        self._launch, self._process, self._signals, self._say, self._on_ready = launch, process, signals, say, on_ready
        self._log = LogReader()
        self._partial = b""
        self._ready = False
        self._stop_deadline: float | None = None

    def run(self) -> None:
        assert self._process.stdout is not None
        output = self._process.stdout
        os.set_blocking(output.fileno(), False)
        started, stage = time.monotonic(), ""
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            selector.register(self._signals, selectors.EVENT_READ)
            while self._process.poll() is None:
                for key, _ in selector.select(_TICK_S):
                    if key.fileobj is output:
                        self._read(output, selector)
                    else:
                        os.read(self._signals, 64)
                        self._stop()
                if self._stop_deadline is not None and time.monotonic() > self._stop_deadline:
                    self._say("the server does not stop; killing it")
                    return
                if self._stop_deadline is None and not self._ready:
                    if self._log.stage != stage:
                        stage = self._log.stage
                        self._say(f"[{time.monotonic() - started:5.1f} s] {stage}")
                    if self._launch.endpoint.is_healthy():
                        self._ready = True
                        self._on_ready()
            self._read(output, selector)
        if self._stop_deadline is None:
            self._explain(self._process.returncode)

    def _read(self, output: IO[bytes], selector: selectors.BaseSelector) -> None:
        try:
            chunk = os.read(output.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            with contextlib.suppress(KeyError):
                selector.unregister(output)
            return
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            shown = self._log.take(text)
            if self._launch.verbose:
                self._say(text)
            elif shown is not None and self._ready and self._stop_deadline is None:
                self._say(shown)

    def _stop(self) -> None:
        """On the first signal ask the server to stop; on the second do not wait for it."""
        if self._stop_deadline is None:
            self._say("stopping ...")
            self._stop_deadline = time.monotonic() + _STOP_TIMEOUT_S
            self._process.terminate()
        else:
            self._stop_deadline = 0.0

    def _explain(self, code: int) -> None:
        if code == _USAGE_EXIT_CODE and (wrong := self._log.option_error()):
            raise UsageError(f"vLLM refuses the command: {wrong}")
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        when = "after it was ready" if self._ready else f"while {self._log.stage}"
        cause = self._log.cause()
        if cause is not None and self._log.blames_options:
            raise UsageError(f"vLLM refuses a setting:\n  {cause}")
        if code == -signal.SIGKILL and cause is None:
            cause = "it was killed; the usual reason is that the machine ran out of memory"
        if cause is None:
            raise VllmError(f"vLLM ended {how} {when}. The end of its log:\n{self._log.end()}")
        raise VllmError(f"vLLM ended {how} {when}:\n  {cause}\n(--verbose shows its whole log)")


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """Turn stop signals into bytes on a file descriptor for the time of the block."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    previous_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, lambda *_: None) for number in _STOP_SIGNALS}
    try:
        yield reader
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_wakeup)
        os.close(reader)
        os.close(writer)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of the server's process group, and reap the server."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
