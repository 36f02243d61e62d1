"""What vLLM without this project's plugin does with a checkpoint, foreseen from tensor headers alone.

The rules are those of vLLM 0.32's and 0.33's weight loaders at one tensor-parallel rank: fused projections (q, k and
v; gate and up; experts) cut each part to the rows they expect before they look at its shape, biases without a home
are skipped, any other tensor without a home stops the load. A parameter that nothing filled stops it only
outside linear layers and embeddings, that is for norms: the others are exempt from that check.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from gated_serving.llm.checkpoints.headers import TensorHeader
from gated_serving.llm.checkpoints.layout import Layout, Shape, expected_tensors, is_derived, optional_tensors

NATIVELY_GATED = frozenset({
    "AfmoeForCausalLM", "BeamForCausalLM", "DoryForCausalLM", "HYV4ForCausalLM", "HrmTextForCausalLM",
    "K2HorizonForCausalLM", "KimiK3ForConditionalGeneration", "LagunaForCausalLM", "MuseGlimmerForCausalLM",
    "MuseGlimmerForConditionalGeneration", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration", "Step3p5ForCausalLM",
    "Step3p7ForConditionalGeneration",
})  # fmt: skip
"""Architectures whose attention gate vLLM's own class computes."""

_ROWS_ARE_CUT = re.compile(r"\.(q|k|v|gate|up)_proj\.(weight|bias)$")
_CUT = "only the first"
_COLUMNS_ARE_CUT = re.compile(r"\.(o|down)_proj\.weight$")


class Outcome(StrEnum):
    """What the user would get."""

    RIGHT = "right"
    WRONG = "wrong"
    """It loads, and answers what the model would not."""
    REFUSES = "refuses"


@dataclass(frozen=True)
class Prediction:
    """An outcome and why."""

    outcome: Outcome
    reason: str


def predict_load(layout: Layout, headers: Mapping[str, TensorHeader], *, ignored_gate: bool) -> Prediction:
    """What vLLM's own Qwen class does with these tensors.

    Args:
        layout: What that class asks for.
        headers: What the checkpoint holds.
        ignored_gate: Whether the config asks for a gate, which that class does not look at.
    """
    refusals: list[str] = []
    silent: list[str] = []
    for is_silent, effect in _effects(layout, headers):
        (silent if is_silent else refusals).append(effect)
    if refusals:
        return Prediction(Outcome.REFUSES, f"loading stops: {_first_of(refusals)}")
    silent.sort(key=lambda effect: not effect.startswith(_CUT))  # lost rows say more than skipped biases
    if silent:
        return Prediction(Outcome.WRONG, f"it loads without an error, but {_first_of(silent)}")
    if ignored_gate:
        return Prediction(Outcome.WRONG, "it ignores the gate that config.json asks for")
    return Prediction(Outcome.RIGHT, "its own class for this architecture uses every tensor")


def _effects(layout: Layout, headers: Mapping[str, TensorHeader]) -> Iterator[tuple[bool, str]]:
    """What each misfit leads to: whether it passes in silence, and in words what happens."""
    expected, unused = expected_tensors(layout), optional_tensors(layout)
    for name, header in headers.items():
        if is_derived(name) or name in unused:
            continue
        if name not in expected:
            is_bias = name.endswith(".bias")
            yield is_bias, f"{name} is skipped" if is_bias else f"it has no parameter for {name}"
        elif header.shape != expected[name]:
            cut = _describe_cut(name, header.shape, expected[name])
            misfit = f"{name} has the shape {list(header.shape)}, expected {list(expected[name])}"
            yield cut is not None, cut or misfit
    for name in expected:
        if name not in headers:
            is_noticed = name.endswith("norm.weight")
            yield not is_noticed, f"{name} is missing" if is_noticed else f"{name} is missing and stays uninitialised"


def _describe_cut(name: str, found: Shape, expected: Shape) -> str | None:
    """What is dropped in silence, or None when the shapes do not allow that."""
    if len(found) != len(expected):
        return None
    if _ROWS_ARE_CUT.search(name) and found[0] > expected[0] and found[1:] == expected[1:]:
        return f"{_CUT} {expected[0]} of {name}'s {found[0]} rows are kept"
    if _COLUMNS_ARE_CUT.search(name) and found[1] > expected[1] and found[0] == expected[0]:
        return f"{_CUT} {expected[1]} of {name}'s {found[1]} columns are kept"
    return None


def _first_of(reasons: Iterable[str]) -> str:
    first, *rest = reasons
    return f"{first} (and {len(rest)} more)" if rest else first
