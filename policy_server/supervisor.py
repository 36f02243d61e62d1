"""Keeps the worker processes: holds their sockets, starts them, starts them again, and ends them.

It imports neither the engines nor the web framework, so that nothing a policy does can take it down. The sockets are
its own: connections that come while a worker is being replaced wait in them and are not refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from policy_server.errors import StartError
from policy_server.runtime import RuntimeFolder
from policy_server.settings import ServerSettings

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_BACKLOG = 2048
_LONGEST_PAUSE_S = 5.0
_STABLE_S = 10.0
_LAST_LINES = 40


@dataclass
class _Worker:
    slot: int
    listening: socket.socket
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    num_early_ends: int = 0
    start_at: float = 0.0
    last_lines: list[bytes] = field(default_factory=list[bytes])
    reader: threading.Thread | None = None


class Supervisor:
    """The workers of one server.

    Args:
        settings: The server's.
        log_level: Of the workers' logs, which go to this process' standard error.
    """

    def __init__(self, settings: ServerSettings, *, log_level: str = "WARNING") -> None:
        self._log_level = log_level
        self._workers = _bind(settings)
        self.port: int = self._workers[0].listening.getsockname()[1]
        self._settings = settings.model_copy(update={"port": self.port, "repository": settings.repository.absolute()})
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="policy-server-")
            self._runtime = RuntimeFolder(Path(self._folder.name))
            _write_settings(self._runtime.settings_file, self._settings)
        except OSError as error:
            for worker in self._workers:
                worker.listening.close()
            raise StartError(
                f"no temporary folder for the workers' state can be made ({error}); set TMPDIR to one that can be "
                "written to",
                exit_code=3,
            ) from None
        self._lifeline_read, self._lifeline_write = os.pipe()
        self._stop_asked = threading.Event()
        self._stop_hard = threading.Event()
        self._started = threading.Event()

    def run(self, on_ready: Callable[[], None]) -> int:
        """Serves until it is stopped.

        Args:
            on_ready: Called once, when every worker is ready.

        Returns:
            0 when it was stopped.

        Raises:
            StartError: A worker could not start.
        """
        try:
            for worker in self._workers:
                self._start(worker)
            self._wait_until_ready()
            if not self._stop_asked.is_set():
                self._show_warnings()
                self._started.set()
                on_ready()
            while not self._stop_asked.is_set():
                self._look_after()
                self._stop_asked.wait(_POLL_S)
            return 0
        finally:
            self._end()

    def stop(self) -> None:
        """Asks for the end, from any thread or a signal handler; a second time ends what has not finished."""
        if self._stop_asked.is_set():
            self._stop_hard.set()
        self._stop_asked.set()

    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def _start(self, worker: _Worker) -> None:
        command = [
            *(sys.executable, "-m", "policy_server.worker", "--runtime", str(self._runtime.path)),
            *("--slot", str(worker.slot), "--sockets", *map(str, self._descriptors())),
            *("--lifeline", str(self._lifeline_read), "--log-level", self._log_level),
            *(["--replaces-another"] if self._started.is_set() else []),
        ]
        self._runtime.forget(worker.slot)
        worker.process = subprocess.Popen(  # noqa: S603  # this very Python and package
            command,
            pass_fds=(*self._descriptors(), self._lifeline_read),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal reaches this process alone, which passes it on once
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        worker.started, worker.last_lines = time.monotonic(), []
        worker.reader = threading.Thread(
            target=pass_on, args=(worker.process, worker.last_lines, self._started), daemon=True
        )
        worker.reader.start()

    def _descriptors(self) -> list[int]:
        return [worker.listening.fileno() for worker in self._workers]

    def _wait_until_ready(self) -> None:
        limit_s = self._settings.load_timeout_s * 2 + 60
        deadline = time.monotonic() + limit_s
        while not self._stop_asked.is_set():
            for worker in self._workers:
                assert worker.process is not None
                code = worker.process.poll()
                if code is not None:
                    raise self._start_error(worker, code)
            if self._all_ready():
                return
            if time.monotonic() > deadline:
                raise StartError(f"the workers were not ready after {limit_s:.0f} s", exit_code=1)
            self._stop_asked.wait(_POLL_S)

    def _show_warnings(self) -> None:
        """What the first worker had to say while it started; the others say the same."""
        sys.stderr.buffer.write(b"".join(self._workers[0].last_lines))
        sys.stderr.buffer.flush()

    def _start_error(self, worker: _Worker, code: int) -> StartError:
        assert worker.reader is not None
        worker.reader.join(2)
        text = b"".join(worker.last_lines).decode(errors="replace").strip()
        known = code in (1, 2, 3) and "Traceback" not in text
        message = text.removeprefix("error: ") if known else f"a worker process ended with {_ending(code)}:\n{text}"
        return StartError(message, exit_code=code if known else 1)

    def _all_ready(self) -> bool:
        pids = set(self.worker_pids())
        ready = {status.pid for status in self._runtime.statuses() if status.ready}
        return pids <= ready

    def _look_after(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            process = worker.process
            if process is None:
                if now >= worker.start_at:
                    self._start(worker)
                continue
            code = process.poll()
            if code is None:
                continue
            early = now - worker.started < _STABLE_S
            worker.num_early_ends = worker.num_early_ends + 1 if early else 0
            pause_s = 0.0 if worker.num_early_ends <= 1 else min(0.25 * 2**worker.num_early_ends, _LONGEST_PAUSE_S)
            logger.warning(
                "worker %d ended with %s; starting another one%s", worker.slot, _ending(code), _after(pause_s)
            )
            self._runtime.forget(worker.slot)  # the others accept for it from now on
            worker.process, worker.start_at = None, now + pause_s
            if not pause_s:
                self._start(worker)

    def _end(self) -> None:
        running = [worker.process for worker in self._workers if worker.process is not None]
        for process in running:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + self._settings.drain_s + 5
        while any(process.poll() is None for process in running):
            if self._stop_hard.is_set() or time.monotonic() > deadline:
                for process in running:
                    _signal(process, signal.SIGKILL)
            time.sleep(_POLL_S)
        for worker in self._workers:
            worker.listening.close()
        for descriptor in (self._lifeline_read, self._lifeline_write):
            os.close(descriptor)
        self._folder.cleanup()


def _bind(settings: ServerSettings) -> list[_Worker]:
    """A listening socket for each worker, all on the one port; the kernel spreads the connections over them."""
    workers: list[_Worker] = []
    port = settings.port
    try:
        family = socket.getaddrinfo(settings.host, port, type=socket.SOCK_STREAM)[0][0]
        if port:  # SO_REUSEPORT would share the port with another server of this user in silence
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((settings.host, port))
        for slot in range(settings.workers):
            listening = socket.socket(family, socket.SOCK_STREAM)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind((settings.host, port))
            listening.listen(_BACKLOG)
            listening.setblocking(False)
            port = listening.getsockname()[1]
            workers.append(_Worker(slot, listening))
    except OSError as error:
        for worker in workers:
            worker.listening.close()
        hint = "; is another server running? choose another --port, or 0 for any free one" if error.errno == 98 else ""
        raise StartError(
            f"cannot listen on {settings.host}:{port}: {error.strerror or error}{hint}", exit_code=3
        ) from None
    return workers


def _write_settings(path: Path, settings: ServerSettings) -> None:
    content = settings.model_dump_json(exclude={"api_keys"})
    keys = [key.get_secret_value() for key in settings.api_keys]
    path.write_text(json.dumps({**json.loads(content), "api_keys": keys}))
    path.chmod(0o600)


def pass_on(process: subprocess.Popen[bytes], last_lines: list[bytes], started: threading.Event) -> None:
    """A worker's log; before the server has started it is kept for the error that may come of it."""
    assert process.stderr is not None
    for line in process.stderr:
        last_lines.append(line)
        del last_lines[:-_LAST_LINES]
        if started.is_set():
            with contextlib.suppress(OSError, ValueError):  # nobody listens any more; the worker must not wait for it
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _ending(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _after(pause_s: float) -> str:
    return f" in {pause_s:.1f} s" if pause_s else ""
