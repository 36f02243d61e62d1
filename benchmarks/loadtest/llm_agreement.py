"""The same load from ``vllm bench serve`` and from ``gated-serving loadtest llm``, on the same running server.

A closed loop of 8 users with the same prompts, the same answer lengths and the same number of requests. In every round
each tool runs twice, in the order ABBA, so that a machine that grows slower or faster slows both alike; a first run of
each fills the server's prefix cache and counts for nothing. The server has one half of the cores and the clients have
the other. A figure is compared by the mean of its ratio within a round.

Three servers: one that sends its chunks by the clock, which is as fast in every round and needs few of them; vLLM with
the shipped model; and vLLM once more while a loop of the lowest priority keeps the clients' cores busy. Cores that
share caches or are threads of one core slow each other, so a tool that needs less processor time sees a faster server;
with the loop beside them both tools see the same one.

    python benchmarks/loadtest/llm_agreement.py [--rounds 8] [--requests 192] [--users 8]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: benchmarks/ is no package
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from fake_llm_server import fake_llm_server
from ratio import ratio_of
from record import keep_record
from serving import busy_cores, running_llm_server, split_cores

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "gated_serving" / "llm" / "pretrained" / "tiny-python"
AIM = 0.05
FIRST_CHUNK_S, CHUNK_S = 0.15, 0.01
CLOCK_ROUNDS, CLOCK_REQUESTS = 3, 48
# The build for CPUs has no "vllm" command that starts; this is what the command would call.
VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
TEXT = "def return class value list index name data test file line number text result item key self"
FIGURES = {
    "requests/s": ("request_throughput", "requests_per_s"),
    "output tokens/s": ("output_throughput", "output_tokens_per_s"),
    "mean TTFT ms": ("mean_ttft_ms", "ttft_ms"),
    "mean ITL ms": ("mean_itl_ms", "itl_ms"),
    "mean TPOT ms": ("mean_tpot_ms", "tpot_ms"),
}
CPU = "client CPU s"
AIMED = ("requests/s", "output tokens/s", "mean TTFT ms", "mean ITL ms")


def main() -> None:
    """Runs both, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="on vLLM")
    parser.add_argument("--requests", type=int, default=192, help="on vLLM")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True, help="write benchmarks/results")
    arguments = parser.parse_args()
    server_cores, client_cores = split_cores()
    rows: list[dict[str, Any]] = []
    verdicts: list[str] = []
    for name, server, beside, rounds, requests in (
        ("by the clock", clock_server, nullcontext, CLOCK_ROUNDS, CLOCK_REQUESTS),
        ("vLLM", running_llm_server, nullcontext, arguments.rounds, arguments.requests),
        ("vLLM, clients' cores busy", running_llm_server, busy_cores, arguments.rounds, arguments.requests),
    ):
        with server(server_cores) as url, beside(client_cores):
            os.sched_setaffinity(0, client_cores)
            measured = measure(url, rounds, Load(requests, arguments.users, arguments.output_tokens))
        os.sched_setaffinity(0, server_cores | client_cores)
        for tool, runs in measured.items():
            medians = {figure: statistics.median(run[figure] for run in runs) for figure in (*FIGURES, CPU)}
            rows.append({"server": name, "tool": tool, **medians})
        theirs, own = measured.values()
        ratios = {
            figure: ratio_of([run[figure] for run in own], [run[figure] for run in theirs])
            for figure in (*FIGURES, CPU)
        }
        rows.append({"server": name, "tool": "ratio", **{figure: ratio.mean for figure, ratio in ratios.items()}})
        spread = max(
            max(run["requests/s"] for run in runs) / min(run["requests/s"] for run in runs)
            for runs in measured.values()
        )
        verdicts += [f"{name}: {figure}: {ratios[figure].verdict(AIM)}" for figure in AIMED]
        verdicts.append(f"{name}: requests/s of one tool differ by up to {100 * (spread - 1):.0f} % between rounds")
    method = (
        f"{arguments.users} users in a closed loop, {arguments.output_tokens} tokens each, streamed chat; both tools "
        f"twice a round, in the order ABBA; medians, and the mean of the rounds' ratios. {CPU}: of all of a tool's "
        f"processes, in one run. Server on cores {sorted(server_cores)}, clients on {sorted(client_cores)}. "
        f"By the clock: a chunk after {1e3 * FIRST_CHUNK_S:g} ms, then one every {1e3 * CHUNK_S:g} ms; {CLOCK_ROUNDS} "
        f"rounds of {CLOCK_REQUESTS} prompts. "
        f"vLLM: the shipped model; {arguments.rounds} rounds of {arguments.requests} prompts."
    )
    if arguments.keep:
        keep_record("loadtest-llm-agreement", method=method, rows=rows, verdicts=verdicts)
    else:
        print(rows, verdicts)


@dataclass(frozen=True)
class Load:
    """What both send.

    Attributes:
        requests: How many, each with a prompt of its own.
        users: Who wait for their answers.
        output_tokens: Of each answer.
    """

    requests: int
    users: int
    output_tokens: int


def measure(url: str, rounds: int, load: Load) -> dict[str, list[dict[str, float]]]:
    """Every round of both tools on one server."""
    measured: dict[str, list[dict[str, float]]] = {"vllm bench serve": [], "gated-serving loadtest": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = write_prompts(folder / "prompts.jsonl", load.requests)
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            model = json.load(answer)["data"][0]["id"]
        tools = {
            "vllm bench serve": lambda: vllm_bench(url, model, prompts, folder / "bench.json", load),
            "gated-serving loadtest": lambda: ours(url, prompts, folder / "ours", load),
        }
        for tool in tools.values():
            tool()
        first, second = tools
        for number in range(rounds):
            runs: dict[str, list[dict[str, float]]] = {tool: [] for tool in tools}
            for tool in (first, second, second, first) if number % 2 else (second, first, first, second):
                runs[tool].append(tools[tool]())
            for tool, twice in runs.items():
                figures = {figure: statistics.mean(run[figure] for run in twice) for figure in (*FIGURES, CPU)}
                measured[tool].append(figures)
                print(f"round {number}: {tool}: {figures}", file=sys.stderr, flush=True)
    return measured


@contextmanager
def clock_server(cores: set[int]) -> Iterator[str]:
    """A server that sends its chunks by the clock."""
    with fake_llm_server() as server:
        os.sched_setaffinity(server.thread_id, cores)
        server.first_chunk_s, server.chunk_s = FIRST_CHUNK_S, CHUNK_S
        yield server.url


def write_prompts(path: Path, number: int) -> Path:
    """Random words, the same for both."""
    chosen = random.Random(0)
    lines = [json.dumps({"prompt": " ".join(chosen.choices(TEXT.split(), k=80))}) for _ in range(number)]
    path.write_text("\n".join(lines) + "\n")
    return path


def vllm_bench(url: str, model: str, prompts: Path, result: Path, load: Load) -> dict[str, float]:
    """One run of vLLM's own tool."""
    command = [
        *(sys.executable, "-c", VLLM_BENCH, "--backend", "openai-chat", "--base-url", url),
        *("--endpoint", "/v1/chat/completions", "--model", model, "--tokenizer", str(TOKENIZER)),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--disable-shuffle"),
        *("--custom-output-len", str(load.output_tokens), "--num-prompts", str(load.requests)),
        *("--max-concurrency", str(load.users), "--ignore-eos", "--temperature", "0"),
        *("--save-result", "--result-filename", str(result)),
    ]
    cpu_s = run(command)
    content = json.loads(result.read_text())
    assert content["completed"] == load.requests, content
    return {figure: float(content[theirs]) for figure, (theirs, _) in FIGURES.items()} | {CPU: cpu_s}


def ours(url: str, prompts: Path, output: Path, load: Load) -> dict[str, float]:
    """One run of this project's."""
    command = [
        *(sys.executable, "-m", "loadtest", "llm", url, "--prompts", str(prompts), "--warmup", "0"),
        *("--users", str(load.users), "--requests", str(load.requests), "--duration", "3600"),
        *("--output-tokens", str(load.output_tokens), "--no-ceiling", "--output", str(output)),
    ]
    cpu_s = run(command)
    figures = json.loads((output / "summary.json").read_text())["figures"]
    assert figures["num_ok"] == load.requests, figures
    return {
        figure: float(figures[name]["mean"] if isinstance(figures[name], dict) else figures[name])
        for figure, (_, name) in FIGURES.items()
    } | {CPU: cpu_s}


def run(command: list[str]) -> float:
    """Runs a tool; shows what it said if it fails. Returns the seconds of processor time that it took."""
    before = children_cpu_s()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[:6])} ... ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return children_cpu_s() - before


def children_cpu_s() -> float:
    """Processor time of all children that ended, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
