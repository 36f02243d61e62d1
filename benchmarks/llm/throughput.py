"""Output tokens a second: gated models against the same shape ungated in vLLM, and against transformers.

Each side runs in a process of its own, all are loaded before the first round, and they take turns: every round runs
the same requests on each side, one after the other, while the rest sleep. Weights are random, prompts too, and every
request produces a fixed number of tokens, so all sides do the same work.

    python benchmarks/llm/throughput.py [--rounds 25] [--sides stock,headwise,...] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: benchmarks/ is no package

SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
GATES: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "headwise": {"gate_granularity": "headwise"},
    "elementwise": {"gate_granularity": "elementwise"},
}
CONCURRENCIES = (1, 8, 32)
AIMS = {"headwise": 0.97, "elementwise": 0.93}
STATIC_BATCHES = (8, 32)
DTYPE = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests that are sent at once: prompt lengths and output lengths in tokens."""

    name: str
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    batch: int = 0

    @property
    def num_output_tokens(self) -> int:
        return sum(self.outputs)


class Side:
    """A worker process that holds one model and runs loads when told to."""

    def __init__(self, name: str, engine: str, folder: Path) -> None:
        self.name = name
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "KMP_BLOCKTIME": "1",  # waiting threads of the sides whose turn it is not must not spin
        }
        if name == "stock":
            environment["VLLM_PLUGINS"] = ""
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", engine, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(Path(tempfile.gettempdir()) / f"throughput-{name}.log").open("w"),
            text=True,
            env=environment,
        )

    def wait_until_loaded(self) -> None:
        self._read()

    def run(self, load: Load) -> float:
        """Seconds that the load took."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(vars(load)) + "\n")
        self._process.stdin.flush()
        return self._read()["seconds"]

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        raise SystemExit(f"the side {self.name!r} ended; see throughput-{self.name}.log in {tempfile.gettempdir()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--quick", action="store_true", help="short outputs, two rounds: shows that it runs")
    parser.add_argument("--worker", nargs=2, metavar=("ENGINE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve_loads(*arguments.worker)
        return
    rounds, scale = (2, 8) if arguments.quick else (arguments.rounds, 64)
    loads = [
        Load(name=f"{n} at once", prompts=(64,) * n, outputs=(scale * (4 if n == 1 else 1),) * n) for n in CONCURRENCIES
    ]
    with tempfile.TemporaryDirectory() as root:
        sides = [start(name, "vllm", Path(root)) for name in GATES]
        peer = Side("transformers", "transformers", Path(root) / "headwise")
        for side in (*sides, peer):
            side.wait_until_loaded()
        rows = compare_gated_with_stock(sides, loads, rounds)
        mixed_rows = compare_with_transformers(sides[1], peer, min(rounds, 3), scale)
        for side in (*sides, peer):
            side.close()
    report(rows, mixed_rows, rounds=rounds, scale=scale, quick=arguments.quick)


def start(name: str, engine: str, root: Path) -> Side:
    make_model(root / name, GATES[name])
    return Side(name, engine, root / name)


def compare_gated_with_stock(sides: list[Side], loads: list[Load], rounds: int) -> list[dict[str, Any]]:
    """One row a side and load: median output tokens/s, and the median over rounds of its ratio to stock's.

    A neighbour's load only ever slows a round down, so the fastest rounds are compared as well.
    """
    rows: list[dict[str, Any]] = []
    for load in loads:
        for side in sides:
            side.run(load)  # warm-up: compilation, caches
        rates: dict[str, list[float]] = {side.name: [] for side in sides}
        for number in range(rounds):
            for side in sides if number % 2 else sides[::-1]:
                rates[side.name].append(load.num_output_tokens / side.run(load))
        for side in sides:
            ratios = [mine / stock for mine, stock in zip(rates[side.name], rates["stock"], strict=True)]
            rows.append(
                {
                    "requests": load.name,
                    "model": side.name,
                    "output tokens/s": statistics.median(rates[side.name]),
                    "ratio to stock": statistics.median(ratios),
                    "95 % interval": "{:.3f} to {:.3f}".format(*median_interval(ratios)),
                    "ratio of the fastest rounds": max(rates[side.name]) / max(rates["stock"]),
                }
            )
    return rows


def median_interval(values: list[float], num_resamples: int = 4000) -> tuple[float, float]:
    """Where the median lies with a probability of 95 %, by bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(num_resamples))
    return medians[num_resamples // 40], medians[-num_resamples // 40]


def compare_with_transformers(gated: Side, peer: Side, rounds: int, scale: int) -> list[dict[str, Any]]:
    """32 requests of mixed lengths: vLLM's continuous batching against static batches of transformers' generate."""
    rng = random.Random(0)
    prompts = tuple(rng.randint(16, 256) for _ in range(32))
    outputs = tuple(rng.randint(scale // 4, 2 * scale) for _ in range(32))
    runs = [(gated, Load(name="vllm, continuous", prompts=prompts, outputs=outputs))]
    runs += [
        (peer, Load(name=f"transformers, batches of {batch}", prompts=prompts, outputs=outputs, batch=batch))
        for batch in STATIC_BATCHES
    ]
    rates: dict[str, list[float]] = {load.name: [] for _, load in runs}
    for number in range(rounds + 1):
        for side, load in runs:
            rate = load.num_output_tokens / side.run(load)
            if number:
                rates[load.name].append(rate)
    best_peer = max(statistics.median(rates[load.name]) for side, load in runs if side is peer)
    return [
        {
            "requests": "32 of mixed lengths",
            "engine": load.name,
            "output tokens/s": statistics.median(rates[load.name]),
            "ratio to the best static batch": statistics.median(rates[load.name]) / best_peer,
        }
        for _, load in runs
    ]


def report(rows: list[dict[str, Any]], mixed: list[dict[str, Any]], *, rounds: int, scale: int, quick: bool) -> None:
    from record import keep_record

    shape = ", ".join(f"{key} {value}" for key, value in SHAPE.items())
    name = "llm-throughput" + ("-quick" if quick else "")
    verdicts = []
    for side, aim in AIMS.items():
        for row in rows:
            if row["model"] == side:
                reached = "reached" if row["ratio to stock"] >= aim else "NOT reached"
                verdicts.append(
                    f"{side}, {row['requests']}: {row['ratio to stock']:.3f} of stock (aim {aim}: {reached})."
                )
    keep_record(
        name,
        method=f"vLLM offline engines side by side, {DTYPE}, eager off; {shape}; prompts of 64 tokens, {scale} output "
        f"tokens each (a single request {4 * scale}); median of {rounds} rounds, sides alternating in every round. "
        "'stock' is vLLM's own Qwen3 without the plugin.",
        rows=rows,
        verdicts=verdicts,
    )
    ratio = mixed[0]["ratio to the best static batch"]
    keep_record(
        name + "-transformers",
        method=f"The same headwise model, {DTYPE}; 32 requests, prompts of 16 to 256 tokens, outputs of "
        f"{scale // 4} to {2 * scale}; static batches are padded and run until their longest request is done.",
        rows=mixed,
        verdicts=[f"{ratio:.2f} times the best static batch (aim 2: {'reached' if ratio >= 2 else 'NOT reached'})."],
    )


def make_model(folder: Path, gate: dict[str, Any] | None) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from gated_serving.llm.models import GatedQwen3Config, GatedQwen3ForCausalLM

    torch.manual_seed(0)
    model = (
        Qwen3ForCausalLM(Qwen3Config(**SHAPE))
        if gate is None
        else GatedQwen3ForCausalLM(GatedQwen3Config(**SHAPE, **gate))
    )
    model.bfloat16().save_pretrained(folder)


def serve_loads(engine: str, folder: str) -> None:
    """The worker: loads the model, then runs a load a line of its input until that ends."""
    run = vllm_runner(folder) if engine == "vllm" else transformers_runner(folder)
    print("RESULT {}", flush=True)
    for line in sys.stdin:
        load = Load(**json.loads(line))
        start = time.perf_counter()
        run(load)
        print("RESULT", json.dumps({"seconds": time.perf_counter() - start}), flush=True)


def random_prompts(load: Load) -> list[list[int]]:
    rng = random.Random(sum(load.prompts))
    return [[rng.randrange(SHAPE["vocab_size"]) for _ in range(length)] for length in load.prompts]


def vllm_runner(folder: str) -> Any:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder, skip_tokenizer_init=True, dtype=DTYPE, enable_prefix_caching=False, max_model_len=1024,
        max_num_seqs=32,
    )  # fmt: skip

    def run(load: Load) -> None:
        parameters = [
            SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0, detokenize=False)
            for count in load.outputs
        ]
        prompts: Any = [{"prompt_token_ids": tokens} for tokens in random_prompts(load)]
        results = llm.generate(prompts, parameters, use_tqdm=False)
        produced = sum(len(result.outputs[0].token_ids) for result in results)
        assert produced == load.num_output_tokens, f"{produced} tokens instead of {load.num_output_tokens}"

    return run


def transformers_runner(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    import gated_serving  # noqa: F401  # registers the family

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def run(load: Load) -> None:
        prompts = random_prompts(load)
        for first in range(0, len(prompts), load.batch):
            batch, outputs = prompts[first : first + load.batch], load.outputs[first : first + load.batch]
            longest = max(map(len, batch))
            tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
            model.generate(
                tokens, attention_mask=mask, max_new_tokens=max(outputs), min_new_tokens=max(outputs), do_sample=False,
                pad_token_id=0, eos_token_id=None,
            )  # fmt: skip

    return run


if __name__ == "__main__":
    main()
