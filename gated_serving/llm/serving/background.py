"""A server beside the caller's own work, for tests, benchmarks and notebooks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gated_serving.llm.serving.errors import ServeError, VllmError
from gated_serving.llm.serving.machine import claim_port
from gated_serving.llm.serving.supervisor import Endpoint

_POLL_S = 0.05
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """A server that answers.

    Attributes:
        url: Its address; the OpenAI API is under ``/v1``.
        model: The name clients use.
        process: The ``gated-serving serve`` process.
        log_path: What it has printed so far.
        startup_s: Seconds from the start to the first answer of ``/health``.
    """

    url: str
    model: str
    process: subprocess.Popen[bytes]
    log_path: Path
    startup_s: float

    @property
    def api_url(self) -> str:
        """Base address for OpenAI's client."""
        return f"{self.url}/v1"

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop it with a signal and wait until it is gone.

        Returns:
            Its exit code.
        """
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextlib.contextmanager
def running_server(
    model: str | Path,
    options: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
) -> Iterator[RunningServer]:
    """Run ``gated-serving serve MODEL`` on a free port of 127.0.0.1 for the time of the block.

    Args:
        model: A checkpoint folder or a shipped model's name.
        options: More options of the command, vLLM's among them.
        environment: Variables to add.
        timeout_s: How long it may take to answer.

    Yields:
        The server, answering.

    Raises:
        ServeError: The command ended, with its exit code and its words.
        VllmError: It did not answer in time.
    """
    port = claim_port("127.0.0.1", 0)
    command = [sys.executable, "-m", "gated_serving.cli", "serve", str(model), "--port", str(port), *options]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gated-serving-") as folder:
        log_path = Path(folder) / "server.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(  # noqa: S603  # our own command
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **(environment or {})}
            )
        try:
            _wait_until_ready(process, Endpoint(host="127.0.0.1", port=port), log_path, started + timeout_s)
            server = RunningServer(
                url=f"http://127.0.0.1:{port}",
                model=Path(model).name,
                process=process,
                log_path=log_path,
                startup_s=time.monotonic() - started,
            )
            yield server
            server.stop()
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_TIMEOUT_S)
                process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], endpoint: Endpoint, log_path: Path, deadline: float) -> None:
    while not endpoint.is_healthy():
        code = process.poll()
        if code is not None:
            error = ServeError(f"gated-serving serve ended with exit code {code}:\n{log_path.read_text()}")
            error.exit_code = code
            raise error
        if time.monotonic() > deadline:
            raise VllmError(f"the server did not answer in time:\n{log_path.read_text()}")
        time.sleep(_POLL_S)
