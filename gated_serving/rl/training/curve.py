"""The learning curve as a picture: success and losses against environment steps, stages shaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

CURVE = "learning_curve.png"
_SHADES = ("#4c78a8", "#f2a541", "#59a14f")


def draw_curve(
    path: Path, lines: Sequence[dict[str, Any]], stages: Sequence[tuple[str, int, int]], *, title: str
) -> None:
    """Writes the picture; a process that is killed meanwhile leaves the one before.

    Args:
        path: The PNG file.
        lines: Of ``metrics.jsonl``.
        stages: Each with the environment steps at which it begins and ends.
        title: What is written above.
    """
    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, and without matplotlib's global state
    success, critic, actor = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    evaluations = [line for line in lines if "evaluation" in line]
    steps = [line["environment_steps"] for line in evaluations]
    for key, label, style in (
        ("success_rate_end", "at the end of the episode", "-"),
        ("success_rate_any", "at any step", "--"),
    ):
        success.plot(steps, [line["evaluation"][key] for line in evaluations], style, marker=".", label=label)
    exploring = [line for line in lines if line.get("training_success") is not None]
    success.plot(
        [line["environment_steps"] for line in exploring],
        [line["training_success"] for line in exploring],
        color="0.6", linewidth=1, label="while exploring, at the end",
    )  # fmt: skip
    success.set(ylabel="success rate", ylim=(-0.03, 1.12), title=title)
    for axes, key, label in ((critic, "critic_loss", "critic loss"), (actor, "actor_loss", "actor loss")):
        points = [(line["environment_steps"], line[key]) for line in lines if key in line]
        axes.plot([step for step, _ in points], [value for _, value in points], color="0.2", linewidth=1)
        axes.set_ylabel(label)
    for axes in (success, critic, actor):
        _shade(axes, stages, name=axes is success)
        axes.grid(alpha=0.3)
    success.legend(loc="center right", fontsize="small")
    actor.set(xlabel="environment steps", xlim=(0, stages[-1][2]))
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=110, format="png", metadata={"Software": None})
    partial.replace(path)


def _shade(axes: Axes, stages: Sequence[tuple[str, int, int]], *, name: bool) -> None:
    for (stage, begin, end), colour in zip(stages, _SHADES, strict=False):
        axes.axvspan(begin, end, color=colour, alpha=0.10, linewidth=0)
        if name:
            axes.text(begin, 1.11, f" {stage}", color=colour, fontsize="small", va="top")
