"""Ctrl-C and SIGTERM as requests that a loop honours at its next good moment."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

logger = logging.getLogger(__name__)


class TrainingStoppedError(Exception):
    """The run was asked to stop, and has saved where it was.

    Args:
        signal_number: What asked for it.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


@dataclass
class StopRequest:
    """Whether a stop was asked for.

    Args:
        signal_number: What asked for it; None as long as nothing did.
    """

    signal_number: int | None = None


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turns the first SIGINT or SIGTERM into a request; a second one does what it always does.

    Only the main thread can do that; elsewhere signals are left as they are.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        request.signal_number = number
        for each, handler in before.items():
            signal.signal(each, handler)
        logger.warning("saving, then stopping; again stops at once")

    for number in before:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
