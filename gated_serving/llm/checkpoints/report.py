"""The doctor's findings for a reader at a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from gated_serving.llm.checkpoints.doctor import Diagnosis, gate_to_json
from gated_serving.llm.checkpoints.problem_groups import problem_lines
from gated_serving.llm.checkpoints.stock_vllm import Outcome

_COLOURS = {Outcome.RIGHT: "green", Outcome.WRONG: "red", Outcome.REFUSES: "yellow"}
_MAX_PROBLEMS = 12


def render(diagnosis: Diagnosis) -> RenderableType:
    """A short table, the problems, and a coloured verdict."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    colour = _COLOURS[diagnosis.stock_vllm.outcome]
    table.add_row("format", escape(f"{diagnosis.format} ({diagnosis.architecture or 'no architecture named'})"))
    table.add_row("gate", escape(describe_gate(diagnosis)))
    table.add_row("parameters", f"{diagnosis.num_parameters:,} ({diagnosis.num_parameters / 1e6:.1f}M)")
    table.add_row("stock vLLM", f"[{colour}]{diagnosis.stock_vllm.outcome}[/]: {escape(diagnosis.stock_vllm.reason)}")
    table.add_row("this project", escape(diagnosis.project))
    parts: list[RenderableType] = [table]
    problems = problem_lines(diagnosis.problems)
    parts += [f"[red]problem[/] {escape(line)}" for line in problems[:_MAX_PROBLEMS]]
    if (num_hidden := len(problems) - _MAX_PROBLEMS) > 0:
        parts.append(f"[red]problem[/] and {num_hidden} more; --json lists them all")
    parts += [f"[yellow]note[/] {escape(note)}" for note in diagnosis.notes]
    verdict = "[bold green]can be served right[/]" if diagnosis.servable else "[bold red]cannot be served right[/]"
    return Group(*parts, verdict)


def describe_gate(diagnosis: Diagnosis) -> str:
    """The gate in one line, leaving out what is as usual."""
    if diagnosis.gate is None:
        return "none found"
    fields = gate_to_json(diagnosis.gate)
    usual = {"sharing": "per_head", "operation": "multiply", "activation": "sigmoid", "input": "hidden_states",
             "bias": False, "top_k_share": None}  # fmt: skip
    unusual = [f"{name} {value}" for name, value in fields.items() if name in usual and value != usual[name]]
    return ", ".join([f"{fields['granularity']} at {fields['position']}", f"packed {fields['packing']}", *unusual])
