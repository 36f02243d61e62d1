"""What one generator process does: sends the requests of its share of the load, and hands on their records.

Closed loop: each user asks again when it is answered, or at its control rate. Open loop: one greenlet starts requests
at their times and never waits for an answer; what the server holds up is counted from when it was meant to be sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import gevent
from gevent.event import Event
from gevent.pool import Group

from loadtest.arrivals import intended_times, users_at
from loadtest.llm_client import LlmClient
from loadtest.observations import drawn_observations, read_observations
from loadtest.policy_client import EncodedObservation, PolicyClient
from loadtest.prompts import PromptSource
from loadtest.records import Kind, RequestRecord
from loadtest.settings import LoadSettings
from loadtest.targets import LlmTarget, PolicyTarget

_INACTIVE_POLL_S = 0.05
_AFTER_FAILED_CONNECTION_S = 0.1
_CUT_OFF_AFTER_HALT_S = 5.0
_SLEEP_FROM_S = 2e-4


class Caller(Protocol):
    """One connection and what is said over it."""

    def call(self, *, intended_s: float | None = None) -> RequestRecord:
        """Sends the next request and waits for its answer."""
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...


class LlmCaller:
    """Conversations with a language model, one after the other."""

    def __init__(self, target: LlmTarget, source: PromptSource, *, timeout_s: float) -> None:
        self._client = LlmClient(target.settings, timeout_s=timeout_s)
        self._source = source
        self._conversation = source.conversation()

    def call(self, *, intended_s: float | None = None) -> RequestRecord:
        """See ``Caller``; a conversation ends with its last turn or with a failed one."""
        if self._conversation.is_over:
            self._conversation = self._source.conversation()
        record = self._client.send(self._conversation.next(), intended_s=intended_s)
        if record.error is None:
            self._conversation.heard(self._client.last_text)
        else:
            self._conversation = self._source.conversation()
        return record

    def close(self) -> None:
        """See ``Caller``."""
        self._client.close()


class PolicyCaller:
    """Observations, in turn."""

    def __init__(
        self, target: PolicyTarget, messages: Sequence[EncodedObservation], first: int, *, timeout_s: float
    ) -> None:
        self._client = PolicyClient(target.settings, timeout_s=timeout_s)
        self._messages = messages
        self._next = first

    def call(self, *, intended_s: float | None = None) -> RequestRecord:
        """See ``Caller``."""
        message = self._messages[self._next % len(self._messages)]
        self._next += 1
        return self._client.send(message, intended_s=intended_s)

    def close(self) -> None:
        """See ``Caller``."""
        self._client.close()


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of the load a process takes.

    Attributes:
        process: Which process, from 0.
        num_processes: Of how many.
        stage: Index of the sweep's stage.
    """

    process: int = 0
    num_processes: int = 1
    stage: int = 0

    def of(self, number: int) -> int:
        """This process' part of a number of things."""
        return number // self.num_processes + (self.process < number % self.num_processes)


class Lane:
    """The load on one server, as this process sends it.

    Args:
        kind: What is asked, for records of requests that could not be sent.
        load: How much.
        share: This process' part.
        make_caller: Makes a connection; gets its index in this process.
        control_hz: Rate at which each user acts; None to ask again at once.
        emit: Gets each record.
    """

    def __init__(
        self,
        kind: Kind,
        load: LoadSettings,
        share: Share,
        make_caller: Callable[[int], Caller],
        *,
        control_hz: float | None,
        emit: Callable[[RequestRecord], None],
    ) -> None:
        self._kind: Kind = kind
        self._load = load
        self._share = share
        self._make_caller = make_caller
        self._period_s = 1 / control_hz if control_hz is not None else None
        self._emit = emit
        self._left = None if load.num_requests is None else share.of(load.num_requests)
        self._began_s = 0.0
        self._num_users = 0
        self._idle: list[Caller] = []
        self._in_flight = Group()
        self._users_inside = 0
        self._num_callers = 0
        self.halted = Event()
        self.is_open = load.mode == "open"

    def begin(self) -> None:
        """From now on requests are sent."""
        self._began_s = time.time()

    @property
    def _ends_s(self) -> float:
        return self._began_s + self._load.warmup_s + self._load.duration_s

    @property
    def is_over(self) -> bool:
        """Whether everything was sent and answered."""
        sent = self.halted.is_set() or self._left == 0 or time.time() >= self._ends_s
        return sent and not self._users_inside and not len(self._in_flight)

    def user(self) -> None:
        """One user of a closed loop, from its beginning to the end of the run."""
        index, self._num_users = self._num_users, self._num_users + 1
        number = index * self._share.num_processes + self._share.process  # over all processes
        caller = self._make_caller(index)
        due_s = self._first_due(number)
        try:
            while (now := time.time()) < self._ends_s and not self.halted.is_set() and self._left != 0:
                if not self._is_wanted(number, now):
                    self.halted.wait(_INACTIVE_POLL_S)
                    due_s = time.time()
                elif self._period_s is not None and due_s > now:
                    self.halted.wait(min(due_s, self._ends_s) - now)
                else:
                    intended_s = due_s if self._period_s is not None else None
                    self._count_down(warmup=self._is_warmup(now if intended_s is None else intended_s))
                    record = self._call(caller, number, intended_s)
                    if self._period_s is not None:
                        due_s = self._next_due(due_s)
                    if record.error == "connection":
                        self.halted.wait(_AFTER_FAILED_CONNECTION_S)
        finally:
            caller.close()

    def _is_wanted(self, number: int, now: float) -> bool:
        """Whether a ramp or a step has come to this user; with all at work it does not matter which is which."""
        wanted = users_at(self._load, now - self._began_s)
        return wanted >= self._load.most_users or number < wanted

    def _first_due(self, number: int) -> float:
        """Control loops do not beat in time: they are spread over the period."""
        if self._period_s is None:
            return self._began_s
        return self._began_s + self._period_s * (number / max(self._load.users, 1) % 1)

    def _next_due(self, due_s: float) -> float:
        """The next beat; beats that were missed meanwhile are not made up for."""
        assert self._period_s is not None
        missed = max(0, int((time.time() - due_s) / self._period_s))
        return due_s + max(1, missed) * self._period_s

    def arrivals(self) -> None:
        """The open loop: starts every request of this process at its time."""
        times = intended_times(self._load, process=self._share.process, num_processes=self._share.num_processes)
        for after_s in times:
            intended_s = self._began_s + after_s
            wait_s = intended_s - time.time()
            if (wait_s > _SLEEP_FROM_S and self.halted.wait(wait_s)) or self.halted.is_set() or self._left == 0:
                break
            self._count_down(warmup=self._is_warmup(intended_s))
            if len(self._in_flight) >= self._load.max_in_flight:
                self._emit_not_sent(intended_s)
            else:
                self._in_flight.add(gevent.spawn(self._send_one, intended_s))
        self._in_flight.join()
        while self._idle:
            self._idle.pop().close()

    def _send_one(self, intended_s: float) -> None:
        if self._idle:
            caller = self._idle.pop()
        else:
            caller = self._make_caller(self._num_callers)
            self._num_callers += 1
        self._call(caller, -1, intended_s)
        self._idle.append(caller)

    def _is_warmup(self, intended_s: float) -> bool:
        return intended_s < self._began_s + self._load.warmup_s

    def _count_down(self, *, warmup: bool) -> None:
        """One of the measured requests is on its way."""
        if self._left is not None and not warmup:
            self._left -= 1

    def _call(self, caller: Caller, user: int, intended_s: float | None) -> RequestRecord:
        began = time.time()
        warmup = self._is_warmup(began if intended_s is None else intended_s)
        self._users_inside += 1
        try:
            record = caller.call(intended_s=intended_s)
        except gevent.GreenletExit:
            self._emit(self._cut_off(began if intended_s is None else intended_s, began, user, warmup=warmup))
            raise
        finally:
            self._users_inside -= 1
        record.warmup, record.user = warmup, user
        if self._period_s is not None and record.latency_ms is not None:
            record.deadline_missed = record.latency_ms > 1e3 * self._period_s
        self._fill_in(record)
        return record

    def _emit_not_sent(self, intended_s: float) -> None:
        message = f"{self._load.max_in_flight} requests were in flight (max_in_flight)"
        record = RequestRecord(self._kind, intended_s, intended_s, error="not_sent", message=message)
        record.warmup = self._is_warmup(intended_s)
        self._fill_in(record)

    def _cut_off(self, intended_s: float, sent_s: float, user: int, *, warmup: bool) -> RequestRecord:
        return RequestRecord(
            self._kind,
            intended_s,
            sent_s,
            service_ms=1e3 * (time.time() - sent_s),
            error="cut_off",
            message="the run ended before the answer came",
            user=user,
            warmup=warmup,
            worker=self._share.process,
            stage=self._share.stage,
        )

    def _fill_in(self, record: RequestRecord) -> None:
        record.worker, record.stage = self._share.process, self._share.stage
        self._emit(record)

    def halt(self) -> None:
        """Sends nothing more; what is in flight has a few seconds left."""
        self.halted.set()
        gevent.spawn_later(_CUT_OFF_AFTER_HALT_S, self._in_flight.kill, block=False)


def llm_lane(target: LlmTarget, load: LoadSettings, share: Share, emit: Callable[[RequestRecord], None]) -> Lane:
    """The load on a language model."""
    source = PromptSource(
        target.settings,
        target.words,
        seed=load.seed
        + 1_000_003 * share.stage,  # other prompts in each stage: a server may remember those it has seen
        process=share.process,
        num_processes=share.num_processes,
    )
    return Lane(
        target.settings.endpoint,
        load,
        share,
        lambda _: LlmCaller(target, source, timeout_s=load.timeout_s),
        control_hz=None,
        emit=emit,
    )


def policy_lane(target: PolicyTarget, load: LoadSettings, share: Share, emit: Callable[[RequestRecord], None]) -> Lane:
    """The load on a policy server."""
    settings = target.settings
    if settings.observations is not None:
        observations = read_observations(settings.observations, target.fields, rows=settings.rows)
    else:
        observations = drawn_observations(target.fields, rows=settings.rows, seed=load.seed)
    messages = [EncodedObservation(settings, observation) for observation in observations]
    return Lane(
        "act",
        load,
        share,
        lambda index: PolicyCaller(
            target, messages, index * share.num_processes + share.process, timeout_s=load.timeout_s
        ),
        control_hz=settings.control_hz,
        emit=emit,
    )


def with_load(load: LoadSettings, value: float) -> LoadSettings:
    """The same load test at another load: a stage of a sweep, steady."""
    if load.mode == "closed":
        return replace(load, users=round(value), shape="steady")
    return replace(load, rate_per_s=value, shape="steady")
