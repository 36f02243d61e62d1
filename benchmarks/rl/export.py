"""Exports one deep actor in three ways: time, extra memory, size and error, by depth.

- ``gated-serving``: the graph written directly, as ``export-policy`` does.
- ``torch dynamo`` and ``torch TorchScript``: ``torch.onnx.export``, with a free batch and an example of two.

Every export runs in a process of its own, which first imports everything and has torch's module in memory; only what
comes after counts. A round takes the sides one after the other. The files are then compared, all by the same code, with
the actor in float64 on random observations in batches of 1, 3 and 64. Weights are random; the last layer is scaled so
that actions spread over their range, since squashing hides errors at the ends.

    python benchmarks/rl/export.py [--rounds 2] [--depths 4,64,256,1024] [--width 256]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from gated_serving.rl.networks import GaussianActor, TrunkShape

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: benchmarks/ is no package

from policy_server.export.checkpoint import ACTOR_FILE, CHECKPOINT_FILE
from policy_server.export.pipeline import write_model
from policy_server.export.policy import OPSET, TrainedPolicy
from policy_server.export.residual_actor import read_residual_actor
from policy_server.export.verify import draw_observations, verify
from policy_server.manifest import Outputs, Precision, sha256

OBSERVATION_SIZE, GOAL_SIZE, ACTION_SIZE = 10, 3, 4
AIM_S, AIM_BYTES = 5.0, 1.5e9
TIMEOUT_S = 1800
OURS, DYNAMO, TORCHSCRIPT = "gated-serving", "torch dynamo", "torch TorchScript"


@dataclass
class Side:
    """One way to export, and what every round of it took."""

    times_s: list[float] = field(default_factory=list)
    extra_bytes: list[int] = field(default_factory=list)
    file_bytes: int = 0
    num_files: int = 0
    error: float = float("nan")


class Wrapped(nn.Module):
    """The actor with the two fields that a user's wrapper would have."""

    def __init__(self, actor: GaussianActor) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, observation: Tensor, desired_goal: Tensor) -> Tensor:
        return self.actor.act(torch.cat([observation, desired_goal], dim=1))


def main() -> None:
    """Measures, prints and keeps; with ``--side`` it is one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--depths", default="4,64,256,1024")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True, help="write benchmarks/results")
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        name, checkpoint, path = arguments.side
        print(json.dumps(export_once(name, Path(checkpoint), Path(path))))
        return
    rows: list[dict[str, Any]] = []
    verdicts: list[str] = []
    for depth in (int(depth) for depth in arguments.depths.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            sides = measure(Path(folder), depth, arguments.width, arguments.rounds)
        rows += [row_of(depth, name, side) for name, side in sides.items()]
        verdicts.append(verdict_of(depth, sides))
    method = (
        f"Residual actor of width {arguments.width}, {OBSERVATION_SIZE + GOAL_SIZE} inputs, {ACTION_SIZE} actions, "
        f"random weights, opset {OPSET}. {arguments.rounds} rounds, each side in a new process in every round, one "
        "after the other; 's' is the fastest round and 'each' all of them, in seconds of wall clock from the loaded "
        "checkpoint or module to the finished file. 'extra MB' is the largest growth of the process's memory "
        "meanwhile: the peak of resident memory less what was resident before, when torch's sides had their "
        "weights in memory already and the project's own had not. 'error' is the largest difference of an action "
        "from torch in float64 in units of half its range, on 68 random observations in batches of 1, 3 and 64, run by "
        "onnxruntime."
    )
    if arguments.keep:
        from record import keep_record

        keep_record("rl-export", method=method, rows=rows, verdicts=verdicts)
    else:
        print(json.dumps(rows, indent=1), *verdicts, sep="\n")


def measure(folder: Path, depth: int, width: int, rounds: int) -> dict[str, Side]:
    """All sides in turn, round after round, and the error of what they wrote last."""
    checkpoint = make_checkpoint(folder / "checkpoint", depth, width)
    policy = read_residual_actor(checkpoint)
    sides = {name: Side() for name in (OURS, DYNAMO, TORCHSCRIPT)}
    for number in range(rounds):
        for name, side in sides.items():
            output = folder / f"{name}-{number}".replace(" ", "-")
            output.mkdir()
            took = run_side(name, checkpoint, output / "policy.onnx")
            side.times_s.append(took["s"])
            side.extra_bytes.append(took["extra_bytes"])
            files = list(output.iterdir())
            side.num_files, side.file_bytes = len(files), sum(file.stat().st_size for file in files)
            if number == rounds - 1:
                side.error = error_of(output / "policy.onnx", policy)
            for file in files:
                file.unlink()
            print(f"depth {depth}, round {number + 1}: {name}: {took['s']:.1f} s", file=sys.stderr, flush=True)
    return sides


def run_side(name: str, checkpoint: Path, path: Path) -> dict[str, Any]:
    """One export in a process of its own."""
    process = subprocess.run(
        [sys.executable, __file__, "--side", name, str(checkpoint), str(path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    if process.returncode:
        raise RuntimeError(f"{name} failed:\n{process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def export_once(name: str, checkpoint: Path, path: Path) -> dict[str, Any]:
    """What a measured process does: prepares, then exports with clock and memory watched."""
    export = prepare(name, checkpoint, path)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, started = status_bytes("VmRSS"), time.perf_counter()
    export()
    took = time.perf_counter() - started
    return {"s": took, "extra_bytes": status_bytes("VmHWM") - before}


def prepare(name: str, checkpoint: Path, path: Path) -> Callable[[], object]:
    """Imports and loads what a side needs, and gives the export itself."""
    if name == OURS:
        return lambda: write_model(read_residual_actor(checkpoint).build_graph(Outputs.ACTION), path)
    module = Wrapped(load_actor(checkpoint)).eval()
    example = (torch.randn(2, OBSERVATION_SIZE), torch.randn(2, GOAL_SIZE))
    names: dict[str, Any] = {"input_names": ["observation", "desired_goal"], "output_names": ["action"]}
    names["opset_version"] = OPSET
    if name == DYNAMO:
        batch = torch.export.Dim("batch")
        shapes = ({0: batch}, {0: batch})
        return lambda: torch.onnx.export(module, example, path, dynamo=True, dynamic_shapes=shapes, **names)
    axes = {one: {0: "batch"} for one in (*names["input_names"], *names["output_names"])}
    return lambda: torch.onnx.export(module, example, path, dynamo=False, dynamic_axes=axes, **names)


def load_actor(checkpoint: Path) -> GaussianActor:
    """The training network with the checkpoint's weights."""
    sizes = json.loads((checkpoint / CHECKPOINT_FILE).read_text())["actor"]
    shape = TrunkShape(input_size=sizes["input_size"], depth=sizes["depth"], width=sizes["width"])
    actor = GaussianActor(shape, sizes["action_size"])
    actor.load_state_dict({name: torch.as_tensor(one) for name, one in load_file(checkpoint / ACTOR_FILE).items()})
    return actor


def make_checkpoint(folder: Path, depth: int, width: int) -> Path:
    """A checkpoint of random weights whose actions are spread over their range."""
    folder.mkdir()
    torch.manual_seed(0)
    shape = TrunkShape(input_size=OBSERVATION_SIZE + GOAL_SIZE, depth=depth, width=width)
    state = GaussianActor(shape, ACTION_SIZE).state_dict()
    tensors = {name: tensor.numpy() for name, tensor in state.items()}
    write_checkpoint(folder, tensors, depth, width)
    policy = read_residual_actor(folder)
    mean = np.asarray(policy.reference(draw_observations(policy, 64))["mean"], np.float64)
    tensors["mean.bias"] = (-mean.mean(axis=0) / mean.std(axis=0)).astype(np.float32)
    tensors["mean.weight"] = (tensors["mean.weight"] / mean.std(axis=0)[:, np.newaxis]).astype(np.float32)
    write_checkpoint(folder, tensors, depth, width)
    return folder


def write_checkpoint(folder: Path, tensors: dict[str, Any], depth: int, width: int) -> None:
    """Both files of a checkpoint."""
    save_file(tensors, folder / ACTOR_FILE)
    record = {
        "format": "gated-serving-rl",
        "format_version": 1,
        "environment": {"id": "random"},
        "observation_fields": [
            {"name": "observation", "shape": [OBSERVATION_SIZE]},
            {"name": "desired_goal", "shape": [GOAL_SIZE]},
        ],
        "action": {"shape": [ACTION_SIZE], "low": -1.0, "high": 1.0},
        "actor": {
            "architecture": "residual_gaussian",
            "input_size": OBSERVATION_SIZE + GOAL_SIZE,
            "action_size": ACTION_SIZE,
            "depth": depth,
            "width": width,
            "layer_norm_eps": 1e-6,
            "log_std_min": -5.0,
            "log_std_max": 2.0,
        },
        "files": {ACTOR_FILE: sha256(folder / ACTOR_FILE)},
    }
    (folder / CHECKPOINT_FILE).write_text(json.dumps(record))


def error_of(path: Path, policy: TrainedPolicy) -> float:
    """The largest error against float64; 2, the whole range, is allowed."""
    parity = verify(path, policy, outputs=Outputs.ACTION, precision=Precision.FP32, tolerance=2.0)
    return parity.largest_error


def status_bytes(name: str) -> int:
    """A line of this process's memory account."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def row_of(depth: int, name: str, side: Side) -> dict[str, Any]:
    """One line of the table."""
    return {
        "depth": depth,
        "exporter": name,
        "s": min(side.times_s),
        "each": " ".join(f"{one:.2f}" for one in side.times_s),
        "extra MB": statistics.median(side.extra_bytes) / 1e6,
        "files": side.num_files,
        "MB": side.file_bytes / 1e6,
        "error": side.error,
    }


def verdict_of(depth: int, sides: dict[str, Side]) -> str:
    """Against the others, and against what was aimed at."""
    ours = sides[OURS]
    ratios = ", ".join(
        f"{min(side.times_s) / min(ours.times_s):.0f} times as long with {name}"
        for name, side in sides.items()
        if side is not ours
    )
    text = f"depth {depth}: {min(ours.times_s):.2f} s; {ratios}"
    if depth == 1024:
        met = max(ours.times_s) <= AIM_S and max(ours.extra_bytes) <= AIM_BYTES
        text += (
            f"; aim of at most {AIM_S:g} s and {AIM_BYTES / 1e9:g} GB in every round "
            f"{'met' if met else 'missed'} ({max(ours.times_s):.2f} s, {max(ours.extra_bytes) / 1e9:.2f} GB)"
        )
    return text


if __name__ == "__main__":
    main()
