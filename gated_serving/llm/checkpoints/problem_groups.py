"""A checkpoint's problems told in few lines: the same fault in every layer is one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gated_serving.llm.checkpoints.doctor import Problem

_TENSOR = "\0"  # stands for the tensor's name in a message
Part = str | frozenset[int]


@dataclass(frozen=True)
class _Group:
    """Like problems of tensors whose names differ in their numbers only.

    Args:
        problem: The first of them.
        message: Its message without the tensor's name.
        parts: The tensor's name, cut at its dots; numbers as the set of them, all combined with all.
    """

    problem: Problem
    message: str
    parts: tuple[Part, ...]

    def likeness(self, position: int) -> tuple[object, ...]:
        """What two groups must share to be one but for the numbers at ``position`` of the name."""
        rest = self.parts[:position] + self.parts[position + 1 :]
        return self.problem.kind, self.problem.expected, self.problem.found, self.message, len(self.parts), rest


def problem_lines(problems: Iterable[Problem]) -> list[str]:
    """The messages in order, those of like problems as one, such as ``model.layers.0-27.mlp... (28 tensors)``."""
    groups = [_group_of(problem) for problem in problems]
    longest = max((len(group.parts) for group in groups), default=0)
    for position in reversed(range(longest)):  # experts first, then the layers that lack the same experts
        groups = _merged(groups, position)
    return [_line(group) for group in groups]


def _group_of(problem: Problem) -> _Group:
    if problem.tensor is None:
        return _Group(problem, problem.message, ())
    parts = [frozenset({int(part)}) if part.isdecimal() else part for part in problem.tensor.split(".")]
    return _Group(problem, problem.message.replace(problem.tensor, _TENSOR), tuple(parts))


def _merged(groups: Sequence[_Group], position: int) -> list[_Group]:
    found: dict[tuple[object, ...], _Group] = {}
    merged: list[_Group | tuple[object, ...]] = []
    for group in groups:
        part = group.parts[position] if position < len(group.parts) else ""
        if isinstance(part, str):
            merged.append(group)
            continue
        likeness = group.likeness(position)
        if likeness not in found:
            merged.append(likeness)
            found[likeness] = group
            continue
        first = found[likeness]
        numbers = part.union(*(known for known in [first.parts[position]] if isinstance(known, frozenset)))
        parts = (*first.parts[:position], numbers, *first.parts[position + 1 :])
        found[likeness] = _Group(first.problem, first.message, parts)
    return [entry if isinstance(entry, _Group) else found[entry] for entry in merged]


def _line(group: _Group) -> str:
    count = 1
    for part in group.parts:
        count *= 1 if isinstance(part, str) else len(part)
    if count == 1:
        return group.problem.message
    name = ".".join(part if isinstance(part, str) else _ranges(sorted(part)) for part in group.parts)
    return f"{group.message.replace(_TENSOR, name)} ({count} tensors)"


def _ranges(numbers: Sequence[int]) -> str:
    """Such as ``0-3,5`` for 0, 1, 2, 3 and 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
