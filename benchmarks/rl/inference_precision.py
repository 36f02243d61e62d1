"""One thread runs a deep actor in fp32, fp16 and int8: time an action, beside reading its weights from memory once.

At batch 1 every weight is read once an action, so the memory sets the limit: weights that no cache holds cannot be
multiplied faster than they are read. How fast this memory is read is measured in the same rounds, by a reduction over
a buffer larger than the caches.

Weights are random, drawn as training starts with them; speed does not depend on them. All files are made by the
exporter and opened by onnxruntime before the first round. In every round each side runs a burst, as a server does,
one side after the other; a burst is long against the time in which the caches take up a side's weights again, since a
control loop asks the same actor all the time. The time is the calling thread's processor time, which is all there is
with one thread; waiting for a core that others use is not counted, but their use of the memory is.

    python benchmarks/rl/inference_precision.py [--rounds 7] [--depths 64,1024] [--batches 1,8,64] [--width 256]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy reads it when it is imported; the read limit is one thread's

import numpy as np
import onnxruntime  # pyright: ignore[reportMissingTypeStubs]

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: benchmarks/ is no package

from random_actor import ACTION_SIZE, GOAL_SIZE, OBSERVATION_SIZE, write_checkpoint

from policy_server.export.precision import PrecisionReport, convert
from policy_server.export.residual_actor import read_residual_actor
from policy_server.export.verify import Session, draw_observations, error_units
from policy_server.manifest import Outputs, Precision

AIM_RATIO = 1.5
AIM_ACTIONS_PER_S = 100
NUM_OBSERVATIONS = 256
BURST_S = 1.0
READING = "reading"
READ_BYTES = 1 << 29


@dataclass
class Side:
    """One precision of one actor, or the reading of its weights."""

    name: str
    weight_bytes: int
    run: Callable[[int], object]
    report: PrecisionReport | None = None
    times_s: dict[int, list[float]] = field(default_factory=dict)


def main() -> None:
    """Measures, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--depths", default="64,1024")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True, help="write benchmarks/results")
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    rows: list[dict[str, Any]] = []
    verdicts: list[str] = []
    for depth in (int(depth) for depth in arguments.depths.split(",")):
        sides = measure(depth, arguments.width, batches, arguments.rounds)
        rows += rows_of(depth, batches, sides)
        verdicts += verdicts_of(depth, sides) if 1 in batches else []
    method = (
        f"Residual actor of width {arguments.width}, {OBSERVATION_SIZE + GOAL_SIZE} inputs, {ACTION_SIZE} actions, "
        f"random weights, written by export-policy's own graph writer; onnxruntime {onnxruntime.__version__} on one "
        f"thread. {arguments.rounds} rounds, every side a burst of {BURST_S} s in turn; a round counts by its "
        "median. 'ms' is the median round, 'fastest ms' the fastest, in the calling thread's processor time; "
        f"'read ms' is what reading the weights' bytes once takes at the pace at which {READ_BYTES >> 20} MiB are read "
        "in the same rounds, 'times the limit' the quotient of the two. 'layers in fp32' are those the "
        "exporter kept. 'error' is the largest difference from fp32 in units "
        f"of half the action's range, on {NUM_OBSERVATIONS} random observations."
    )
    if arguments.keep:
        from record import keep_record

        keep_record("rl-inference-precision", method=method, rows=rows, verdicts=verdicts)
    else:
        for row in rows:
            print(row)
        for verdict in verdicts:
            print("-", verdict)


def measure(depth: int, width: int, batches: list[int], rounds: int) -> list[Side]:
    """All precisions of one actor and the reading of each one's weights, alternating."""
    sides: list[Side] = []
    with tempfile.TemporaryDirectory() as name:
        policy = read_residual_actor(write_checkpoint(Path(name), depth, width))
        observations = draw_observations(policy, max(NUM_OBSERVATIONS, *batches))
        model = policy.build_graph(Outputs.ACTION)
        for precision in Precision:
            result = convert(model, precision, observations, output_scale=error_units(policy))
            file = Path(name) / f"{precision}.onnx"
            file.write_bytes(result.model.SerializeToString())
            session = open_session(file)
            run = runner(session, observations, batches)
            sides.append(Side(str(precision), result.report.weight_bytes, run, result.report))
            file.unlink()
    sides.append(Side(READING, READ_BYTES, reader(READ_BYTES)))
    for side in sides:
        for batch in batches:
            side.run(batch)
    for number in range(rounds):
        for batch in batches:
            for side in sides:
                if side.report is not None or batch == batches[0]:
                    side.times_s.setdefault(batch, []).append(burst(side, batch))
        print(f"depth {depth}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return sides


def burst(side: Side, batch: int) -> float:
    """Runs for a while; the median time of one run, in seconds of this thread's processor time."""
    times: list[float] = []
    end = time.perf_counter() + BURST_S
    while time.perf_counter() < end or len(times) < 3:
        started = time.thread_time()
        side.run(batch)
        times.append(time.thread_time() - started)
    return statistics.median(times)


def open_session(file: Path) -> Session:
    """One thread, and none that spins beside it."""
    runtime = cast("Any", onnxruntime)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    return runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def runner(session: Session, observations: dict[str, Any], batches: list[int]) -> Callable[[int], object]:
    """Runs the actor on a batch of this size."""
    inputs = {batch: {name: values[:batch] for name, values in observations.items()} for batch in batches}
    return lambda batch: session.run(None, inputs[batch])


def reader(num_bytes: int) -> Callable[[int], object]:
    """Reads so many bytes once; a maximum is the cheapest arithmetic that cannot be left out."""
    buffer = np.ones(num_bytes // 4, np.float32)
    return lambda _: buffer.max()


def rows_of(depth: int, batches: list[int], sides: list[Side]) -> list[dict[str, Any]]:
    """One row a batch and precision."""
    named = {side.name: side for side in sides}
    rows: list[dict[str, Any]] = []
    for batch in batches:
        plain_ms = 1e3 * statistics.median(named["fp32"].times_s[batch])
        for side in (side for side in sides if side.report is not None):
            ms = 1e3 * statistics.median(side.times_s[batch])
            read_ms = 1e3 * seconds_a_byte(sides) * side.weight_bytes
            assert side.report is not None
            rows.append(
                {
                    "depth": depth,
                    "batch": batch,
                    "precision": side.name,
                    "weights MB": side.weight_bytes / 1e6,
                    "ms": ms,
                    "fastest ms": 1e3 * min(side.times_s[batch]),
                    "read ms": read_ms,
                    "times the limit": ms / read_ms,
                    "actions/s": 1e3 * batch / ms,
                    "times fp32's speed": plain_ms / ms,
                    "error": side.report.error,
                    "layers in fp32": len(side.report.kept) if side.name != "fp32" else side.report.num_layers,
                }
            )
    return rows


def seconds_a_byte(sides: list[Side]) -> float:
    """The memory's pace, of the median round."""
    reading = next(side for side in sides if side.name == READING)
    return statistics.median(next(iter(reading.times_s.values()))) / reading.weight_bytes


def verdicts_of(depth: int, sides: list[Side]) -> list[str]:
    """Batch 1 against the aims."""
    named = {side.name: side for side in sides}
    verdicts: list[str] = []
    for name in ("fp16", "int8"):
        ms = 1e3 * statistics.median(named[name].times_s[1])
        ratio = ms / (1e3 * seconds_a_byte(sides) * named[name].weight_bytes)
        rate = 1e3 / ms
        verdicts.append(
            f"depth {depth}, batch 1, {name}: {ratio:.2f} times reading its weights once (aim {AIM_RATIO}: "
            f"{'reached' if ratio <= AIM_RATIO else 'NOT reached'}), {rate:.0f} actions/s (aim {AIM_ACTIONS_PER_S}: "
            f"{'reached' if rate >= AIM_ACTIONS_PER_S else 'NOT reached'})."
        )
    return verdicts


if __name__ == "__main__":
    main()
