"""A generator process among others: takes stages from the process that leads, and sends back records.

Leader and node talk by locust's messages, so that nodes may be on other machines.

======================  ========  ===========================================================
message                 from      says
======================  ========  ===========================================================
``loadtest_stage``      leader    what to send next (``StageOrder``); users start afterwards
``loadtest_ready``      node      the stage is prepared
``loadtest_halt``       leader    send nothing more
``loadtest_records``    node      records, as lines of the file, and what to show of them meanwhile
``loadtest_over``       node      everything of the stage was sent and answered
======================  ========  ===========================================================
"""

from __future__ import annotations

import gc
import statistics
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gevent
from locust import User, task
from locust.env import Environment
from locust.exception import StopUser
from pydantic import TypeAdapter

from loadtest.deferred import Deferred
from loadtest.generator import Lane, Share, llm_lane, policy_lane
from loadtest.record_file import as_line
from loadtest.records import RequestRecord
from loadtest.settings import LoadSettings
from loadtest.targets import LlmTarget, PolicyTarget

STAGE, READY, HALT, RECORDS, OVER = (f"loadtest_{name}" for name in ("stage", "ready", "halt", "records", "over"))
_FLUSH_S = 0.05  # often, so that it never takes long


@dataclass(frozen=True, kw_only=True)
class StageOrder:
    """What a node is to send.

    Attributes:
        share: Its part.
        llm: The language model, if it is loaded.
        llm_load: How much.
        policy: The policy, if it is loaded.
        policy_load: How much.
        events: Tell locust of every request, for its own page.
    """

    share: Share
    llm: LlmTarget | None = None
    llm_load: LoadSettings | None = None
    policy: PolicyTarget | None = None
    policy_load: LoadSettings | None = None
    events: bool = False

    def to_json(self) -> str:
        """For a message."""
        return _ORDER.dump_json(self).decode()


_ORDER = TypeAdapter(StageOrder)


class Node:
    """This process' part of a run.

    Args:
        environment: locust's; its runner has to be there.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._runner: Any = environment.runner
        self._order: StageOrder | None = None
        self._news = _Gathered()
        self._emit = Deferred(self._take)
        self._begun = False
        self._over = True
        self.lanes: dict[str, Lane] = {}
        _NODES[environment] = self
        self._runner.register_message(STAGE, self._prepare)
        self._runner.register_message(HALT, self._halt)
        self._reporting = gevent.spawn(self._report)

    def begin(self) -> None:
        """The first user has started."""
        if not self._begun:
            self._begun, self._over = True, False
            for lane in self.lanes.values():
                lane.begin()

    def _prepare(self, environment: Environment, msg: Any, **_: Any) -> None:
        order: StageOrder = _ORDER.validate_json(msg.data)
        self._order, self._begun, self._over, self.lanes = order, False, True, {}
        if order.llm is not None and order.llm_load is not None:
            self.lanes["llm"] = llm_lane(order.llm, order.llm_load, order.share, self._emit)
        if order.policy is not None and order.policy_load is not None:
            self.lanes["policy"] = policy_lane(order.policy, order.policy_load, order.share, self._emit)
        # What is there by now stays: a collection that goes through all of it would hold up every user.
        gc.collect()
        gc.freeze()
        self._runner.send_message(READY, {"process": order.share.process, "stage": order.share.stage})

    def _halt(self, environment: Environment, msg: Any, **_: Any) -> None:
        for lane in self.lanes.values():
            lane.halt()

    def _take(self, record: RequestRecord) -> None:
        self._news.add(record)
        if self._order is not None and self._order.events:
            failed = record.error is not None
            self._environment.events.request.fire(
                request_type=record.kind,
                name="answer",
                response_time=record.latency_ms if record.latency_ms is not None else record.service_ms or 0.0,
                response_length=record.received_bytes,
                exception=RuntimeError(f"{record.error}: {record.message}") if failed else None,
                context={},
            )

    def _report(self) -> None:
        while True:
            gevent.sleep(_FLUSH_S)
            self.flush()

    def flush(self) -> None:
        """Sends what has gathered, and that the stage is over once it is."""
        over = self._begun and not self._over and all(lane.is_over for lane in self.lanes.values())
        self._emit.flush()
        if self._news.num_ok or self._news.num_failed:
            gathered, self._news = self._news, _Gathered()
            self._runner.send_message(RECORDS, gathered.to_message())
        if over and self._order is not None:
            self._over = True
            self._runner.send_message(OVER, {"process": self._order.share.process, "stage": self._order.share.stage})


class _Gathered:
    """Records since the last message. Each becomes a line at once: all of them together would hold up every user."""

    def __init__(self) -> None:
        self.num_ok = 0
        self.num_failed = 0
        self._lines: list[bytes] = []
        self._latencies: list[float] = []

    def add(self, record: RequestRecord) -> None:
        self._lines.append(as_line(record))
        if record.error is None:
            self.num_ok += 1
        else:
            self.num_failed += 1
        if record.latency_ms is not None:
            self._latencies.append(record.latency_ms)

    def to_message(self) -> dict[str, Any]:
        return {
            "lines": b"".join(self._lines),
            "num_ok": self.num_ok,
            "num_failed": self.num_failed,
            "p50_ms": statistics.median_low(self._latencies) if self._latencies else None,
        }


_NODES: weakref.WeakKeyDictionary[Environment, Node] = weakref.WeakKeyDictionary()


class _LaneUser(User):
    abstract = True
    lane = ""

    @task
    def run_to_the_end(self) -> None:
        """One user, or the arrivals of this process, until the stage is over."""
        node = _NODES[self.environment]
        node.begin()
        lane = node.lanes[self.lane]
        run: Callable[[], None] = lane.arrivals if lane.is_open else lane.user
        run()
        raise StopUser


class LlmUser(_LaneUser):
    """Asks the language model; in open loop one a process starts all of its requests."""

    lane = "llm"


class PolicyUser(_LaneUser):
    """Asks the policy server; in open loop one a process starts all of its requests."""

    lane = "policy"
