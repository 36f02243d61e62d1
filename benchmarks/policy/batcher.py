"""The batcher without HTTP: the engine on the event loop or in a thread, and what handing over the GIL costs.

Clients in closed loops on one event loop: each parses a JSON body, hands its rows to the batcher and writes a JSON
answer when it comes, as the server's short way does; sockets are left out. An engine's thread that has finished a run
needs the GIL, which a busy loop gives up only after ``sys.getswitchinterval()``; so the thread is measured at several.
Up to a full batch of clients all wait while the engine runs and the loop is idle; with twice as many it is busy with
the other half. Every action is compared with onnxruntime's own.

    python benchmarks/policy/batcher.py [--rounds 3] [--seconds 0.7] [--depths 4 8 16 64] [--no-keep]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: benchmarks/ is no package

from random_actor import export_actor
from record import keep_record
from sides import OBSERVATION, PLAIN

from policy_server.batcher import BatchRecord, RowsDone
from policy_server.engines.onnxruntime import OnnxRuntimeEngine
from policy_server.errors import PolicyServerError
from policy_server.manifest import Manifest, read_manifest
from policy_server.served import NOISE, ServedPolicy
from policy_server.settings import BatchingSettings, EngineSettings
from policy_server.wire import decode_act, encode_act, parse_act
from policy_server.worker import SWITCH_INTERVAL_S

CLIENTS = (1, 16, 64, 128)
MAX_BATCH = 64
WARM_S = 0.2
TOLERANCE = 1e-4
BODY = orjson.dumps(PLAIN)


@dataclass(frozen=True)
class Way:
    """One way to run the engine; ``switch_s`` is the GIL's switch interval, None for the event loop's own thread."""

    name: str
    switch_s: float | None


INLINE = Way("on the loop", None)
SERVED = Way(f"thread, {1e3 * SWITCH_INTERVAL_S:g} ms", SWITCH_INTERVAL_S)
PYTHONS = Way("thread, 5 ms (Python's own)", 5e-3)
WAYS = (INLINE, PYTHONS, SERVED, Way("thread, 0.05 ms", 5e-5))


@dataclass(frozen=True)
class Load:
    """What one way bore for a while; times are medians."""

    requests_per_s: float
    batch: float
    inference_ms: float
    p50_ms: float
    p99_ms: float


class Client:
    """Asks again as soon as it is answered."""

    def __init__(self, served: ServedPolicy) -> None:
        self.took: list[float] = []
        self.actions: list[np.ndarray] = []
        self.failure: PolicyServerError | None = None
        self.asking = True
        self._served = served
        self._loop = asyncio.get_running_loop()
        self._started = 0.0

    def ask(self) -> None:
        """Sends one request."""
        self._started = time.perf_counter()
        self._served.act(parse_act(decode_act(BODY), self._served.observations), self._answered)

    def _answered(self, result: RowsDone | PolicyServerError) -> None:
        if isinstance(result, PolicyServerError):
            self.failure = result
            return
        took = time.perf_counter() - self._started
        encode_act(result, 1, batched=False, total_s=took)
        self.took.append(took)
        self.actions.append(result.outputs["action"])
        if self.asking:
            self._loop.call_soon(self.ask)


def main() -> None:
    """Measures every way in turn and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.7)
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8, 16, 64])
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    verdicts: list[str] = []
    for depth in arguments.depths:
        full_ms, measured = measure(depth, arguments.rounds, arguments.seconds)
        rows += [
            {"depth": depth, "full batch alone ms": full_ms, "clients": clients, "engine": way.name}
            | {
                "requests/s": middle(loads, "requests_per_s"),
                "batch": middle(loads, "batch"),
                "inference ms": middle(loads, "inference_ms"),
                "p50 ms": middle(loads, "p50_ms"),
                "p99 ms": middle(loads, "p99_ms"),
            }
            for (way, clients), loads in measured.items()
        ]
        verdicts += verdicts_of(depth, full_ms, measured)
    method = (
        "Actor of width 256, 13 inputs, 4 actions, random weights, one onnxruntime thread, max_batch 64, no delay. One "
        "process; clients in closed loops on its event loop (uvloop) parse and write JSON as the server does, without "
        f"sockets. {arguments.rounds} rounds, every way in turn, {WARM_S:g} s to warm and {arguments.seconds:g} s "
        "measured; the median round counts. 'thread, x ms': the engine has a thread of its own, and "
        "sys.setswitchinterval is x. Every action is compared with onnxruntime's."
    )
    if arguments.keep:
        keep_record("policy-batcher", method=method, rows=rows, verdicts=verdicts)
    else:
        for row in [*rows, *verdicts]:
            print(row)


def measure(depth: int, rounds: int, seconds: float) -> tuple[float, dict[tuple[Way, int], list[Load]]]:
    """A full batch alone, in milliseconds, and the loads of all rounds."""
    measured: dict[tuple[Way, int], list[Load]] = {(way, clients): [] for clients in CLIENTS for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        file = export_actor(Path(name), depth)
        model, manifest = file.read_bytes(), read_manifest(file.parent)
    full_ms = [time_full_batch(model)]
    for number in range(rounds):
        for clients in CLIENTS:
            for way in WAYS[::-1] if number % 2 else WAYS:
                measured[way, clients].append(uvloop.run(bear(model, manifest, way, clients, seconds)))
        full_ms.append(time_full_batch(model))
        print(f"depth {depth}, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return statistics.median(full_ms), measured


def feed_of(engine: OnnxRuntimeEngine, rows: int) -> dict[str, np.ndarray]:
    """The observation as the graph's inputs, repeated; no noise."""
    values = np.asarray(OBSERVATION, np.float32)
    feed: dict[str, np.ndarray] = {}
    first = 0
    for tensor in engine.inputs:
        size = tensor.shape[0] or 1
        row = np.zeros(size, np.float32)
        if tensor.name != NOISE:
            row = values[first : first + size]
            first += size
        feed[tensor.name] = np.ascontiguousarray(np.broadcast_to(row, (rows, size)))
    return feed


def time_full_batch(model: bytes) -> float:
    """Median of a full batch's run with nothing else in the process, in milliseconds."""
    engine = OnnxRuntimeEngine(model, EngineSettings(), max_batch=MAX_BATCH)
    feed = feed_of(engine, MAX_BATCH)
    times: list[float] = []
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        started = time.perf_counter()
        engine.run(feed)
        times.append(time.perf_counter() - started)
    engine.close()
    return 1e3 * statistics.median(times)


async def bear(model: bytes, manifest: Manifest, way: Way, clients: int, seconds: float) -> Load:
    """One way under one load.

    Raises:
        RuntimeError: A request failed.
    """
    records: list[BatchRecord] = []
    engine = OnnxRuntimeEngine(model, EngineSettings(), max_batch=MAX_BATCH)
    expected = engine.run(feed_of(engine, 1))["action"]
    served = ServedPolicy(
        manifest=manifest,
        engine=engine,
        batching=BatchingSettings(max_batch=MAX_BATCH),
        engine_name="onnxruntime",
        observe=records.append,
        batch_s=0.0,
        run_inline_below_s=1.0 if way.switch_s is None else 0.0,
    )
    asking = [Client(served) for _ in range(clients)]
    with switching(way.switch_s):
        for client in asking:
            client.ask()
        await asyncio.sleep(WARM_S)
        records.clear()
        before = [len(client.took) for client in asking]
        started = time.perf_counter()
        await asyncio.sleep(seconds)
        elapsed = time.perf_counter() - started
        ran = list(records)
        took = [value for client, first in zip(asking, before, strict=True) for value in client.took[first:]]
        for client in asking:
            client.asking = False
        await asyncio.sleep(0)
        await served.batcher.drain()
    await served.close()
    for client in asking:
        if client.failure is not None:
            raise RuntimeError(f"{way.name}, {clients} clients: {client.failure}")
    actions = np.concatenate([action for client in asking for action in client.actions])
    np.testing.assert_allclose(actions, np.broadcast_to(expected, actions.shape), atol=TOLERANCE)
    return Load(
        requests_per_s=len(took) / elapsed,
        batch=statistics.fmean(record.rows for record in ran),
        inference_ms=1e3 * statistics.median(record.inference_s for record in ran),
        p50_ms=1e3 * float(np.percentile(took, 50)),
        p99_ms=1e3 * float(np.percentile(took, 99)),
    )


@contextmanager
def switching(interval_s: float | None) -> Iterator[None]:
    """The GIL's switch interval for a while."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before if interval_s is None else interval_s)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def middle(loads: list[Load], what: str) -> float:
    """The median round of one figure."""
    return statistics.median(getattr(load, what) for load in loads)


def verdicts_of(depth: int, full_ms: float, measured: dict[tuple[Way, int], list[Load]]) -> list[str]:
    """What the server's choices (on the loop below a limit, its switch interval) gain or cost at this depth."""
    limit_ms = EngineSettings().run_inline_below_ms
    chosen, other = (INLINE, SERVED) if full_ms < limit_ms else (SERVED, INLINE)

    def rate(way: Way, clients: int) -> float:
        return middle(measured[way, clients], "requests_per_s")

    against = ", ".join(f"{rate(chosen, clients) / rate(other, clients):.2f} at {clients}" for clients in CLIENTS)
    interval = ", ".join(f"{rate(SERVED, clients) / rate(PYTHONS, clients):.2f} at {clients}" for clients in CLIENTS)
    hop_ms = middle(measured[SERVED, 1], "p50_ms") - middle(measured[INLINE, 1], "p50_ms")
    return [
        f"depth {depth}: a full batch takes {full_ms:.2f} ms alone, so the server runs it "
        f"{'on the loop' if chosen is INLINE else 'in a thread'} (run_inline_below_ms {limit_ms:g}); requests/s "
        f"against the other way: {against} clients",
        f"depth {depth}: the thread at the server's switch interval against Python's own, requests/s: {interval} "
        f"clients; the hop to the thread and back adds {hop_ms:.3f} ms to p50 at one client",
    ]


if __name__ == "__main__":
    main()
