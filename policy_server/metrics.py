"""What the server counts, summed over its worker processes when it is asked.

Every worker owns one small file of counters for each policy version, mapped into memory: counting is an addition in an
array, a scrape adds up the files of all workers, and a worker that was killed leaves its counts behind for the one that
takes its place. Requests are gathered in a list and counted together, a few times a second; one costs an append.
"""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

from policy_server.batcher import BatchRecord
from policy_server.errors import PolicyServerError

STAGES = ("queue", "inference", "total")
TIME_BUCKETS_S = np.asarray([round(1e-4 * 1.5**step, 7) for step in range(29)], np.float64)
"""Upper bounds from 0.1 ms to 8.5 s, each 1.5 times the one before."""
BATCH_BUCKETS = np.asarray([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], np.float64)
PROTOCOLS = ("http", "oip", "grpc", "websocket")
STATUSES = (200, 400, 401, 404, 409, 413, 422, 499, 500, 503, 504)
SHEDS = ("deadline", "queue_full", "superseded")

_TIMES = len(TIME_BUCKETS_S) + 2  # one more bucket for what is longer, and the sum
_BATCHES = len(BATCH_BUCKETS) + 2
_STAGE_AT = {stage: index * _TIMES for index, stage in enumerate(STAGES)}
_BATCH_AT = len(STAGES) * _TIMES
_REQUESTS_AT = _BATCH_AT + _BATCHES
_SHED_AT = _REQUESTS_AT + len(PROTOCOLS) * (len(STATUSES) + 1)
_QUEUE_AT = _SHED_AT + len(SHEDS)
_UPDATED_AT = _QUEUE_AT + 1
SIZE = _UPDATED_AT + 1

_FILE = re.compile(r"(?P<slot>\d+)\.(?P<policy>[A-Za-z0-9._-]*)@(?P<version>\d+)\.counters")
_FRESH_S = 5.0  # gauges of a worker that has not written for longer are not added: it is dead
_UNKNOWN = ("", 0)

Counters = NDArray[np.float64]


class Meters:
    """The counters of one policy version in one worker."""

    def __init__(self, path: Path | None) -> None:
        self.total_s: list[float] = []
        self.requests: dict[tuple[str, int], int] = {}
        self.batches: list[BatchRecord] = []
        self._map: mmap.mmap | None = None
        if path is None:
            self.counters: Counters = np.zeros(SIZE)
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, SIZE * 8)
            self._map = mmap.mmap(descriptor, SIZE * 8)
        finally:
            os.close(descriptor)
        self.counters = np.frombuffer(self._map, np.float64)

    def observe_batch(self, record: BatchRecord) -> None:
        """One run of the engine; called by the batcher."""
        self.batches.append(record)

    def fold(self) -> None:
        """Counts what has gathered."""
        counters = self.counters
        if self.total_s:
            seen, self.total_s = self.total_s, []
            self._count_times("total", seen)
        if self.requests:
            seen_requests, self.requests = self.requests, {}
            for (protocol, status), number in seen_requests.items():
                counters[_request_index(protocol, status)] += number
                if status == 409:
                    counters[_SHED_AT + SHEDS.index("superseded")] += number
        if self.batches:
            records, self.batches = self.batches, []
            self._count_times("queue", [seconds for record in records for seconds in record.queued_s])
            ran = [record for record in records if record.rows]
            self._count_times("inference", [record.inference_s for record in ran])
            _count(counters[_BATCH_AT : _BATCH_AT + _BATCHES], BATCH_BUCKETS, [float(record.rows) for record in ran])
            counters[_SHED_AT + SHEDS.index("deadline")] += sum(record.num_late for record in records)
            counters[_SHED_AT + SHEDS.index("queue_full")] += sum(record.num_refused for record in records)
            counters[_QUEUE_AT] = records[-1].queue_rows
        counters[_UPDATED_AT] = time.time()

    def _count_times(self, stage: str, seconds: list[float]) -> None:
        at = _STAGE_AT[stage]
        _count(self.counters[at : at + _TIMES], TIME_BUCKETS_S, seconds)


@dataclass(slots=True)
class Observed:
    """A request that is being answered; ``version`` is told when it is known."""

    version: int = 0


class Metrics:
    """All counters of one worker, and the sum over the workers.

    Args:
        folder: Where the workers' counters lie; None keeps them in this process.
        slot: Which worker this is.
    """

    def __init__(self, folder: Path | None = None, slot: int = 0) -> None:
        self._folder = folder
        self._slot = slot
        self._meters: dict[tuple[str, int], Meters] = {}
        self.open_websockets = 0
        self._meters[_UNKNOWN] = self._open(_UNKNOWN)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_Collector(self))

    def meters(self, policy: str, version: int) -> Meters:
        """The counters of a version that is loaded; made when it is loaded first."""
        key = (policy, version)
        if key not in self._meters:
            self._meters[key] = self._open(key)
        return self._meters[key]

    def _open(self, key: tuple[str, int]) -> Meters:
        policy, version = key
        return Meters(self._folder / f"{self._slot}.{policy}@{version}.counters" if self._folder is not None else None)

    def observe_request(self, policy: str, version: int, status: int, total_s: float, protocol: str) -> None:
        """One answered request.

        Args:
            policy: As it was asked for; names that are not loaded are counted together.
            version: Which version answered; 0 if none did.
            status: HTTP's, or what would be on HTTP.
            total_s: From its last byte to its answer.
            protocol: One of ``PROTOCOLS``.
        """
        meters = self._meters.get((policy, version)) or self._meters[_UNKNOWN]
        if status == 200:
            meters.total_s.append(total_s)
        key = (protocol, status)
        meters.requests[key] = meters.requests.get(key, 0) + 1

    @contextmanager
    def observing(self, policy: str, protocol: str) -> Generator[Observed]:
        """Counts the request that is answered inside, whatever becomes of it."""
        started = time.perf_counter()
        observed, status = Observed(), 500
        try:
            yield observed
            status = 200
        except PolicyServerError as error:
            status = error.status
            raise
        finally:
            self.observe_request(policy, observed.version, status, time.perf_counter() - started, protocol)

    def fold(self) -> None:
        """Counts what has gathered, on the event loop's thread; called a few times a second and before a scrape."""
        for meters in self._meters.values():
            meters.fold()

    def sums(self) -> dict[tuple[str, int], Counters]:
        """Counters by policy and version, summed over the workers, as they were when each of them last folded."""
        if self._folder is None:
            return {key: meters.counters.copy() for key, meters in self._meters.items()}
        found: dict[tuple[str, int], Counters] = {}
        now = time.time()
        for path in self._folder.glob("*.counters"):
            match = _FILE.fullmatch(path.name)
            if match is None:
                continue
            try:
                counters = np.fromfile(path, np.float64, SIZE)
            except OSError:  # removed meanwhile
                continue
            if counters.size < SIZE:
                continue
            if now - counters[_UPDATED_AT] > _FRESH_S:
                counters[_QUEUE_AT] = 0
            key = (match["policy"], int(match["version"]))
            if key in found:
                counters = found[key] + counters
            found[key] = counters
        return found

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def snapshot(self) -> dict[str, Any]:
        """The same figures as plain JSON, for the page; histograms are cumulative since the start."""
        policies: list[dict[str, Any]] = []
        for (policy, version), counters in sorted(self.sums().items()):
            if not policy:
                continue
            policies.append(
                {
                    "policy": policy,
                    "version": version,
                    "requests": _requests(counters),
                    "queue_rows": float(counters[_QUEUE_AT]),
                    "latency": {stage: _histogram(counters, _STAGE_AT[stage], _TIMES) for stage in STAGES},
                    "batch_rows": _histogram(counters, _BATCH_AT, _BATCHES),
                }
            )
        return {
            "time": time.time(),
            "time_buckets_s": TIME_BUCKETS_S.tolist(),
            "batch_buckets": BATCH_BUCKETS.tolist(),
            "policies": policies,
        }


class _Collector:
    """Gives prometheus_client the sums when it asks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Any]:
        """One family a metric."""
        labels = ["policy", "version"]
        latency = HistogramMetricFamily(
            "policy_request_duration_seconds",
            "Time of a request by stage: waiting for the engine, running it, all from its last byte on.",
            labels=[*labels, "stage"],
        )
        batches = HistogramMetricFamily("policy_batch_rows", "Observations of one run of the engine.", labels=labels)
        requests = CounterMetricFamily("policy_requests", "Answered requests.", labels=[*labels, "protocol", "status"])
        sheds = CounterMetricFamily(
            "policy_requests_shed", "Requests that cost no compute, by reason.", labels=[*labels, "reason"]
        )
        queue = GaugeMetricFamily("policy_queue_rows", "Observations that wait for the engine.", labels=labels)
        info = InfoMetricFamily("policy_version", "Versions that have been loaded.", labels=labels)
        for (policy, version), counters in sorted(self._metrics.sums().items()):
            names = [policy, str(version)]
            for (protocol, status), number in _requests(counters, names=True).items():
                requests.add_metric([*names, protocol, status], number)
            if not policy:
                continue
            for stage in STAGES:
                _add_histogram(latency, [*names, stage], counters, _STAGE_AT[stage], TIME_BUCKETS_S)
            _add_histogram(batches, names, counters, _BATCH_AT, BATCH_BUCKETS)
            for index, reason in enumerate(SHEDS):
                sheds.add_metric([*names, reason], counters[_SHED_AT + index])
            queue.add_metric(names, counters[_QUEUE_AT])
            info.add_metric(names, {})
        sockets = GaugeMetricFamily("policy_open_websockets", "Open WebSockets of the worker that answers.")
        sockets.add_metric([], self._metrics.open_websockets)
        return [latency, batches, requests, sheds, queue, info, sockets]


def _count(target: Counters, buckets: NDArray[np.float64], values: list[float]) -> None:
    if values:
        places = np.searchsorted(buckets, values)
        target[: len(buckets) + 1] += np.bincount(places, minlength=len(buckets) + 1)
        target[-1] += sum(values)


def _request_index(protocol: str, status: int) -> int:
    place = STATUSES.index(status) if status in STATUSES else len(STATUSES)
    return _REQUESTS_AT + PROTOCOLS.index(protocol) * (len(STATUSES) + 1) + place


def _requests(counters: Counters, *, names: bool = False) -> Mapping[Any, float]:
    found: dict[Any, float] = {}
    for protocol in PROTOCOLS:
        for status in (*STATUSES, 0):
            number = float(counters[_request_index(protocol, status)])
            if number:
                key = (protocol, str(status) if status else "other") if names else f"{protocol} {status or 'other'}"
                found[key] = number
    return found


def _histogram(counters: Counters, at: int, size: int) -> dict[str, Any]:
    part = counters[at : at + size]
    return {"counts": part[:-1].tolist(), "sum": float(part[-1])}


def _add_histogram(
    family: HistogramMetricFamily, labels: list[str], counters: Counters, at: int, bounds: NDArray[np.float64]
) -> None:
    counts = np.cumsum(counters[at : at + len(bounds) + 1])
    names = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    buckets = [(name, float(count)) for name, count in zip(names, counts, strict=True)]
    family.add_metric(labels, buckets=buckets, sum_value=float(counters[at + len(bounds) + 1]))
