"""One worker process: policies, engines and an HTTP server of its own, on a socket that the supervisor holds.

Run by the supervisor as ``python -m policy_server.worker``; not meant to be started by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Generator
from pathlib import Path

import uvicorn
import uvloop

from policy_server.app import create_app
from policy_server.engines import check_engine
from policy_server.errors import StartError
from policy_server.fast_lane import fast_lane
from policy_server.host import PolicyHost
from policy_server.metrics import Metrics
from policy_server.orphans import OrphanedSockets
from policy_server.runtime import RuntimeFolder
from policy_server.security import ApiKeys
from policy_server.settings import ServerSettings

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
SWITCH_INTERVAL_S = 5e-4
"""An engine's thread that has finished waits this long at most for the event loop to let it on (Python's own: 5 ms)."""
_MAX_FRAME_BYTES = 16 << 20


def main() -> int:
    """Serves until it is told to stop; the exit code is the command's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runtime", type=Path, required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--sockets", type=int, nargs="+", required=True, help="listening sockets' descriptors, by slot")
    parser.add_argument("--lifeline", type=int, required=True, help="file descriptor that ends with the supervisor")
    parser.add_argument("--replaces-another", action="store_true", help="the server runs, and this worker ended before")
    parser.add_argument("--log-level", default="WARNING")
    arguments = parser.parse_args()
    logging.basicConfig(level=arguments.log_level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    runtime = RuntimeFolder(arguments.runtime)
    settings = ServerSettings.model_validate_json(runtime.settings_file.read_bytes())
    listening = {slot: socket.socket(fileno=descriptor) for slot, descriptor in enumerate(arguments.sockets)}
    try:
        return uvloop.run(_serve(settings, runtime, listening, arguments))
    except StartError as error:
        print(error, file=sys.stderr)  # noqa: T201  # the supervisor shows it to the user
        return error.exit_code


async def _serve(
    settings: ServerSettings,
    runtime: RuntimeFolder,
    listening: dict[int, socket.socket],
    arguments: argparse.Namespace,
) -> int:
    check_engine(settings.engine.engine)
    metrics = Metrics(runtime.metrics_folder, arguments.slot)
    host = PolicyHost(settings, metrics, runtime=runtime, slot=arguments.slot)
    server = make_server(host, settings, metrics)
    loop = asyncio.get_running_loop()
    orphaned = asyncio.Event()
    loop.add_reader(arguments.lifeline, _supervisor_gone, loop, arguments.lifeline, server, orphaned)
    try:
        grpc_server = None
        if settings.grpc_port is not None:  # before the host is ready: whoever hears of that may call at once
            from policy_server.grpc_service import start_grpc_server

            grpc_server = await start_grpc_server(host, settings, metrics)
        await host.start(replaces_another=arguments.replaces_another)
        http = asyncio.create_task(server.serve(sockets=[listening.pop(arguments.slot)]))
        stop_asked = asyncio.create_task(server.stop_asked.wait())
        orphans = asyncio.create_task(OrphanedSockets(server, listening, runtime.knows).watch())
        await asyncio.wait((http, stop_asked), return_when=asyncio.FIRST_COMPLETED)
        for task in (stop_asked, orphans):
            task.cancel()
        if grpc_server is not None:  # both finish what they have begun in the same time
            await grpc_server.stop(settings.drain_s)
        await http
    finally:
        await host.stop()
        if orphaned.is_set():  # the supervisor was killed before it could; the folder holds the keys
            shutil.rmtree(runtime.path, ignore_errors=True)
    return 0


class WorkerServer(uvicorn.Server):
    """Tells when it is asked to stop, and leaves the end of the process to its caller.

    uvicorn's own raises the signal once more when HTTP has drained, which would end gRPC's requests and the counters.

    Attributes:
        listens: Set when it accepts connections.
        stop_asked: Set by the first signal.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()
        self.stop_asked = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept."""
        await super().startup(sockets)
        self.listens.set()

    def ask_to_stop(self) -> None:
        """Stops accepting; what was begun finishes."""
        self.should_exit = True
        self.stop_asked.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals stop it, and are not raised again."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self.ask_to_stop)
        yield  # and no handler is taken back: the process ends as soon as the rest has finished


class _NoClientFaults(logging.Filter):
    """Drops what uvicorn logs, with a traceback, about text frames that are not UTF-8: any client could fill the log.

    The connection is closed with code 1007 all the same.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], UnicodeDecodeError))


def make_server(host: PolicyHost, settings: ServerSettings, metrics: Metrics) -> WorkerServer:
    """The HTTP server with the fast lane, not started yet."""
    app = create_app(host, settings, metrics)
    lane = fast_lane(host, metrics, ApiKeys(settings.api_keys), max_body_bytes=settings.max_body_bytes)
    config = uvicorn.Config(
        app,
        http=lane,
        ws="websockets-sansio",
        ws_max_size=_MAX_FRAME_BYTES,
        ws_per_message_deflate=False,
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        backlog=2048,
    )
    logging.getLogger("uvicorn.error").addFilter(_NoClientFaults())
    return WorkerServer(config)


def _supervisor_gone(
    loop: asyncio.AbstractEventLoop, lifeline: int, server: WorkerServer, orphaned: asyncio.Event
) -> None:
    loop.remove_reader(lifeline)
    os.close(lifeline)
    orphaned.set()
    server.ask_to_stop()


if __name__ == "__main__":
    sys.exit(main())
