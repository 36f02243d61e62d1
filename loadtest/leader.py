"""Leads the generator processes of a run: starts them, gives each its share of a stage, and gathers the records.

It sends no request itself: what it does with records and shows to people would hold up a generator that measures.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import gevent
from locust.env import Environment
from locust.runners import MasterRunner

from loadtest.errors import UsageError
from loadtest.generator import Share
from loadtest.node import HALT, OVER, READY, RECORDS, STAGE, LlmUser, PolicyUser, StageOrder
from loadtest.plan import Plan
from loadtest.settings import LoadSettings
from loadtest.targets import LlmTarget, PolicyTarget

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_CONNECT_S = 60.0
_JOIN_S = 600.0
_ASK_AGAIN_S = 1.0
_GIVE_UP_S = 10.0
"""A run ends when for so long requests have failed and none has succeeded."""
_GRACE_S = 15.0
_STOPS = {signal.SIGINT: "stopped by Ctrl-C", signal.SIGTERM: "stopped by SIGTERM"}


@dataclass(frozen=True, kw_only=True)
class News:
    """What a generator process has done since it told last.

    Attributes:
        lines: The records, as they lie in the file. Looking into them waits until nothing is measured any more.
        num_ok: How many were answered.
        num_failed: How many were not.
        p50_ms: Median of their latencies, if any was answered.
    """

    lines: bytes
    num_ok: int
    num_failed: int
    p50_ms: float | None


class Leader:
    """Runs stages on all generator processes. A context manager: leaving it ends them.

    Args:
        plan: The load test.
        llm: The language model, if it is loaded.
        policy: The policy, if it is loaded.
        on_records: Gets what comes in.
        on_wait: Told what is waited for, for people.
    """

    def __init__(
        self,
        plan: Plan,
        llm: LlmTarget | None,
        policy: PolicyTarget | None,
        *,
        on_records: Callable[[News], None],
        on_wait: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._llm = llm
        self._policy = policy
        self._on_records = on_records
        self._on_wait = on_wait
        self._workers: list[subprocess.Popen[bytes]] = []
        self._ready: set[tuple[int, int]] = set()
        self._over: set[tuple[int, int]] = set()
        self._last_success = 0.0
        self._failures_since = 0
        self._interrupted: str | None = None
        self._main = gevent.getcurrent()
        self.environment = Environment(user_classes=[LlmUser, PolicyUser], host=self._host(), stop_timeout=2.0)

    def __enter__(self) -> Leader:
        # A handler of our own: locust's runner takes a KeyboardInterrupt for itself in some places and not in others.
        self._handlers = {number: signal.getsignal(number) for number in _STOPS}
        self._gevent_handlers = [gevent.signal_handler(number, self._interrupt, number) for number in _STOPS]
        self._runner: Any = self._create_master()
        for message, listener in ((READY, self._note_ready), (OVER, self._note_over), (RECORDS, self._take_records)):
            self._runner.register_message(message, listener)
        if self._plan.web_port is not None:
            self._open_page(self._plan.web_port)
        try:
            self._start_workers()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self._end()

    def _interrupt(self, number: signal.Signals) -> None:
        if self._interrupted is not None:  # a second time: at once
            self._main.throw(KeyboardInterrupt)
        self._interrupted = _STOPS[number]

    def _end(self) -> None:
        for handler in self._gevent_handlers:
            handler.cancel()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._runner.quit()
        if self.environment.web_ui is not None:
            self.environment.web_ui.stop()
        deadline = time.monotonic() + 5
        for worker in self._workers:
            while worker.poll() is None and time.monotonic() < deadline:
                gevent.sleep(_POLL_S)
            if worker.poll() is None:
                worker.kill()
                worker.wait()

    def run_stage(
        self, stage: int, llm_load: LoadSettings | None, policy_load: LoadSettings | None, *, tick: Callable[[], None]
    ) -> str | None:
        """Sends one load and waits until every request has its answer.

        Args:
            stage: Its index.
            llm_load: Load on the language model.
            policy_load: Load on the policy server.
            tick: Called several times a second.

        Returns:
            Why it ended before its time; None if it did not.
        """
        number = self._plan.num_generators
        loads = {LlmUser: llm_load, PolicyUser: policy_load}
        orders: dict[int, tuple[str, str]] = {}
        for process, client in enumerate(self._clients()):
            order = StageOrder(
                share=Share(process=process, num_processes=number, stage=stage),
                llm=self._llm,
                llm_load=llm_load,
                policy=self._policy,
                policy_load=policy_load,
                events=self._plan.web_port is not None,
            )
            orders[process] = (order.to_json(), client)
        everybody = {(process, stage) for process in range(number)}
        if not self._prepare(stage, orders):
            return "a generator process did not answer"
        num_users = 0
        classes: list[type[LlmUser] | type[PolicyUser]] = []
        for user_class, load in loads.items():
            user_class.fixed_count = 0 if load is None else number if load.mode == "open" else load.most_users
            num_users += user_class.fixed_count
            if load is not None:
                classes.append(user_class)
        self._last_success, self._failures_since = time.monotonic(), 0
        self._runner.start(num_users, spawn_rate=num_users, user_classes=classes)
        reason = self._await_end(everybody, [load for load in loads.values() if load is not None], tick)
        self._runner.stop()
        if reason is None or self._interrupted is None:  # the nodes get ready for the next stage
            self._wait(lambda: len(self._clients()) >= number or self._lost() is not None, _CONNECT_S)
        return reason

    def _prepare(self, stage: int, orders: dict[int, tuple[str, str]]) -> bool:
        """Tells each node what to send. Again and again: one that has just joined may not listen yet."""
        deadline = time.monotonic() + _CONNECT_S
        while time.monotonic() < deadline and self._lost() is None:
            missing = [process for process in orders if (process, stage) not in self._ready]
            if not missing:
                return True
            for process in missing:
                self._runner.send_message(STAGE, *orders[process])
            self._wait(lambda: all((process, stage) in self._ready for process in orders), _ASK_AGAIN_S)
        return False

    def halt(self) -> None:
        """Sends nothing more; ``run_stage`` returns when what is in flight has ended."""
        self._runner.send_message(HALT)

    def _await_end(
        self, everybody: set[tuple[int, int]], loads: Sequence[LoadSettings], tick: Callable[[], None]
    ) -> str | None:
        longest_s = max(load.warmup_s + load.duration_s + load.timeout_s for load in loads) + _GRACE_S
        deadline = time.monotonic() + longest_s
        reason: str | None = None
        while not everybody <= self._over:
            gevent.sleep(_POLL_S)
            tick()
            if reason is None:
                reason = self._interrupted or self._lost() or self._gave_up() or self._stopped()
                if reason is not None:
                    self.halt()
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            if time.monotonic() > deadline:
                return reason or f"requests were still in flight after {longest_s:.0f} s"
        return reason

    def _gave_up(self) -> str | None:
        quiet_s = time.monotonic() - self._last_success
        if self._failures_since and quiet_s > _GIVE_UP_S:
            return f"{self._failures_since} requests failed and none succeeded for {quiet_s:.0f} s"
        return None

    def _stopped(self) -> str | None:
        """Somebody may press Stop on locust's own page; the users are gone then."""
        if self._plan.web_port is not None and self._runner.state in ("stopping", "stopped"):
            return "stopped from locust's page"
        return None

    def _lost(self) -> str | None:
        for number, worker in enumerate(self._workers):
            if worker.poll() is not None:
                return f"generator process {number} ended with exit code {worker.returncode}"
        return None

    # Messages.

    def _note_ready(self, environment: Environment, msg: Any, **_: Any) -> None:
        self._ready.add((msg.data["process"], msg.data["stage"]))

    def _note_over(self, environment: Environment, msg: Any, **_: Any) -> None:
        self._over.add((msg.data["process"], msg.data["stage"]))

    def _take_records(self, environment: Environment, msg: Any, **_: Any) -> None:
        news = News(**msg.data)
        if news.num_ok:
            self._last_success, self._failures_since = time.monotonic(), 0
        else:
            self._failures_since += news.num_failed
        self._on_records(news)

    # Processes.

    def _host(self) -> str:
        targets = [target.settings.url for target in (self._llm, self._policy) if target is not None]
        return targets[0]

    def _create_master(self) -> MasterRunner:
        host, port = "127.0.0.1", 0
        if self._plan.bind is not None:
            host, _, text = self._plan.bind.rpartition(":")
            if not host or not text.isdecimal():
                raise UsageError(f"bind={self._plan.bind!r}: write HOST:PORT, such as 0.0.0.0:5557")
            port = int(text)
        try:
            return self.environment.create_master_runner(host, port)
        except Exception as error:  # zmq's own, wrapped by locust
            raise UsageError(f"bind={host}:{port}: cannot listen there ({error}); choose another") from None

    def _start_workers(self) -> None:
        port = str(self._runner.server.port)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        for _ in range(self._plan.processes):
            self._workers.append(
                subprocess.Popen(  # noqa: S603  # this very Python and package
                    [sys.executable, "-m", "loadtest.worker", "127.0.0.1", port],
                    stdin=subprocess.PIPE,  # never written to: its end tells the worker that this process is gone
                    start_new_session=True,  # Ctrl-C in a terminal reaches the leader alone, which ends them
                    env=environment,
                )
            )
        number = self._plan.num_generators
        if self._plan.expect_workers:
            self._on_wait(f"waiting for {self._plan.expect_workers} processes to join at {self._plan.bind}")
        limit_s = _JOIN_S if self._plan.expect_workers else _CONNECT_S
        if not self._wait(lambda: self._runner.worker_count >= number or self._lost() is not None, limit_s):
            raise UsageError(
                f"expect_workers: {self._runner.worker_count} of {number} processes have joined; giving up"
            )
        if (lost := self._lost()) is not None:
            raise RuntimeError(lost)

    def _clients(self) -> list[str]:
        return sorted(client.id for client in self._runner.clients.ready)

    def _open_page(self, port: int) -> None:
        del sys.argv[1:]  # the page reads the command line as if it were locust's own
        try:
            self.environment.create_web_ui("127.0.0.1", port)
        except OSError as error:
            raise UsageError(f"web={port}: cannot listen there ({error.strerror}); choose another port") from None

    def _wait(self, condition: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not condition():
            if self._interrupted is not None:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                return False
            gevent.sleep(_POLL_S)
        return True
