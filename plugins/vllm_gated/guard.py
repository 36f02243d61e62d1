"""A guard over every checkpoint that vLLM loads, of any architecture: nothing of it may be dropped in silence.

vLLM's parallel linear layers cut the part of a tensor that they expect before they compare shapes, so whatever lies
beyond is lost without a word; that is how gate rows in ``q_proj`` get lost. Here every such tensor is measured first.
Experts are ``expert_guard``'s business, gates and biases in tensors of their own ``unused_tensors``'.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.parameter import BlockQuantScaleParameter

NAME_ATTRIBUTE = "checkpoint_name"
"""Where ``unused_tensors`` leaves a tensor's name for the error message."""

_MARK = "_vllm_gated_guard"
_Measure = Callable[[Any, Any, Any], "tuple[int, int] | None"]


class DroppedRowsError(ValueError):
    """A checkpoint tensor is larger than what the model would use of it."""


def guard_layers() -> None:
    """Guards the loaders of vLLM's parallel linear layers; safe to call again.

    Raises:
        AttributeError: This vLLM has other loaders.
    """
    for layer_class, measure in _MEASURES.items():
        for method in _METHODS:
            _guard_method(layer_class, method, measure)


def require_guarded_layers() -> None:
    """Refuses to go on without the guard.

    Raises:
        RuntimeError: ``guard_layers`` did not run, or failed, in this process.
    """
    if not all(hasattr(getattr(cls, method), _MARK) for cls in _MEASURES for method in _METHODS):
        raise RuntimeError(
            "vLLM's weight loaders are not guarded in this process, so a gate could get lost unseen; see the log for "
            "why the vllm_gated plugin could not do so"
        )


def _guard_method(layer_class: type[nn.Module], method: str, measure: _Measure) -> None:
    load = layer_class.__dict__.get(method)
    if load is None:
        raise AttributeError(f"vLLM's {layer_class.__name__} has no {method}")
    if getattr(load, _MARK, False):
        return

    @functools.wraps(load)
    def guarded(self: Any, param: Any, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        shard = args[0] if args else kwargs.get("loaded_shard_id")
        measured = None if _is_opaque(param) else measure(self, param, shard)
        if measured is not None:
            _refuse_excess(self, loaded_weight, shard, *measured)
        return load(self, param, loaded_weight, *args, **kwargs)

    setattr(guarded, _MARK, True)
    setattr(layer_class, method, guarded)


def _refuse_excess(layer: Any, loaded_weight: Tensor, shard: Any, dim: int, expected: int) -> None:
    """Raises if ``loaded_weight`` has more than ``expected`` entries along ``dim``."""
    if loaded_weight.ndim <= dim or loaded_weight.shape[dim] <= expected:
        return
    found, shape = loaded_weight.shape[dim], list(loaded_weight.shape)
    expected_shape = [expected if index == dim else size for index, size in enumerate(shape)]
    kind = "rows" if dim == 0 else "columns" if loaded_weight.ndim == 2 else f"entries along dimension {dim}"
    raise DroppedRowsError(
        f"{_describe(layer, loaded_weight, shard)}, shape {shape}: has {found} {kind} where the model uses {expected}, "
        f"expected shape {expected_shape}. vLLM would drop the other {found - expected} in silence and answer wrong. "
        "Where they are a gate's, config.json must say so; see the gated-serving documentation for the formats."
    )


def _describe(layer: Any, loaded_weight: Tensor, shard: Any) -> str:
    """The tensor's name in the checkpoint, or else the layer's and the part of it."""
    name = getattr(loaded_weight, NAME_ATTRIBUTE, None)
    if name is not None:
        return name
    prefix = getattr(layer, "prefix", "") or type(layer).__name__
    if shard in ("q", "k", "v"):
        return f"{prefix.removesuffix('qkv_proj')}{shard}_proj"
    return prefix if shard is None else f"{prefix} (part {shard})"


def _is_opaque(param: Any) -> bool:
    """Whether its rows are not the checkpoint's: already this rank's, or as bitsandbytes or GGUF stores them."""
    flags = ("is_sharded_weight", "use_bitsandbytes_4bit", "use_bitsandbytes_8bit", "is_gguf_weight")
    return any(getattr(param, flag, False) for flag in flags) or nn.parameter.is_lazy(param)


def _measure_qkv(layer: Any, param: Any, shard: Any) -> tuple[int, int] | None:
    dim = getattr(param, "output_dim", None)
    sizes = {
        "q": layer.total_num_heads * layer.head_size,
        "k": layer.total_num_kv_heads * layer.head_size,
        "v": layer.total_num_kv_heads * layer.v_head_size,
    }
    return _measure_parts(layer, param, dim, list(sizes.values()) if shard is None else [sizes.get(shard)])


def _measure_merged(layer: Any, param: Any, shard: Any) -> tuple[int, int] | None:
    dim = getattr(param, "output_dim", None)
    if shard is None:
        return _measure_parts(layer, param, dim, list(layer.output_sizes))
    indices = shard if isinstance(shard, tuple) else (shard,)
    return _measure_parts(layer, param, dim, [layer.output_sizes[index] for index in indices])


def _measure_parts(layer: Any, param: Any, dim: Any, sizes: list[int | None]) -> tuple[int, int] | None:
    """Dimension and size on disk of parts with these many rows, for a parameter that may be packed or scale blocks."""
    known = [size for size in sizes if size is not None]
    if not isinstance(dim, int) or len(known) != len(sizes):
        return None
    return dim, sum(_size_on_disk(layer, param, dim, size) for size in known)


def _size_on_disk(layer: Any, param: Any, dim: int, size: int) -> int:
    if isinstance(param, BlockQuantScaleParameter):
        block = getattr(layer, "weight_block_size", None)
        return -(-size // block[0]) if block else size
    if getattr(param, "packed_dim", None) == dim:
        packed = -(-size // getattr(param, "packed_factor", 1))
        return int(packed) * (getattr(param, "marlin_tile_size", None) or 1)
    return size


def _measure_column(layer: Any, param: Any, _shard: Any) -> tuple[int, int] | None:
    return _measure_split(layer, param, getattr(param, "output_dim", None))


def _measure_row(layer: Any, param: Any, _shard: Any) -> tuple[int, int] | None:
    return _measure_split(layer, param, getattr(param, "input_dim", None))


def _measure_split(layer: Any, param: Any, dim: Any) -> tuple[int, int] | None:
    """For a parameter of which each rank holds an equal part."""
    return (dim, param.shape[dim] * layer.tp_size) if isinstance(dim, int) and dim < param.ndim else None


_METHODS = ("weight_loader", "weight_loader_v2")
_MEASURES: dict[type[nn.Module], _Measure] = {
    QKVParallelLinear: _measure_qkv,
    MergedColumnParallelLinear: _measure_merged,
    ColumnParallelLinear: _measure_column,
    RowParallelLinear: _measure_row,
}
