"""Which tensors a conversion writes, and how each is made from those on disk. Rows move; no value changes.

Legend: N query heads, D head dim, R gate rows, H hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from gated_serving.attention.config import Packing
from gated_serving.llm.checkpoints.errors import ConversionError
from gated_serving.llm.checkpoints.headers import ITEM_SIZES, TensorHeader
from gated_serving.llm.checkpoints.layout import Layout, expected_tensors

if TYPE_CHECKING:
    from torch import Tensor


class Action(Enum):
    """How an output tensor is made."""

    COPY = auto()
    REPACK = auto()
    """Packed ``q_proj`` to the other packed order."""
    TAKE_QUERIES = auto()
    TAKE_GATES = auto()
    JOIN = auto()
    """A query projection and a gate projection, or zeros where there is none, to a packed one."""


@dataclass(frozen=True, kw_only=True)
class OutputTensor:
    """One tensor of the result.

    Args:
        name: Its name in the result.
        shape: Its shape.
        dtype: safetensors' name of its dtype, that of its sources.
        action: How it is made.
        sources: The tensors on disk that it is made from.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    action: Action
    sources: tuple[TensorHeader, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of data."""
        return dataclasses.replace(self.sources[0], shape=self.shape).num_bytes

    @property
    def item_size(self) -> int:
        """Bytes an element."""
        return ITEM_SIZES[self.dtype]


def repacked_layout(layout: Layout, packing: Packing) -> Layout:
    """The same model with its gate's rows elsewhere.

    Raises:
        ConversionError: The gate does not fit that packing, or its bias has no place there.
    """
    gate = layout.gate
    if gate is None:
        raise ConversionError("an ungated model has no gate to pack")
    if gate.packing is packing:
        return layout
    bias = layout.qkv_bias if packing is Packing.SEPARATE else False
    if not gate.is_packed and gate.bias and not layout.qkv_bias:
        raise ConversionError(
            f"packing={str(packing)!r}: g_proj has a bias but q_proj has none (attention_bias=false), so a packed "
            "q_proj has no place for it; keep packing='separate'"
        )
    try:
        return dataclasses.replace(layout, gate=dataclasses.replace(gate, packing=packing, bias=bias))
    except ValueError as error:
        raise ConversionError(f"packing={str(packing)!r} does not fit this gate: {error}") from error


def plan_outputs(headers: Mapping[str, TensorHeader], source: Layout, target: Layout) -> list[OutputTensor]:
    """Every tensor of the result, layer by layer. What the model does not use (a tied head) is left out."""
    return list(_plan(headers, source, target))


def make_tensor(output: OutputTensor, read: Callable[[TensorHeader], Tensor], source: Layout, target: Layout) -> Tensor:
    """Reads what an output tensor is made from, and makes it.

    Args:
        output: What to make.
        read: Gives a tensor's data.
        source: The layout on disk.
        target: The layout of the result.
    """
    from gated_serving.attention.packing import join_rows, repack_rows, split_rows

    tensors = [read(header) for header in output.sources]
    if output.action is Action.COPY or source.gate is None or target.gate is None:
        return tensors[0]
    if output.action is Action.REPACK:
        return repack_rows(tensors[0], source.gate, source.shape, target.gate.packing)
    if output.action is Action.JOIN:
        queries = tensors[0]
        absent = queries.new_zeros((source.gate.num_gate_rows(source.shape), *queries.shape[1:]))
        return join_rows(queries, tensors[1] if len(tensors) > 1 else absent, target.gate, target.shape)
    queries, gates = split_rows(tensors[0], source.gate, source.shape)
    return (queries if output.action is Action.TAKE_QUERIES else gates).contiguous()


def _plan(headers: Mapping[str, TensorHeader], source: Layout, target: Layout) -> Iterator[OutputTensor]:
    assert source.gate is not None
    assert target.gate is not None
    for name, shape in expected_tensors(target).items():
        action, source_names = Action.COPY, [name]
        if source.gate.packing is not target.gate.packing and ".self_attn.q_proj." in name:
            if source.gate.is_packed:
                action = Action.REPACK if target.gate.is_packed else Action.TAKE_QUERIES
            else:
                action, source_names = Action.JOIN, [name, name.replace(".q_proj.", ".g_proj.")]
        elif source.gate.is_packed and ".self_attn.g_proj." in name:
            action, source_names = Action.TAKE_GATES, [name.replace(".g_proj.", ".q_proj.")]
        found = tuple(headers[source_name] for source_name in source_names if source_name in headers)
        if len({header.dtype for header in found}) > 1:
            raise ConversionError(f"{' and '.join(source_names)} differ in dtype, so they cannot be packed together")
        yield OutputTensor(name=name, shape=shape, dtype=found[0].dtype, action=action, sources=found)
