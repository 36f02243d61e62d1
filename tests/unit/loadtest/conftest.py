"""What the tests on gevent need of a process that has done other things for a while."""

from __future__ import annotations

import gevent
import pytest


@pytest.fixture(autouse=True)
def gevents_clock_is_right() -> None:
    """gevent's timers count from when its loop last ran; after minutes of other tests they would end at once."""
    gevent.get_hub().loop.update_now()
