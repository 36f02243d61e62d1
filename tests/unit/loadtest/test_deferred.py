"""Work that waits: done in order, after everyone who was ready, and none of it lost."""

from __future__ import annotations

from typing import Any

import gevent
from gevent import socket

from loadtest.deferred import Deferred


def test_it_is_done_in_order_before_the_loop_waits() -> None:
    done: list[int] = []
    later = Deferred(done.append)
    for number in range(3):
        later(number)
    assert done == []
    gevent.sleep(0.01)
    assert done == [0, 1, 2]


def test_everyone_who_is_ready_comes_first() -> None:
    """Two connections have something to read: both are heard before anything is done about the first."""
    happened: list[str] = []
    later = Deferred[str](happened.append)
    pairs: list[Any] = [socket.socketpair() for _ in range(2)]

    def hear(index: int) -> None:
        pairs[index][0].recv(1)
        happened.append(f"heard {index}")
        later(f"handled {index}")

    listeners = [gevent.spawn(hear, index) for index in range(2)]
    gevent.sleep(0)
    for pair in pairs:
        pair[1].sendall(b".")
    gevent.joinall(listeners)
    gevent.sleep(0)
    later.flush()
    assert sorted(happened[:2]) == ["heard 0", "heard 1"]
    assert sorted(happened[2:]) == ["handled 0", "handled 1"]
    for pair in pairs:
        for end in pair:
            end.close()


def test_what_waits_at_the_end_is_done() -> None:
    done: list[int] = []
    later = Deferred(done.append)
    later(1)
    later.flush()
    assert done == [1]
    gevent.sleep(0.01)
    assert done == [1]


def test_one_that_fails_does_not_lose_the_others() -> None:
    done: list[int] = []

    def handle(number: int) -> None:
        if number == 1:
            raise ValueError(number)
        done.append(number)

    later = Deferred(handle)
    for number in range(4):
        later(number)
    for _ in range(2):
        gevent.sleep(0.01)
    assert done == [0, 2, 3]
