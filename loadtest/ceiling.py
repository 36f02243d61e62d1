"""How much the generator can send at all: the same requests against a server that does nothing.

What a run shows near this ceiling is the generator's doing. A closed loop is measured with its own number of users: one
user alone, who waits for each answer, is far from what many reach together. The no-op server runs on the generator's
machine and takes a part of its cores, as a server under test there does too.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import gevent
from gevent.pool import Group
from pydantic import TypeAdapter

from loadtest.deferred import Deferred
from loadtest.generator import Lane, Share, llm_lane, policy_lane
from loadtest.record_file import as_line
from loadtest.records import RequestRecord
from loadtest.settings import LoadSettings
from loadtest.targets import LlmTarget, PolicyTarget

_ENOUGH_USERS = 32
"""As many as keep a generator process busy all the time."""
_MOST_USERS = 256
"""More of them do not send more."""
_WARM_S = 0.5
_MEASURE_S = 2.0
_START_S = 30.0


@dataclass(frozen=True, kw_only=True)
class _Order:
    users: int
    seconds: float
    llm: LlmTarget | None = None
    policy: PolicyTarget | None = None


_ORDER = TypeAdapter(_Order)


def measure_ceiling(
    target: LlmTarget | PolicyTarget, *, num_processes: int, users: int | None = None, seconds: float = _MEASURE_S
) -> float:
    """Requests a second that so many generator processes reach against a server that does nothing.

    Args:
        target: Gives protocol and payload. A control rate does not count: the ceiling is what could be sent.
        num_processes: Generator processes; more than there are cores are measured at that many and scaled.
        users: Users of all processes together who ask again as soon as they are answered; None for as many as keep
            each process busy.
        seconds: How long to measure.
    """
    num_processes, users_each = spread(users, num_processes)
    num_chunks = target.settings.output_tokens.mean if isinstance(target, LlmTarget) else 1
    num_measured = min(num_processes, os.cpu_count() or 1)
    with _noop_server(num_chunks) as url:
        order = _Order(users=users_each, seconds=seconds)
        if isinstance(target, LlmTarget):
            order = replace(order, llm=replace(target, settings=replace(target.settings, url=url)))
        else:
            settings = replace(target.settings, url=url, control_hz=None)
            order = replace(order, policy=replace(target, settings=settings))
        content = _ORDER.dump_json(order)
        processes = [_start("loadtest.ceiling") for _ in range(num_measured)]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(content + b"\n")
            process.stdin.close()
        counts = [float(_read(process)) for process in processes]
    return sum(counts) * num_processes / num_measured


def spread(users: int | None, num_processes: int) -> tuple[int, int]:
    """How many processes have somebody who asks, and how many users each of them is measured with."""
    if users is None:
        return num_processes, _ENOUGH_USERS
    num_processes = min(num_processes, users)
    return num_processes, min(math.ceil(users / num_processes), _MOST_USERS)


def _measure(order: _Order) -> float:
    """Requests a second of this process."""
    times: list[float] = []
    failures: list[RequestRecord] = []

    def take(record: RequestRecord) -> None:
        as_line(record)  # as in a run
        times.append(time.perf_counter())
        if record.error is not None:
            failures.append(record)

    emit = Deferred(take)
    load = LoadSettings(users=order.users, duration_s=_WARM_S + order.seconds + 1, warmup_s=0)
    share = Share()
    lane: Lane
    if order.llm is not None:
        lane = llm_lane(order.llm, load, share, emit)
    else:
        assert order.policy is not None
        lane = policy_lane(order.policy, load, share, emit)
    lane.begin()
    users = Group()
    for _ in range(order.users):
        users.spawn(lane.user)
    gevent.sleep(_WARM_S)
    began, first = time.perf_counter(), len(times)
    gevent.sleep(order.seconds)
    number, took = len(times) - first, time.perf_counter() - began
    lane.halt()
    users.join()
    emit.flush()
    if failures:
        raise RuntimeError(f"the no-op server did not answer: {failures[0].error}: {failures[0].message}")
    return number / took


@contextmanager
def _noop_server(num_chunks: int) -> Iterator[str]:
    process = _start("loadtest.noop_server", "--num-chunks", str(num_chunks))
    try:
        assert process.stdout is not None
        with gevent.Timeout(_START_S, RuntimeError("the no-op server did not start")):
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def _start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603  # this very Python and package
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def _read(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    text = process.stdout.read().decode().strip()
    if process.wait() or not text:
        raise RuntimeError("the generator's ceiling could not be measured")
    return text


def main() -> None:
    """One measuring process: takes its order on standard input, prints requests a second."""
    sys.stdout.write(f"{_measure(_ORDER.validate_json(sys.stdin.readline()))}\n")


if __name__ == "__main__":
    from gevent import monkey

    monkey.patch_all()
    main()
