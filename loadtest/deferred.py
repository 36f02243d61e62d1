"""Work that may wait until every connection that has something to say was heard."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import gevent

Item = TypeVar("Item")


class Deferred(Generic[Item]):
    """Takes things at once and handles them just before the event loop waits again, in order.

    By then all who were answered in this turn of the loop have sent their next request: what is done with an answer
    neither delays the next request of its own connection nor those of others.

    Args:
        handle: Gets each of them.
    """

    def __init__(self, handle: Callable[[Item], None]) -> None:
        self._handle = handle
        self._waiting: deque[Item] = deque()
        self._before_waiting: Any = gevent.get_hub().loop.prepare(ref=False)
        self._before_waiting.start(self.flush)

    def __call__(self, item: Item) -> None:
        """Takes one."""
        self._waiting.append(item)

    def flush(self) -> None:
        """Handles what there is."""
        while self._waiting:
            self._handle(self._waiting.popleft())
