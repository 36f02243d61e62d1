"""What a process sends: open loop whatever the server does, closed loop at its pace, and exactly as much as asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gevent
import numpy as np
import pytest
from gevent.event import Event

from loadtest.generator import Caller, Lane, Share
from loadtest.records import RequestRecord
from loadtest.settings import LoadSettings


class FakeCaller:
    """Answers after a while, or when it is let."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self._answer = answer
        self.closed = False

    def call(self, *, intended_s: float | None = None) -> RequestRecord:
        sent_s = time.time()
        self._answer()
        service_ms = 1e3 * (time.time() - sent_s)
        intended_s = sent_s if intended_s is None else intended_s
        latency_ms = service_ms + 1e3 * (sent_s - intended_s)
        return RequestRecord("act", intended_s, sent_s, latency_ms=latency_ms, service_ms=service_ms, status=200)

    def close(self) -> None:
        self.closed = True


class Run:
    """A lane with fake callers."""

    def __init__(
        self, answer: Callable[[], None], *, share: Share | None = None, control_hz: float | None = None, **load: Any
    ) -> None:
        self.records: list[RequestRecord] = []
        self.callers: list[FakeCaller] = []
        settings = LoadSettings(**({"warmup_s": 0.0} | load))
        self.lane = Lane("act", settings, share or Share(), self._make, control_hz=control_hz, emit=self.records.append)

    def _make(self, _: int) -> Caller:
        self.callers.append(FakeCaller(self.answer_of(len(self.callers))))
        return self.callers[-1]

    answer: Callable[[], None]

    def answer_of(self, _: int) -> Callable[[], None]:
        return self.answer

    def go(self, num_users: int = 0) -> None:
        self.lane.begin()
        work = self.lane.arrivals if self.lane.is_open else self.lane.user
        greenlets = [gevent.spawn(work) for _ in range(num_users or 1)]
        gevent.joinall(greenlets, timeout=30, raise_error=True)
        assert all(greenlet.ready() for greenlet in greenlets)


def run(answer: Callable[[], None], **fields: Any) -> Run:
    made = Run(answer, **fields)
    made.answer = answer
    return made


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """The server answers nothing for a second; requests go on at their times and count from them."""
    free = Event()
    gevent.spawn_later(1.0, free.set)
    made = run(lambda: free.wait() and None, mode="open", rate_per_s=100.0, arrival="constant", duration_s=1.5)
    made.go()
    assert len(made.records) == 150
    latencies = np.array([record.latency_ms for record in sorted(made.records, key=lambda record: record.intended_s)])
    assert latencies[0] >= 990
    assert np.median(latencies[:100]) >= 450  # half of the requests of the stall waited half of it
    assert (latencies[120:] < latencies[:20].min()).all()
    starts = np.diff(sorted(record.sent_s for record in made.records))
    assert np.median(starts) == pytest.approx(0.01, abs=0.005)


def test_what_cannot_be_sent_is_recorded_and_not_dropped() -> None:
    free = Event()
    gevent.spawn_later(0.5, free.set)
    made = run(
        lambda: free.wait() and None,
        mode="open",
        rate_per_s=200.0,
        arrival="constant",
        duration_s=0.4,
        max_in_flight=10,
    )
    made.go()
    errors = [record.error for record in made.records]
    assert (errors.count(None), errors.count("not_sent")) == (10, 70)


def test_connections_of_an_open_loop_are_used_again() -> None:
    made = run(lambda: gevent.sleep(0.001), mode="open", rate_per_s=200.0, duration_s=1.0)
    made.go()
    assert len(made.callers) < len(made.records) / 4
    assert all(caller.closed for caller in made.callers)


@pytest.mark.parametrize("mode", ["open", "closed"])
def test_exactly_as_many_are_measured_as_were_asked_for(mode: str) -> None:
    shares = [Share(process=process, num_processes=3) for process in range(3)]
    total = 0
    for share in shares:
        made = run(
            lambda: gevent.sleep(0.001), share=share, mode=mode, users=6, num_requests=50, rate_per_s=2000.0,
            duration_s=30.0, warmup_s=0.05,
        )  # fmt: skip
        made.go(num_users=2 if mode == "closed" else 1)
        total += sum(not record.warmup for record in made.records)
        assert any(record.warmup for record in made.records)
    assert total == 50


def test_users_act_at_their_control_rate_and_miss_deadlines() -> None:
    slow = iter([False] * 5 + [True] + [False] * 1000)
    made = run(
        lambda: gevent.sleep(0.13 if next(slow) else 0.001), users=1, control_hz=20.0, duration_s=1.02
    )  # a period of 50 ms
    made.go(num_users=1)
    missed = [record for record in made.records if record.deadline_missed]
    assert len(missed) == 1
    assert missed[0].latency_ms is not None
    assert missed[0].latency_ms >= 130
    beats = [round((record.intended_s - made.records[0].intended_s) / 0.05, 3) for record in made.records]
    assert beats == [round(beat) for beat in beats]  # always on the beat
    assert len(set(beats)) == len(beats)
    assert set(range(21)) - {round(beat) for beat in beats} <= {6, 7, 20}  # those that passed meanwhile


def test_users_join_as_the_shape_says() -> None:
    made = run(lambda: gevent.sleep(0.01), users=4, shape="steps", start=1.0, num_steps=4, duration_s=2.0)
    made.go(num_users=4)
    began = min(record.sent_s for record in made.records)
    seen = [
        {record.user for record in made.records if 0.5 * step + 0.15 <= record.sent_s - began < 0.5 * (step + 1) - 0.05}
        for step in range(4)
    ]
    assert seen == [set(range(number + 1)) for number in range(4)]


def test_users_leave_as_the_shape_says() -> None:
    made = run(lambda: gevent.sleep(0.01), users=1, shape="steps", start=3.0, num_steps=2, duration_s=1.0)
    made.go(num_users=3)
    began = min(record.sent_s for record in made.records)
    early = {record.user for record in made.records if record.sent_s - began < 0.4}
    late = {record.user for record in made.records if record.sent_s - began > 0.6}
    assert (early, late) == ({0, 1, 2}, {0})


def test_every_user_works_however_they_are_dealt_to_the_processes() -> None:
    """Of five users the second of two processes may get three."""
    made = run(lambda: gevent.sleep(0.01), share=Share(process=1, num_processes=2), users=5, duration_s=0.3)
    made.go(num_users=3)
    assert len({record.user for record in made.records}) == 3


def test_a_failing_connection_is_not_hammered() -> None:
    made = run(lambda: None, users=1, duration_s=1.0)
    original = FakeCaller.call

    class Refused(FakeCaller):
        def call(self, *, intended_s: float | None = None) -> RequestRecord:
            record = original(self, intended_s=intended_s)
            record.error, record.latency_ms = "connection", None
            return record

    made.lane._make_caller = lambda _: Refused(lambda: None)  # pyright: ignore[reportPrivateUsage]
    made.go(num_users=1)
    assert 2 <= len(made.records) <= 12


def test_a_halt_ends_the_sending() -> None:
    made = run(lambda: gevent.sleep(0.01), users=3, duration_s=60.0)
    gevent.spawn_later(0.3, made.lane.halt)
    made.go(num_users=3)
    assert made.lane.is_over
    assert made.records


def test_what_is_cut_off_is_recorded() -> None:
    made = run(lambda: gevent.sleep(60), users=1, duration_s=60.0)
    made.lane.begin()
    user = gevent.spawn(made.lane.user)
    gevent.sleep(0.1)
    user.kill()
    assert [(record.error, record.user) for record in made.records] == [("cut_off", 0)]
    assert made.callers[0].closed


def test_a_share_is_fair_and_whole() -> None:
    for number in (0, 1, 7, 100):
        parts = [Share(process=process, num_processes=3).of(number) for process in range(3)]
        assert sum(parts) == number
        assert max(parts) - min(parts) <= 1
