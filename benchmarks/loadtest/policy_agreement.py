"""The same closed loop from wrk and from ``gated-serving loadtest policy``, on the same running policy server.

Two policies: the shipped one of 4 layers, which answers in a fraction of a millisecond, and one of 64 layers with
random weights. One observation, JSON, one thread of wrk and one process of the generator, over 1, 4, 16 and 64
connections. In every round each tool runs twice, in the order ABBA, so that a machine that grows slower or faster slows
both alike. The server has one half of the cores and the clients the other. The generator's own ceiling stands beside:
near it the rate is the generator's.

The shipped policy is measured once more while a loop of the lowest priority keeps the clients' cores busy, so that the
server is as fast beside a client that needs little processor time as beside one that needs more.

    python benchmarks/loadtest/policy_agreement.py [--rounds 4] [--seconds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: benchmarks/ is no package

from random_actor import export_actor
from ratio import ratio_of
from record import keep_record
from serving import busy_cores, running_policy_server, split_cores
from wrk import check_wrk, load

ROOT = Path(__file__).parents[2]
CONNECTIONS = (1, 4, 16, 64)
OBSERVATION = {
    "observation": [1.3, 0.7, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    "desired_goal": [1.4, 0.8, 0.6],
}
AIM = 0.1
NEAR_CEILING = 0.8
DEEP = 64


def main() -> None:
    """Runs both, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True, help="write benchmarks/results")
    arguments = parser.parse_args()
    check_wrk()
    server_cores, client_cores = split_cores()
    rows: list[dict[str, Any]] = []
    verdicts: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "observations.jsonl").write_text(json.dumps(OBSERVATION) + "\n")
        repository = folder / "policies"
        export_actor(repository, DEEP)
        for what, policy, options, beside in (
            ("the shipped policy", "fetch-reach", (), nullcontext),
            ("the shipped policy, clients' cores busy", "fetch-reach", (), busy_cores),
            (f"{DEEP} layers", "actor", (str(repository),), nullcontext),
        ):
            with running_policy_server(server_cores, *options) as url, beside(client_cores):
                all_cores = os.sched_getaffinity(0)
                os.sched_setaffinity(0, client_cores)
                target = Target(url, policy, folder)
                for connections in CONNECTIONS:
                    found, verdict = compare(target, connections, arguments.rounds, arguments.seconds)
                    rows += [{"policy": what, "connections": connections, **row} for row in found]
                    verdicts.append(f"{what}, {connections} connections: {verdict}")
                os.sched_setaffinity(0, all_cores)
    method = (
        f"JSON, closed loops of {arguments.seconds:g} s, {arguments.rounds} rounds, both tools twice a round, in the "
        f"order ABBA; medians, and the mean of the rounds' ratios. Server on cores {sorted(server_cores)}, clients on "
        f"{sorted(client_cores)}."
    )
    if arguments.keep:
        keep_record("loadtest-policy-agreement", method=method, rows=rows, verdicts=verdicts)
    else:
        print(rows, verdicts)


@dataclass(frozen=True)
class Target:
    """Whom both ask.

    Attributes:
        url: Of the server.
        policy: Its name there.
        folder: With the observation, and for what the generator leaves behind.
    """

    url: str
    policy: str
    folder: Path


def compare(target: Target, connections: int, rounds: int, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Rows of both tools for so many connections, and what they come to."""
    measured: list[tuple[dict[str, float], dict[str, float]]] = []
    for number in range(rounds):
        wrks: list[dict[str, float]] = []
        owns: list[dict[str, float]] = []
        for is_wrk in (True, False, False, True) if number % 2 else (False, True, True, False):
            if is_wrk:
                wrks.append(by_wrk(target, connections, seconds))
            else:
                owns.append(ours(target, connections, seconds, ceiling=False))
        measured.append((mean_of(wrks), mean_of(owns)))
        print(f"{target.policy}, {connections} connections: {measured[-1]}", file=sys.stderr, flush=True)
    ceiling = ours(target, connections, 1.0, ceiling=True)["ceiling"]
    theirs, own = (
        {
            figure: statistics.median(side[place][figure] for side in measured)
            for figure in ("requests/s", "p50 ms", "p99 ms")
        }
        for place in (0, 1)
    )
    ratio = ratio_of([own["requests/s"] for _, own in measured], [theirs["requests/s"] for theirs, _ in measured])
    of_ceiling = own["requests/s"] / ceiling
    near = ", at the generator's ceiling" if of_ceiling > NEAR_CEILING else ""
    rows = [{"tool": "wrk", **theirs, "of the ceiling": ""}, {"tool": "loadtest", **own, "of the ceiling": of_ceiling}]
    return rows, f"requests/s {ratio.verdict(AIM)}{near}"


def mean_of(runs: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure."""
    return {figure: statistics.mean(run[figure] for run in runs) for figure in runs[0]}


def by_wrk(target: Target, connections: int, seconds: float) -> dict[str, float]:
    """One run of wrk."""
    path = f"{target.url}/v1/policies/{target.policy}/act"
    found = load(path, {"observation": OBSERVATION}, connections=connections, seconds=seconds)
    assert not found.errors, found
    return {"requests/s": found.requests_per_s, "p50 ms": found.p50_ms, "p99 ms": found.p99_ms}


def ours(target: Target, connections: int, seconds: float, *, ceiling: bool) -> dict[str, float]:
    """One run of this project's."""
    folder = target.folder
    command = [
        *(
            sys.executable,
            "-m",
            "loadtest",
            "policy",
            target.url,
            "--users",
            str(connections),
            "--duration",
            str(seconds),
        ),
        *("--warmup", "0", "--observations", str(folder / "observations.jsonl"), "--output", str(folder / "out")),
        "--ceiling" if ceiling else "--no-ceiling",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}")
    content = json.loads((folder / "out" / "summary.json").read_text())
    figures = content["figures"]
    assert not figures["num_failed"], figures
    return {
        "requests/s": figures["requests_per_s"],
        "p50 ms": figures["latency_ms"]["p50"],
        "p99 ms": figures["latency_ms"]["p99"],
        "ceiling": content["generator"]["ceiling_per_s"] or 0.0,
    }


if __name__ == "__main__":
    main()
