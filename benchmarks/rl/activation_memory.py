"""Peak memory and time of a deep trunk's forward and backward pass, by how it is checkpointed.

Every figure comes from a process of its own, because a process never tells a second peak from its first. Peak memory is
the process's largest resident size (``VmHWM``); what it had after building the network, before the first pass, is
taken off for the second figure, which still holds the gradients. Time is CPU time, so that other work on the machine
does not count. Sides take turns within a size.

    python benchmarks/rl/activation_memory.py [--depths 64,256,1024] [--batches 256,1024] [--passes 3] [--sweep]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: benchmarks/ is no package

WIDTH = 256
INPUT_SIZE = 13
STOCK = "torch.utils.checkpoint"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="64,256,1024")
    parser.add_argument("--batches", default="256,1024")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--sweep", action="store_true", help="more numbers of segments, to find the best")
    parser.add_argument("--worker", nargs=4, metavar=("DEPTH", "BATCH", "SEGMENTS", "PASSES"), help=argparse.SUPPRESS)
    parser.add_argument("--stock", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(*map(int, arguments.worker), stock=arguments.stock)
        return
    rows: list[dict[str, Any]] = []
    for depth in map(int, arguments.depths.split(",")):
        for batch in map(int, arguments.batches.split(",")):
            rows += compare(depth, batch, arguments.passes, sweep=arguments.sweep)
            print(json.dumps(rows[-1]), flush=True)
    report(rows, arguments.passes, sweep=arguments.sweep)


def compare(depth: int, batch: int, passes: int, *, sweep: bool) -> Iterator[dict[str, Any]]:
    """One row a side, each beside the one that keeps every activation."""
    from gated_serving.rl.networks import best_checkpoint_segments

    best = best_checkpoint_segments(depth)
    sides: list[tuple[str, int]] = [("none", 0), ("ours", best), (STOCK, best)]
    if sweep:
        others = {max(1, best // 4), max(1, best // 2), min(depth // 4, 2 * best), depth // 4} - {best}
        sides += [("ours", segments) for segments in sorted(others)]
    plain: dict[str, Any] = {}
    for side, segments in sides:
        found = run_worker(depth, batch, segments, passes, stock=side == STOCK)
        plain = plain or found
        yield {
            "depth": depth,
            "batch": batch,
            "checkpointing": side,
            "segments": segments,
            "peak MB": found["peak_mb"],
            "over the network MB": found["peak_mb"] - found["built_mb"],
            "share of peak": found["peak_mb"] / plain["peak_mb"],
            "CPU s a pass": found["cpu_s"],
            "times the time": found["cpu_s"] / plain["cpu_s"],
        }


def run_worker(depth: int, batch: int, segments: int, passes: int, *, stock: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker", *map(str, (depth, batch, segments, passes))]
    done = subprocess.run(command + ["--stock"] * stock, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def measure(depth: int, batch: int, segments: int, passes: int, *, stock: bool) -> None:
    """Prints one JSON object: sizes in MB, and the fastest pass after the first."""
    import torch

    from gated_serving.rl import networks, recomputation

    torch.set_num_threads(1)
    if stock:
        networks.run_recomputed = lambda x, blocks, _workspace: recomputation.run_checkpointed(x, blocks)
    trunk = networks.ResidualTrunk(
        networks.TrunkShape(input_size=INPUT_SIZE, depth=depth, width=WIDTH), checkpoint_segments=segments
    )
    x = torch.randn(batch, INPUT_SIZE)
    built_mb = _resident_mb("VmRSS")
    times: list[float] = []
    for _ in range(passes + 1):
        trunk.zero_grad()
        started = time.thread_time()
        trunk(x).square().mean().backward()
        times.append(time.thread_time() - started)
    print(json.dumps({"built_mb": built_mb, "peak_mb": _resident_mb("VmHWM"), "cpu_s": min(times[1:])}))


def _resident_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {field}: this benchmark needs Linux")


def report(rows: list[dict[str, Any]], passes: int, *, sweep: bool) -> None:
    from record import keep_record  # beside this folder

    verdicts: list[str] = []
    for row in rows:
        if row["checkpointing"] == "ours" and row["depth"] >= 256:
            share, place = (
                row["share of peak"],
                f"depth {row['depth']}, batch {row['batch']}, {row['segments']} segments",
            )
            kept = "met" if share <= 0.5 else "MISSED"
            verdicts.append(f"{place}: {share:.2f} of the peak without checkpointing (aim: at most 0.5): {kept}.")
    method = (
        f"Forward and backward pass of a residual trunk of width {WIDTH} on one thread, {passes + 1} passes a process, "
        "the fastest but the first. `ours` is the project's recomputation with a workspace; the other keeps the same "
        "inputs through torch's own function. Peak memory is the whole process's, so it includes Python and torch "
        "(about 220 MB), the weights and their gradients."
    )
    keep_record("rl-activation-memory" + "-sweep" * sweep, method=method, rows=rows, verdicts=verdicts)


if __name__ == "__main__":
    main()
