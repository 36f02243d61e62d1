"""The doctor: from config.json and tensor headers alone, what a checkpoint is and whether it can be served right."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gated_serving.attention.config import AttentionShape, GateConfig
from gated_serving.llm.checkpoints.errors import BrokenConfig
from gated_serving.llm.checkpoints.folder import find_folder, read_config
from gated_serving.llm.checkpoints.formats import Format, Recognised, recognise, stock_layout
from gated_serving.llm.checkpoints.headers import TensorHeader, read_headers
from gated_serving.llm.checkpoints.layout import Layout, expected_tensors, is_derived, optional_tensors, read_shape
from gated_serving.llm.checkpoints.stock_vllm import NATIVELY_GATED, Outcome, Prediction, predict_load
from gated_serving.llm.checkpoints.weight_files import find_mistral_files

OWN_FORMATS = (Format.GATED_QWEN3, Format.GATED_QWEN3_MOE)

_GATE_TENSOR = re.compile(
    r"(attn|attention)\w*\.(\w*_)?(g_proj|g_const|w_g|wg|gate|gate_proj|gate_linear|gating|output_gate)(\.\w+)?$"
    r"|\.(attn|attention)_(gate|gating)(_proj)?\.(weight|bias)$"
    r"|\.layers\.\d+\.(g_proj|gate|gating|output_gate)\.(weight|bias)$"
)
_QUERY_TENSOR = re.compile(r"\.q_proj\.weight$")
_DECODER_QUERY_TENSOR = re.compile(r"^(model\.)?layers\.\d+\.self_attn\.q_proj\.weight$")
_WEIGHT_TENSOR = re.compile(r"weight\w*$")
_FLOATS = ("F16", "BF16", "F32", "F64")
_FORESEEN = {
    "activation": Prediction(Outcome.REFUSES, "its class for this architecture computes no activation but silu"),
    "files": Prediction(Outcome.WRONG, "it loads other files than those that were examined"),
    "dtype": Prediction(Outcome.WRONG, "it takes the stored numbers for the weights themselves"),
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Args:
        kind: ``missing``, ``extra``, ``wrong_shape``, ``dtype`` (not one of floating-point weights), ``gate`` (a sign
            of a gate that the config does not explain), ``files`` (others would be loaded than were examined),
            ``activation`` (one that vLLM's class does not compute) or ``config``.
        tensor: The tensor's name; None for a fault of the config alone.
        expected: Its shape by the config, if it should be there.
        found: Its shape in the file, if it is there.
        message: One sentence, with what to do where that is known.
    """

    kind: str
    message: str
    tensor: str | None = None
    expected: tuple[int, ...] | None = None
    found: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """As the command prints it."""
        return {
            "kind": self.kind,
            "tensor": self.tensor,
            "expected": list(self.expected) if self.expected is not None else None,
            "found": list(self.found) if self.found is not None else None,
            "message": self.message,
        }


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the doctor found.

    Args:
        format: The format.
        architecture: The class that config.json names.
        gate: The gate, if there is one that this project can read.
        num_parameters: Elements of all tensors; a tied head counts once.
        stock_vllm: What vLLM without the plugin does, and why.
        servable: Whether this project serves it right.
        project: What this project does with it, in words.
        problems: All that stands against serving it.
        notes: Remarks that do not.
    """

    format: Format
    architecture: str
    gate: GateConfig | None
    num_parameters: int
    stock_vllm: Prediction
    servable: bool
    project: str
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As ``gated-serving doctor --json`` prints it."""
        return {
            "format": str(self.format),
            "architecture": self.architecture,
            "gate": gate_to_json(self.gate) if self.gate else None,
            "num_parameters": self.num_parameters,
            "stock_vllm": str(self.stock_vllm.outcome),
            "stock_vllm_reason": self.stock_vllm.reason,
            "servable": self.servable,
            "project": self.project,
            "problems": [problem.to_json() for problem in self.problems],
            "notes": list(self.notes),
        }


def examine(model: str | Path) -> Diagnosis:
    """Examines a checkpoint folder, or a repository in the hub's local cache.

    Raises:
        UnreadableCheckpoint: The folder, its config or its headers cannot be read.
    """
    folder = find_folder(model)
    config = read_config(folder)
    recognised = recognise(config)
    headers = read_headers(folder)
    problems = [Problem(kind="config", message=fault) for fault in recognised.faults]
    is_quantised = bool(config.get("quantization_config"))
    if recognised.layout is not None and not is_quantised:
        problems += compare(recognised.layout, headers)
    if recognised.format in (Format.UNGATED, Format.UNKNOWN):
        recognised, suspicions = _look_for_gate(config, recognised, headers)
        problems = suspicions + [problem for problem in problems if not _is_explained(problem, suspicions)]
    if not is_quantised:
        problems += _wrong_dtypes(recognised, headers)
    problems += _other_obstacles(folder, config, recognised)
    stock = _foresee(config, recognised, headers, problems)
    servable, project = _judge(recognised, stock, problems)
    return Diagnosis(
        format=recognised.format,
        architecture=recognised.architecture,
        gate=recognised.gate,
        num_parameters=_count_parameters(config, headers),
        stock_vllm=stock,
        servable=servable,
        project=project,
        problems=tuple(problems),
        notes=tuple(_remarks(recognised, headers, is_quantised=is_quantised)),
    )


def compare(layout: Layout, headers: Mapping[str, TensorHeader]) -> list[Problem]:
    """Every tensor that is missing, too many or of the wrong shape."""
    expected = expected_tensors(layout)
    allowed = expected | optional_tensors(layout)
    problems: list[Problem] = []
    for name, shape in expected.items():
        if name not in headers:
            message = f"{name} is missing, expected {list(shape)}"
            problems.append(Problem(kind="missing", message=message, tensor=name, expected=shape))
    for name, header in headers.items():
        if name in allowed:
            if header.shape != allowed[name]:
                message = f"{name} has the shape {list(header.shape)}, expected {list(allowed[name])}"
                if _QUERY_TENSOR.search(name):
                    message += _explain_query_rows(layout, header.shape[0] if header.shape else 0)
                problems.append(
                    Problem(
                        kind="wrong_shape",
                        message=message,
                        tensor=name,
                        expected=allowed[name],
                        found=header.shape,
                    )
                )
        elif layout.is_complete and not is_derived(name):
            message = f"{name} {list(header.shape)} has no place in this architecture"
            problems.append(Problem(kind="extra", message=message, tensor=name, found=header.shape))
    return problems


def gate_to_json(gate: GateConfig) -> dict[str, Any]:
    """The gate's fields that say what it computes and where it lies, without how it was initialised."""
    fields = {name.removeprefix("gate_"): value for name, value in gate.to_fields().items()}
    return {name: value for name, value in fields.items() if not name.startswith("init_")}


def _explain_query_rows(layout: Layout, rows: int) -> str:
    if layout.gate is None or not layout.gate.is_packed:
        return ""
    if rows == layout.shape.num_query_rows:
        return f": queries only, the {layout.gate.granularity} gate's rows are not there"
    other = _gates_by_extra_rows(layout.shape).get(rows - layout.shape.num_query_rows)
    return f": the rows of {other}, while config.json says {layout.gate.granularity}" if other else ""


def _gates_by_extra_rows(shape: AttentionShape) -> dict[int, str]:
    """Gates by the number of rows they add to ``q_proj``; where two agree, the one of the released models."""
    return {
        shape.num_kv_heads: "a headwise gate of keys or values",
        shape.num_kv_heads * shape.head_dim: "an elementwise gate of keys or values",
        shape.num_heads: "a headwise gate",
        shape.num_heads * shape.head_dim: "an elementwise gate",
    }


def _look_for_gate(
    config: Mapping[str, Any], recognised: Recognised, headers: Mapping[str, TensorHeader]
) -> tuple[Recognised, list[Problem]]:
    """Signs of a gate among the tensors of a checkpoint whose config does not speak of one that is known."""
    if recognised.architecture in NATIVELY_GATED:
        return replace(recognised, format=Format.UNKNOWN, faults=()), []
    suspicions = [*_lost_flags(config, recognised, headers), *_gate_tensors(headers)]
    return (replace(recognised, format=Format.UNKNOWN) if suspicions else recognised), suspicions


def _lost_flags(
    config: Mapping[str, Any], recognised: Recognised, headers: Mapping[str, TensorHeader]
) -> Iterator[Problem]:
    layout = recognised.layout
    shape = layout.shape if layout is not None else _guess_shape(config)
    if shape is None:
        return
    known = _gates_by_extra_rows(shape)
    query_tensor = _QUERY_TENSOR if layout is not None else _DECODER_QUERY_TENSOR
    for name, header in headers.items():
        if not query_tensor.search(name) or not header.shape:
            continue
        output = headers.get(name.replace(".q_proj.", ".o_proj."))
        if layout is None and output is not None and output.shape[-1:] != (shape.num_query_rows,):
            continue  # this family's heads are of another size than its config's usual fields say
        extra = header.shape[0] - shape.num_query_rows
        if extra in known:
            advice = ""
            if layout is not None:
                flag = f"{'headwise' if 'headwise' in known[extra] else 'elementwise'}_attn_output_gate"
                advice = (
                    f". If this is a released gated checkpoint or a finetune of one, set {flag}=true in config.json"
                )
            yield Problem(
                kind="gate",
                tensor=name,
                expected=(shape.num_query_rows, shape.hidden_size),
                found=header.shape,
                message=f"{name} has {header.shape[0]} rows, {shape.num_query_rows} for queries, {extra} more, "
                f"just those of {known[extra]}, of which config.json says nothing{advice}",
            )


def _guess_shape(config: Mapping[str, Any]) -> AttentionShape | None:
    """The attention of a family without a table, where its config has the usual fields and they mean the usual."""
    try:
        return read_shape(config, default_head_dim=None)
    except BrokenConfig:
        return None


def _wrong_dtypes(recognised: Recognised, headers: Mapping[str, TensorHeader]) -> Iterator[Problem]:
    """Weights that loading would turn into numbers as they are, where only a quantisation's scales give them sense."""
    for name, header in headers.items():
        is_checked = not is_derived(name) if recognised.layout is not None else _WEIGHT_TENSOR.search(name)
        if is_checked and header.dtype not in _FLOATS:
            yield Problem(
                kind="dtype",
                tensor=name,
                found=header.shape,
                message=f"{name} is stored as {header.dtype}, and config.json has no quantization_config that says "
                f"what its numbers mean; expected one of {', '.join(_FLOATS)}",
            )


def _other_obstacles(folder: Path, config: Mapping[str, Any], recognised: Recognised) -> Iterator[Problem]:
    """What stands against serving beside the tensors."""
    is_qwen = recognised.layout is not None
    mistral = find_mistral_files(folder)
    if mistral and (is_qwen or all(path.parent != folder for path in mistral)):
        yield Problem(
            kind="files",
            message=f"{mistral[0]}: vLLM loads files of this name in place of all others, which are those examined; "
            "move it out of the folder",
        )
    activation = config.get("hidden_act", "silu")
    if is_qwen and activation != "silu":
        yield Problem(kind="activation", message=f"hidden_act={activation!r}: vLLM's Qwen classes compute 'silu' only")


def _gate_tensors(headers: Mapping[str, TensorHeader]) -> Iterator[Problem]:
    for name, header in headers.items():
        if _GATE_TENSOR.search(name):
            yield Problem(
                kind="gate",
                tensor=name,
                found=header.shape,
                message=f"{name} {list(header.shape)} looks like an attention gate, of which config.json says nothing",
            )


def _is_explained(problem: Problem, suspicions: list[Problem]) -> bool:
    return problem.tensor is not None and any(problem.tensor == suspicion.tensor for suspicion in suspicions)


def _foresee(
    config: Mapping[str, Any],
    recognised: Recognised,
    headers: Mapping[str, TensorHeader],
    problems: list[Problem],
) -> Prediction:
    if recognised.format in OWN_FORMATS:
        return Prediction(Outcome.REFUSES, f"it does not know the model type {recognised.model_type!r}")
    for problem in problems:
        if problem.kind in _FORESEEN:
            return _FORESEEN[problem.kind]
    if recognised.architecture in NATIVELY_GATED:
        if problems:
            return Prediction(Outcome.REFUSES, f"loading stops: {problems[0].message}")
        return Prediction(Outcome.RIGHT, "its own class for this architecture computes the gate")
    asked = stock_layout(config, recognised)
    if asked is not None and not config.get("quantization_config"):
        return predict_load(asked, headers, ignored_gate=recognised.gate is not None or bool(recognised.faults))
    if recognised.gate is not None:
        return Prediction(Outcome.WRONG, "no class of its own computes this gate")
    if recognised.format is Format.UNKNOWN or recognised.faults:
        return Prediction(Outcome.WRONG, "there are signs of a gate that its class for this architecture does not know")
    if problems:
        return Prediction(Outcome.REFUSES, f"the tensors do not fit the config: {problems[0].message}")
    return Prediction(Outcome.RIGHT, "nothing suggests a gate, so its own class for this architecture serves it")


def _judge(recognised: Recognised, stock: Prediction, problems: list[Problem]) -> tuple[bool, str]:
    if problems:
        return False, "refuses it: config and tensors do not describe a model that can be served right"
    if recognised.format in (Format.OFFICIAL, *OWN_FORMATS):
        return True, "serves it with its vLLM plugin, gate and all"
    if stock.outcome is Outcome.RIGHT:
        return True, "leaves it to vLLM's own class"
    return False, "refuses it: it would be left to vLLM's own class, which does not serve it right"


def _count_parameters(config: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> int:
    repeated = {"lm_head.weight"} if config.get("tie_word_embeddings") else set[str]()
    return sum(header.num_elements for name, header in headers.items() if name not in repeated and not is_derived(name))


def _remarks(recognised: Recognised, headers: Mapping[str, TensorHeader], *, is_quantised: bool) -> Iterator[str]:
    dtypes = Counter(header.dtype for header in headers.values())
    if len(dtypes) > 1 and not is_quantised:
        parts = ", ".join(f"{count} in {dtype}" for dtype, count in dtypes.most_common())
        yield f"the tensors differ in dtype: {parts}; they are cast to one when served"
    if recognised.layout is None and not recognised.faults:
        yield f"the tensors of model type {recognised.model_type!r} were not checked: this project has no table of them"
    elif recognised.layout is not None and is_quantised:
        yield "the tensors of a quantised checkpoint were not checked; vLLM and its plugin check them while loading"
