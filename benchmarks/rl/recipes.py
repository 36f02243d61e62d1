"""What the recipes reach: trains each with several seeds, and keeps a table and a picture of the learning curves.

Success is measured on 100 deterministic episodes that neither trained the policy nor chose its checkpoint. A run that
is finished already is read, and one that was interrupted goes on, so the script can be stopped and started again.

    python benchmarks/rl/recipes.py [fetch-reach ...] [--seeds 0 1 2] [--runs runs]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: benchmarks/ is no package

AIMS = {"fetch-reach": (0.20, 0.95, 40.0)}
"""Untrained success at most, trained success at least, minutes at most."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["fetch-reach"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the runs' folders are")
    arguments = parser.parse_args()
    for recipe in arguments.recipes:
        folders = [arguments.runs / f"{recipe}-seed{seed}" for seed in arguments.seeds]
        for folder, seed in zip(folders, arguments.seeds, strict=True):
            if not (folder / "result.json").exists():
                train(recipe, folder, seed)
        report(recipe, folders)


def train(recipe: str, folder: Path, seed: int) -> None:
    resume = ["--resume"] if (folder / "run.json").exists() else []
    command = [sys.executable, "-m", "gated_serving", "train-rl", recipe, "--output", str(folder), *resume]
    subprocess.run([*command, f"optimisation.seed={seed}"], check=True)


def report(recipe: str, folders: list[Path]) -> None:
    from record import keep_record

    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    rows = [table_row(result) for result in results]
    settings, last = results[0]["settings"], results[-1]
    verdicts = [
        f"trained {min(row['trained'] for row in rows):.0%} to {max(row['trained'] for row in rows):.0%}, untrained at "
        f"most {max(row['untrained'] for row in rows):.0%}."
    ]
    if aim := AIMS.get(recipe):
        reached = all(
            row["untrained"] <= aim[0] and row["trained"] >= aim[1] and row["minutes"] <= aim[2] for row in rows
        )
        verdicts.append(
            f"Aim: from at most {aim[0]:.0%} to at least {aim[1]:.0%} within {aim[2]:.0f} minutes: "
            + ("reached by every seed." if reached else "NOT reached by every seed.")
        )
    networks, machine = settings["networks"], last["machine"]
    path = keep_record(
        f"rl-{recipe}",
        method=f"`train-rl {recipe}` in {settings['environment']['id']}: actor of {networks['actor_depth']} layers, "
        f"critics of {networks['critic_depth']}, {networks['width']} wide. Success at "
        f"{'the end of the episode' if settings['evaluation']['success'] == 'end' else 'any step'}, deterministic, of "
        f"{last['final']['num_episodes']} unseen episodes; minutes on {machine['num_cores']} cores, evaluations "
        f"included, with {machine['num_threads']} threads and {machine['num_processes']} processes of environments.",
        rows=rows,
        verdicts=verdicts,
    )
    draw_curves(path.with_suffix(".png"), recipe, folders, settings["evaluation"]["success"])


def table_row(result: dict[str, Any]) -> dict[str, Any]:
    return {
        "seed": result["seed"],
        "untrained": result["untrained"]["success_rate"],
        "trained": result["final"]["success_rate"],
        "at any step": result["final"]["success_rate_any"],
        "distance at the end": result["final"]["final_distance"],
        "environment steps": result["num_environment_steps"],
        "updates": result["num_updates"],
        "minutes": result["seconds"] / 60,
    }


def draw_curves(path: Path, recipe: str, folders: list[Path], success: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for folder in folders:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found = [(line["environment_steps"], line["evaluation"]) for line in lines if "evaluation" in line]
        axes.plot(
            [steps for steps, _ in found], [evaluation["success_rate"] for _, evaluation in found],
            marker=".", label=folder.name,
        )  # fmt: skip
    axes.set(
        xlabel="environment steps", ylabel=f"success ({success})", ylim=(-0.03, 1.03), title=f"{recipe}, deterministic"
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
