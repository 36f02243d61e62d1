"""The guard for mixtures of experts: an expert's tensor that is larger than its place is refused by name and shape.

vLLM gives each rank its share of whatever rows a tensor has; a remainder falls away in silence, and any other excess
ends in an error of torch that names no tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from vllm_gated.guard import NAME_ATTRIBUTE, DroppedRowsError

_MARK = "_vllm_gated_expert_guard"
_CURRENT = "_vllm_gated_checkpoint_tensor"


def guard_experts() -> None:
    """Guards the loader of vLLM's expert weights; safe to call again.

    Raises:
        AttributeError: This vLLM has another loader.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    load, load_all = RoutedExperts.weight_loader, RoutedExperts.load_weights
    if getattr(load, _MARK, False):
        return

    @functools.wraps(load)
    def weight_loader(
        self: Any, param: Any, loaded_weight: Tensor, weight_name: str, shard_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(self.quant_method, UnquantizedFusedMoEMethod) and "bias" not in weight_name:
            _refuse_excess(self, loaded_weight, shard_id)
        return load(self, param, loaded_weight, weight_name, shard_id, *args, **kwargs)

    @functools.wraps(load_all)
    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
        yield from load_all(self, _noted(self, weights))

    setattr(weight_loader, _MARK, True)
    RoutedExperts.weight_loader = weight_loader
    RoutedExperts.load_weights = load_weights


def _noted(layer: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Keeps the name and shape of the tensor at hand, whose parts reach ``weight_loader`` without them."""
    for name, tensor in weights:
        setattr(layer, _CURRENT, (getattr(tensor, NAME_ATTRIBUTE, f"{layer.layer_name}.{name}"), list(tensor.shape)))
        yield name, tensor
    setattr(layer, _CURRENT, None)


def _refuse_excess(layer: Any, loaded_weight: Tensor, shard_id: str) -> None:
    """Raises if one expert's matrix (or that of all, ``[..., rows, columns]``) has more rows or columns than used."""
    if loaded_weight.ndim < 2:
        return
    config = layer.moe_config
    inner, hidden = config.intermediate_size, config.hidden_dim_unpadded or config.hidden_dim
    expected = [hidden, inner] if shard_id == "w2" else [inner, hidden]
    found = list(loaded_weight.shape[-2:])
    if found[0] <= expected[0] and found[1] <= expected[1]:
        return
    name, shape = getattr(layer, _CURRENT, None) or (
        getattr(loaded_weight, NAME_ATTRIBUTE, f"{layer.layer_name} (part {shard_id})"),
        list(loaded_weight.shape),
    )
    raise DroppedRowsError(
        f"{name}, shape {shape}: an expert's matrix is {found} where the model uses {expected}, expected shape "
        f"{expected}. config.json (moe_intermediate_size, hidden_size) is not this checkpoint's, or the tensor is not."
    )
