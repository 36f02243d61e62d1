"""10,000 malformed binary-tensor bodies and 10,000 malformed WebSocket frames: no 5xx, no crash, memory flat.

Bodies and frames are mutations of good ones from a seeded generator (tests/hostile_frames.py). Schemathesis on the
OpenAPI runs in the tests and, with more examples, here.

    python benchmarks/policy/fuzz.py [--number 10000] [--seed 0] [--examples 200]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: benchmarks/ is no package
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from hostile_frames import broken_frames, send_frames, send_infer_bodies
from record import keep_record
from served_policies import RunningPolicyServer, running_policy_server

MEMORY_AIM_MB = 10.0


def main() -> None:
    """Runs, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=200, help="of schemathesis, each operation; 0 leaves it out")
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True, help="write benchmarks/results")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    verdicts: list[str] = []
    with tempfile.TemporaryDirectory() as name, running_policy_server(None, Path(name) / "log") as server:
        (worker,) = psutil.Process(server.process.pid).children()
        for target, attack in (("binary tensors", attack_tensors), ("WebSocket frames", attack_socket)):
            attack(server, 1000, arguments.seed + 1)  # warm: buffers, caches and compiled patterns are there
            before = worker.memory_info().rss / 1e6
            counts = attack(server, arguments.number, arguments.seed)
            grown = worker.memory_info().rss / 1e6 - before
            bad = sum(number for status, number in counts.items() if status.startswith(("5", "internal", "engine")))
            rows.append({"target": target, "sent": arguments.number, "answers": dict(counts), "MB grown": grown})
            verdicts.append(f"{target}: {bad} server errors (aim 0), memory {grown:+.1f} MB (aim {MEMORY_AIM_MB:g})")
        if arguments.examples:
            found = schemathesis_run(server, arguments.examples)
            rows.append({"target": "schemathesis on the OpenAPI", "sent": "", "answers": found, "MB grown": ""})
            verdicts.append(f"schemathesis: {found}")
        alive = worker.is_running() and server.process.poll() is None
        verdicts.append(f"the worker is {'the same process as at the start' if alive else 'GONE'}")
        verdicts.append(f"the log has {server.text().count('Traceback')} tracebacks")
    method = f"Seed {arguments.seed}; one worker, the shipped policy; mutations of good requests, 1,000 before to warm."
    if arguments.keep:
        keep_record("policy-fuzz", method=method, rows=rows, verdicts=verdicts)
    else:
        print(*rows, *verdicts, sep="\n")


def attack_tensors(server: RunningPolicyServer, number: int, seed: int) -> Counter[str]:
    """Answers by status."""
    return send_infer_bodies(server.port, number, seed)


def attack_socket(server: RunningPolicyServer, number: int, seed: int) -> Counter[str]:
    """Answers by kind: an action, or the code of the error."""
    return send_frames(server.port, broken_frames(number, seed))


def schemathesis_run(server: RunningPolicyServer, examples: int) -> str:
    """How many cases it made, and the server errors among them; 503 and 504 are what overload looks like."""
    program = str(Path(sys.executable).parent / "schemathesis")
    command = [program, "run", f"{server.address}/openapi.json", "--checks", "not_a_server_error"]
    options = ["--max-examples", str(examples), "--seed", "0", "--no-color", "--exclude-path-regex", "unload|rollback"]
    with tempfile.TemporaryDirectory() as folder:  # it leaves a cache where it runs
        result = subprocess.run([*command, *options], capture_output=True, text=True, check=False, cwd=folder)
    text = result.stdout
    cases = re.search(r"(\d+) generated", text)
    statuses = Counter(re.findall(r"\[(5\d\d)\] ", text))
    return f"{cases[1] if cases else '?'} cases, server errors by status: {dict(statuses) or 'none'}"


if __name__ == "__main__":
    main()
