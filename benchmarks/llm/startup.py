"""How long a server takes until it answers, stage by stage, and how fast it answers then.

Usage: ``python benchmarks/llm/startup.py [MODEL] [--rounds 2]``. MODEL is a checkpoint folder or a shipped model.

Every variant is started in turn, then all again, ``--rounds`` times, so that a busy minute hits none of them alone. A
stage lasts from its mark in the server's output to the next one; the end is the first answer of ``/health``. After
that, 1 and 8 clients ask for 64 tokens each. The first round of vLLM alone may also pay for caches that are not there
yet (the model class's description, compiled code); all rounds are kept in the JSON.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from gated_serving.llm.serving.machine import claim_port, find_vllm, num_physical_cores
from gated_serving.llm.serving.model_source import DEFAULT_MODEL, find_folder
from gated_serving.llm.serving.supervisor import Endpoint

RESULTS = Path(__file__).parent.parent / "results"
TIMEOUT_S = 600
NUM_TOKENS = 64
# The mark that ends a stage of vLLM's own server, and the stage.
VLLM_MARKS = (
    (r"version 0\.|vLLM API server version|non-default args", "API process: imports"),
    (r"Resolved architecture", "model class looked at, in a process of its own"),
    (r"\(EngineCore pid", "engine process: imports"),
    (r"\((?:VllmWorker|Worker)", "worker process: imports"),
    (r"Loading weights took", "weights"),
    (r"init engine \(", "profiling, KV cache, compiling, warm-up"),
)
OUR_MARK = re.compile(r"^\[ *[\d.]+ s\] (?P<stage>.+)$")


@dataclass(frozen=True)
class Variant:
    """One way to start a server."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Start:
    """One measured start."""

    stages: dict[str, float]
    ready_s: float
    tokens_per_s: dict[int, float]
    load_average: float


def variants(folder: Path) -> list[Variant]:
    """VLLM's own server as its documentation starts it, and this project's."""
    plain = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder))
    plain += ("--served-model-name", "model", "--host", "127.0.0.1")
    ours = (sys.executable, "-m", "gated_serving.cli", "serve", str(folder), "--served-model-name", "model")
    cache = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    return [
        Variant("vLLM alone", plain, cache),
        Variant("vLLM alone, eager", (*plain, "--enforce-eager"), cache),
        Variant("gated-serving serve", ours),
        Variant("gated-serving serve, compiled", (*ours, "--no-enforce-eager")),
    ]


def measure(variant: Variant) -> Start:
    """Start a server, time its stages, ask it, stop it."""
    port = claim_port("127.0.0.1", 0)
    endpoint = Endpoint(host="127.0.0.1", port=port)
    load, started = os.getloadavg()[0], time.monotonic()
    process = subprocess.Popen(
        [*variant.command, "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1", **variant.environment},
    )
    lines: list[tuple[float, str]] = []
    reader = threading.Thread(target=_read, args=(process, lines, started), daemon=True)
    reader.start()
    try:
        while not endpoint.is_healthy():
            if process.poll() is not None or time.monotonic() - started > TIMEOUT_S:
                raise RuntimeError(f"{variant.name} did not start:\n" + "\n".join(line for _, line in lines[-30:]))
            time.sleep(0.05)
        ready_s = time.monotonic() - started
        _ask(endpoint.url, 8)
        rates = {clients: _tokens_per_s(endpoint.url, clients) for clients in (1, 8)}
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
    return Start(stages=_stages(lines, ready_s), ready_s=ready_s, tokens_per_s=rates, load_average=load)


def _read(process: subprocess.Popen[str], lines: list[tuple[float, str]], started: float) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.monotonic() - started, line.rstrip()))


def _stages(lines: list[tuple[float, str]], ready_s: float) -> dict[str, float]:
    ours = [(at, match["stage"]) for at, line in lines if (match := OUR_MARK.match(line))]
    stages: dict[str, float] = {}
    if ours:  # our marks begin a stage
        stages["checks"] = ours[0][0]
        ends = [at for at, _ in ours[1:]] + [ready_s]
        for (begin, stage), end in zip(ours, ends, strict=True):
            stages[stage] = stages.get(stage, 0.0) + end - begin
        return stages
    last = 0.0  # vLLM's lines end one
    for pattern, stage in VLLM_MARKS:
        at = next((at for at, line in lines if at >= last and re.search(pattern, line)), None)
        if at is not None:
            stages[stage] = at - last
            last = at
    stages["API"] = ready_s - last
    return stages


def _ask(url: str, num_tokens: int) -> int:
    body = {"model": "model", "prompt": "import os\n\ndef ", "max_tokens": num_tokens, "temperature": 0}
    body["ignore_eos"] = True
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.load(answer)["usage"]["completion_tokens"]


def _tokens_per_s(url: str, clients: int) -> float:
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        total = sum(pool.map(lambda _: _ask(url, NUM_TOKENS), range(clients)))
    return total / (time.monotonic() - started)


WHAT_WAS_DONE = """\
The largest part of a start of vLLM alone is importing torch and vLLM, four times over: in the API process, in one that
looks at the model's class, in the engine's and in the worker's. `gated-serving serve` imports them once: it looks at
the class in place, and forks the engine, with the worker inside, from the API process. The next parts are compiling
and warming up; with eager execution and a KV-cache size that is known beforehand both fall away. Compare the token
rates for what eager execution costs."""


def report(model: str, rounds: int, starts: dict[str, list[Start]]) -> str:
    """A Markdown page: one table of totals, and each variant's stages."""
    lines = [
        f"# Start-up of `{model}`, {datetime.date.today().isoformat()}",
        "",
        f"vLLM {find_vllm().version}, {num_physical_cores()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}, {rounds} rounds, medians. Made by `benchmarks/llm/startup.py`.",
        "",
        "| variant | ready, s | each round, s | tokens/s, 1 client | tokens/s, 8 clients | load average before |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in starts.items():
        each = " ".join(f"{run.ready_s:.1f}" for run in runs)
        rates = [statistics.median(run.tokens_per_s[clients] for run in runs) for clients in (1, 8)]
        loads = " ".join(f"{run.load_average:.1f}" for run in runs)
        ready = statistics.median(run.ready_s for run in runs)
        lines.append(f"| {name} | {ready:.1f} | {each} | {rates[0]:.0f} | {rates[1]:.0f} | {loads} |")
    lines += ["", WHAT_WAS_DONE]
    for name, runs in starts.items():
        lines += ["", f"## {name}", "", "| stage | s |", "|---|---|"]
        for stage in runs[0].stages:
            lines.append(f"| {stage} | {statistics.median(run.stages.get(stage, 0.0) for run in runs):.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", help="a word of the variants' names", default="")
    arguments = parser.parse_args()
    chosen = [variant for variant in variants(find_folder(arguments.model)) if arguments.only in variant.name]
    starts: dict[str, list[Start]] = {variant.name: [] for variant in chosen}
    for number in range(arguments.rounds):
        for variant in chosen:
            start = measure(variant)
            starts[variant.name].append(start)
            print(f"round {number + 1}: {variant.name}: {start.ready_s:.1f} s", flush=True)
    name = find_folder(arguments.model).name
    page = report(name, arguments.rounds, starts)
    result = {
        "benchmark": "llm-startup",
        "date": datetime.date.today().isoformat(),
        "model": name,
        "vllm": find_vllm().version,
        "starts": {variant: [vars(run) for run in runs] for variant, runs in starts.items()},
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{result['date']}-llm-startup"
    path.with_suffix(".md").write_text(page)
    path.with_suffix(".json").write_text(json.dumps(result) + "\n")
    print(page)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
