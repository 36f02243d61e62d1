"""The operating system's socket under gevent, without what gevent's own asks of it a second time.

gevent's socket reads before it waits and asks for the size of the send buffer before it sends. A client knows better:
right after a request nothing can have come yet. Where few connections wait for one another's answers, what a request
costs the client stands in the latency.
"""

from __future__ import annotations

import socket as standard_socket
from typing import Any

import gevent
from gevent import monkey

_Socket: Any = monkey.get_original("socket", "socket")
_READ, _WRITE = 1, 2


class BareSocket:
    """A connected stream socket; one greenlet at a time.

    Args:
        connected: gevent's or the standard library's; not to be used afterwards.
    """

    def __init__(self, connected: standard_socket.socket) -> None:
        family, kind, protocol = connected.family, connected.type, connected.proto
        self._socket = _Socket(family, kind, protocol, connected.detach())
        self._socket.setblocking(False)
        self._hub: Any = gevent.get_hub()
        self._readable: Any = self._hub.loop.io(self._socket.fileno(), _READ)

    def sendall(self, data: bytes) -> None:
        """Sends everything; waits where the connection is full."""
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self._send_rest(memoryview(data)[sent:])

    def _send_rest(self, data: memoryview) -> None:
        writable = self._hub.loop.io(self._socket.fileno(), _WRITE)
        try:
            while data:
                self._hub.wait(writable)
                try:
                    data = data[self._socket.send(data) :]
                except BlockingIOError:
                    continue
        finally:
            writable.close()

    def recv_into(self, buffer: bytearray) -> int:
        """Waits until something has come; how many bytes it was, 0 at the end."""
        while True:
            self._hub.wait(self._readable)
            try:
                return self._socket.recv_into(buffer)
            except BlockingIOError:
                continue

    def close(self) -> None:
        """Closes the connection."""
        self._readable.close()
        self._socket.close()
