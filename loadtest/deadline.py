"""A time limit that is used again and again: one timer a connection instead of one a request."""

from __future__ import annotations

from typing import Any

import gevent


class DeadlineExceededError(BaseException):
    """The time is up; like ``gevent.Timeout`` no ``Exception``, so that nothing on the way takes it for an error."""


class Deadline:
    """A context manager whose body is left with ``DeadlineExceededError`` when its time is up; not nested.

    Args:
        seconds: How long the body may take, from when it is entered.
    """

    def __init__(self, seconds: float) -> None:
        self._timer: Any = gevent.get_hub().loop.timer(seconds, seconds)

    def __enter__(self) -> None:
        self._timer.again(gevent.getcurrent().throw, DeadlineExceededError, update=True)

    def __exit__(self, *_: object) -> None:
        self._timer.stop()
