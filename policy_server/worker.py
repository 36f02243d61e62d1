"""One worker process: policies, engines and an HTTP server of its own, on a socket that the supervisor holds.

Run by the supervisor as ``python -m policy_server.worker``; not meant to be started by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from pathlib import Path

import uvicorn
import uvloop

from policy_server.app import create_app
from policy_server.engines import check_engine
from policy_server.errors import StartError
from policy_server.fast_lane import fast_lane
from policy_server.host import PolicyHost
from policy_server.metrics import Metrics
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
    parser.add_argument("--socket", type=int, required=True, help="file descriptor of the listening socket")
    parser.add_argument("--lifeline", type=int, required=True, help="file descriptor that ends with the supervisor")
    parser.add_argument("--log-level", default="WARNING")
    arguments = parser.parse_args()
    logging.basicConfig(level=arguments.log_level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    runtime = RuntimeFolder(arguments.runtime)
    settings = ServerSettings.model_validate_json(runtime.settings_file.read_bytes())
    listening = socket.socket(fileno=arguments.socket)
    try:
        return uvloop.run(_serve(settings, runtime, arguments.slot, listening, arguments.lifeline))
    except StartError as error:
        print(error, file=sys.stderr)  # noqa: T201  # the supervisor shows it to the user
        return error.exit_code


async def _serve(
    settings: ServerSettings, runtime: RuntimeFolder, slot: int, listening: socket.socket, lifeline: int
) -> int:
    check_engine(settings.engine.engine)
    metrics = Metrics(runtime.metrics_folder, slot)
    host = PolicyHost(settings, metrics, runtime=runtime, slot=slot)
    server = make_server(host, settings, metrics)
    loop = asyncio.get_running_loop()
    loop.add_reader(lifeline, _supervisor_gone, loop, lifeline, server)
    try:
        grpc_server = None
        if settings.grpc_port is not None:  # before the host is ready: whoever hears of that may call at once
            from policy_server.grpc_service import start_grpc_server

            grpc_server = await start_grpc_server(host, settings, metrics)
        await host.start()
        await server.serve(sockets=[listening])
        if grpc_server is not None:
            await grpc_server.stop(settings.drain_s)
    finally:
        await host.stop()
    return 0


def make_server(host: PolicyHost, settings: ServerSettings, metrics: Metrics) -> uvicorn.Server:
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
    return uvicorn.Server(config)


def _supervisor_gone(loop: asyncio.AbstractEventLoop, lifeline: int, server: uvicorn.Server) -> None:
    loop.remove_reader(lifeline)
    os.close(lifeline)
    server.should_exit = True


if __name__ == "__main__":
    sys.exit(main())
