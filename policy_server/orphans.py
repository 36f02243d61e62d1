"""Connections that come while a worker is being replaced: the others answer them.

Each worker listens on a socket of its own, all on the one port, which spreads the load evenly; but the kernel goes on
giving a dead worker's socket its share. The supervisor holds that socket, so nothing is refused, and the others accept
from it until the new worker is ready.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import uvicorn

logger = logging.getLogger(__name__)

_LOOK_S = 0.1


class ListeningServer(Protocol):
    """What is needed of the server whose protocol answers."""

    config: uvicorn.Config
    server_state: Any
    lifespan: Any
    listens: asyncio.Event


class OrphanedSockets:
    """Accepts for the workers that are not there. Made and used on the event loop.

    Args:
        server: Whose protocol answers.
        others: The other workers' listening sockets, by slot; they stay open.
        is_served: Whether the worker of a slot is there itself.
    """

    def __init__(
        self, server: ListeningServer, others: Mapping[int, socket.socket], is_served: Callable[[int], bool]
    ) -> None:
        self._server = server
        self._others = others
        self._is_served = is_served
        self._taken: dict[int, asyncio.Server] = {}

    async def watch(self) -> None:
        """Takes and gives back until it is cancelled."""
        await self._server.listens.wait()
        try:
            while self._others:
                for slot, listening in self._others.items():
                    served = self._is_served(slot)
                    if not served and slot not in self._taken:
                        self._taken[slot] = await self._accept(listening)
                        logger.info("accepts for worker %d until it is back", slot)
                    elif served and slot in self._taken:
                        self._taken.pop(slot).close()
                await asyncio.sleep(_LOOK_S)
        finally:
            for server in self._taken.values():
                server.close()

    async def _accept(self, listening: socket.socket) -> asyncio.Server:
        config = self._server.config
        protocol = functools.partial(
            config.http_protocol_class,  # pyright: ignore[reportArgumentType]  # a class, once the config is loaded
            config=config,
            server_state=self._server.server_state,
            app_state=self._server.lifespan.state,
        )
        return await asyncio.get_running_loop().create_server(protocol, sock=listening.dup(), backlog=config.backlog)
