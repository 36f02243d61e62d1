"""Actions per second over HTTP, beside the servers that one would take otherwise: the same file, the same JSON.

Every side serves the same ONNX file with onnxruntime on one thread a process, batches what it can, and is asked by wrk
over 1, 16 and 64 connections in a closed loop. In every round each side is started alone, asked once (its action is
compared with onnxruntime's), warmed, measured and ended, one after the other, every second round in the opposite order;
a side counts by its median round. Two cores are shared by server and wrk. onnxruntime alone at batch 1 is measured in
every round too. With the shallow actor, where HTTP is the cost, two yardsticks run along: our server by its plain
FastAPI route, and a server that does nothing.

    python benchmarks/policy/peers/install.py FOLDER       # once; environments of the peers
    python benchmarks/policy/throughput.py --peers FOLDER [--rounds 3] [--seconds 3] [--depths 4,64]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: benchmarks/ is no package

from random_actor import export_actor
from record import keep_record
from sides import OBSERVATION, Side, ask, ours, peers, running, versions, yardsticks
from wrk import Load, check_wrk, load, wrk_version

from policy_server.engines.onnxruntime import OnnxRuntimeEngine
from policy_server.settings import EngineSettings

CONNECTIONS = (1, 16, 64)
WARM_S = 1.0
TOLERANCE = 1e-4
DEEP = 64
ALONE = "onnxruntime alone, batch 1"
AIM_DEEP, AIM_SHALLOW, AIM_ADDED_MS = 1.3, 1.2, 1.0


def main() -> None:
    """Measures, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="folder that peers/install.py was given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--depths", default="4,64")
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True, help="write benchmarks/results")
    arguments = parser.parse_args()
    check_wrk()
    sides = [ours(1), ours(2), *peers(arguments.peers)]
    rows: list[dict[str, Any]] = []
    verdicts: list[str] = []
    for depth in (int(depth) for depth in arguments.depths.split(",")):
        here = sides if depth >= DEEP else [*sides, *yardsticks()]
        measured, alone_ms = measure(depth, here, arguments.rounds, arguments.seconds)
        rows += rows_of(depth, here, measured, alone_ms)
        verdicts += verdicts_of(depth, sides, measured, alone_ms)
        verdicts += yardstick_verdicts(depth, here, measured)
    method = (
        f"Actor of width 256, 13 inputs, 4 actions, random weights. {arguments.rounds} rounds, every side started "
        f"alone and in turn, {WARM_S:g} s to warm and {arguments.seconds:g} s at each number of connections; the "
        f"median round counts. wrk {wrk_version()}, one thread, on the same cores. mosec, LitServe, BentoML, "
        "MLServer and Ray Serve batch up to 64 and wait at most 1 ms (Ray Serve and BentoML: as little as they "
        "offer). 'added ms' is p50 less onnxruntime's own time at batch 1. MLServer is asked in the Open Inference "
        "Protocol, which is all it speaks. Ours and mosec are measured with one and two processes, the other peers "
        f"with one. {versions(sides)}."
    )
    if arguments.keep:
        keep_record("policy-throughput", method=method, rows=rows, verdicts=verdicts)
    else:
        for row in [*rows, *verdicts]:
            print(row)


def measure(
    depth: int, sides: list[Side], rounds: int, seconds: float
) -> tuple[dict[tuple[str, int], list[Load]], list[float]]:
    """All rounds of one actor: loads by side and connections, and onnxruntime's own times in milliseconds."""
    measured: dict[tuple[str, int], list[Load]] = {}
    alone_ms: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        repository = Path(name)
        model = export_actor(repository, depth)
        engine = OnnxRuntimeEngine(model.read_bytes(), EngineSettings(), max_batch=64)
        feed = feed_of(engine)
        expected = engine.run(feed)["action"][0]
        for number in range(rounds):
            alone_ms.append(time_alone(engine, feed))
            for side in sides[::-1] if number % 2 else sides:
                with running(side, repository) as address:
                    action = ask(side, address)
                    if side.acts:
                        np.testing.assert_allclose(action, expected, atol=TOLERANCE, err_msg=side.name)
                    load(address + side.path, side.body, connections=16, seconds=WARM_S)
                    for connections in CONNECTIONS:
                        found = load(address + side.path, side.body, connections=connections, seconds=seconds)
                        measured.setdefault((side.name, connections), []).append(found)
                shown = " / ".join(f"{measured[side.name, count][-1].requests_per_s:.0f}" for count in CONNECTIONS)
                print(f"depth {depth}, round {number + 1}: {side.name}: {shown}", file=sys.stderr, flush=True)
    return measured, alone_ms


def feed_of(engine: OnnxRuntimeEngine) -> dict[str, np.ndarray]:
    """The observation as the graph's inputs."""
    feed: dict[str, np.ndarray] = {}
    first = 0
    for tensor in engine.inputs:
        size = tensor.shape[0] or 1
        feed[tensor.name] = np.asarray([OBSERVATION[first : first + size]], np.float32)
        first += size
    return feed


def time_alone(engine: OnnxRuntimeEngine, feed: dict[str, np.ndarray]) -> float:
    """Median of one run, in milliseconds."""
    times: list[float] = []
    end = time.perf_counter() + 1.0
    while time.perf_counter() < end:
        started = time.perf_counter()
        engine.run(feed)
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def median(loads: list[Load], what: str) -> float:
    """The median round of one figure."""
    return statistics.median(getattr(found, what) for found in loads)


def rows_of(
    depth: int, sides: list[Side], measured: dict[tuple[str, int], list[Load]], alone_ms: list[float]
) -> list[dict[str, Any]]:
    """One row a side and number of connections."""
    alone = statistics.median(alone_ms)
    rows: list[dict[str, Any]] = [
        {"depth": depth, "connections": 1, "side": ALONE, "requests/s": 1e3 / alone, "p50 ms": alone}
        | {"p99 ms": "", "added ms": 0.0, "errors": 0}
    ]
    for connections in CONNECTIONS:
        for side in sides:
            loads = measured[side.name, connections]
            rows.append(
                {
                    "depth": depth,
                    "connections": connections,
                    "side": side.name,
                    "requests/s": median(loads, "requests_per_s"),
                    "p50 ms": median(loads, "p50_ms"),
                    "p99 ms": median(loads, "p99_ms"),
                    "added ms": median(loads, "p50_ms") - alone if connections == 1 else "",
                    "errors": sum(found.errors for found in loads),
                }
            )
    return rows


def verdicts_of(
    depth: int, sides: list[Side], measured: dict[tuple[str, int], list[Load]], alone_ms: list[float]
) -> list[str]:
    """Our better number of workers against the best peer, and what HTTP adds to onnxruntime."""
    verdicts: list[str] = []
    for connections in CONNECTIONS:
        rates = {side.name: median(measured[side.name, connections], "requests_per_s") for side in sides}
        mine = {name: rate for name, rate in rates.items() if name.startswith("policy server")}
        others = {name: rate for name, rate in rates.items() if name not in mine}
        if not others:
            continue
        best, peer = max(mine, key=lambda name: mine[name]), max(others, key=lambda name: others[name])
        ratio = mine[best] / others[peer]
        aim = AIM_DEEP if depth >= DEEP else AIM_SHALLOW
        verdict = f" (aim {aim}: {'reached' if ratio >= aim else 'NOT reached'})" if connections == 64 else ""
        one = mine["policy server, 1 worker"] / others[peer]
        verdicts.append(
            f"depth {depth}, {connections} connections: {best} {mine[best]:.0f} requests/s, the best peer ({peer}) "
            f"{others[peer]:.0f}: {ratio:.2f} times{verdict}; with one worker {one:.2f} times."
        )
    added = median(measured["policy server, 1 worker", 1], "p50_ms") - statistics.median(alone_ms)
    reached = "reached" if added <= AIM_ADDED_MS else "NOT reached"
    verdicts.append(f"depth {depth}: at one connection p50 is {added:.2f} ms above onnxruntime (aim 1 ms: {reached}).")
    return verdicts


def yardstick_verdicts(depth: int, sides: list[Side], measured: dict[tuple[str, int], list[Load]]) -> list[str]:
    """One worker of ours against what does not take part."""
    return [
        f"depth {depth}, {connections} connections: one worker does "
        f"{median(measured['policy server, 1 worker', connections], 'requests_per_s') / rate:.2f} times as many "
        f"requests/s as {side.name} ({rate:.0f})."
        for side in sides
        if not side.compared
        for connections in CONNECTIONS
        for rate in [median(measured[side.name, connections], "requests_per_s")]
    ]


if __name__ == "__main__":
    main()
