"""Server-sent events out of pieces."""

from __future__ import annotations

import random

import pytest

from loadtest.sse import EventStream

STREAM = (
    b'data: {"a": 1}\n\n: a comment\n\ndata: two\ndata: lines\n\nevent: ping\ndata:tight\n\nretry: 5\n\n'
    b"data: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b"two\nlines", b"tight", b"[DONE]"]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("seed", range(20))
def test_pieces_give_the_events_wherever_they_are_cut(ending: bytes, seed: int) -> None:
    chosen = random.Random(seed)
    rest = STREAM.replace(b"\n", ending)
    stream, found = EventStream(), []
    while rest:
        size = chosen.randint(1, 9) if seed else 1
        found += stream.feed(rest[:size])
        rest = rest[size:]
    if ending == b"\r":  # the last CR may be followed by its LF
        found += stream.feed(b"\n")
    assert found == EVENTS
    assert stream.is_between_events


def test_an_event_that_has_not_ended_is_held_back() -> None:
    stream = EventStream()
    assert list(stream.feed(b"data: half")) == []
    assert not stream.is_between_events
    assert list(stream.feed(b" and half\n\n")) == [b"half and half"]
