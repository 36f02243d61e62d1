"""LoRA on the projection that holds the gate's rows: adapters that fit reach them, others are refused."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.model_executor.layers.linear import QKVParallelLinear

from vllm_gated.projections import RegroupedQKVParallelLinear

_MARK = "_vllm_gated_rows_checked"


def enable_lora_on(projection: QKVParallelLinear) -> None:
    """If adapters are asked for, sees to it that they act on the whole of ``projection``.

    vLLM ignores an adapter for a layer that it cannot wrap, and copies one with too few rows as if the rest were zero.

    Raises:
        ValueError: Fully sharded adapters are asked for where they are not supported.
        RuntimeError: This vLLM keeps its LoRA layers elsewhere.
    """
    lora_config = get_current_vllm_config().lora_config
    if lora_config is None:
        return
    from vllm.lora.layers import MergedQKVParallelLinearWithLoRA

    _check_adapter_rows(MergedQKVParallelLinearWithLoRA)
    if not isinstance(projection, RegroupedQKVParallelLinear):
        return
    if lora_config.fully_sharded_loras:
        raise ValueError(
            "fully_sharded_loras=true with gate_packing='kv_group' and more tensor-parallel ranks than key/value "
            "heads is not supported; leave it false"
        )
    _add_regrouped_layer(MergedQKVParallelLinearWithLoRA)


def _check_adapter_rows(layer_class: Any) -> None:
    """Makes vLLM's LoRA layer for q, k and v compare an adapter's rows with the projection's."""
    set_lora = layer_class.set_lora
    if getattr(set_lora, _MARK, False):
        return

    def checked(self: Any, index: int, lora_a: Any, lora_b: Any) -> None:
        base = self.base_layer
        num_rows = {
            "q_proj": getattr(base, "num_disk_rows", base.total_num_heads * base.head_size),
            "k_proj": base.total_num_kv_heads * base.head_size,
            "v_proj": base.total_num_kv_heads * base.v_head_size,
        }
        for (name, rows), matrix in zip(num_rows.items(), lora_b, strict=True):
            if matrix is not None and matrix.shape[0] != rows and not _is_blank(matrix):
                raise ValueError(
                    f"LoRA adapter: lora_B of {base.prefix.removesuffix('qkv_proj')}{name}, shape "
                    f"{list(matrix.shape)}, has {matrix.shape[0]} rows, expected {rows}; it was trained on another "
                    "model, or on one without the gate's rows"
                )
        set_lora(self, index, lora_a, lora_b)

    setattr(checked, _MARK, True)
    layer_class.set_lora = checked


def _is_blank(matrix: Tensor) -> bool:
    """Whether this is one of vLLM's own placeholders, which have one rank's rows and hold zeros."""
    return not bool(matrix.any())


def _add_regrouped_layer(layer_class: Any) -> None:
    """Adds a LoRA layer for ``RegroupedQKVParallelLinear`` to those that vLLM tries.

    Raises:
        RuntimeError: This vLLM keeps its LoRA layers elsewhere.
    """
    from vllm.lora import utils

    classes = getattr(utils, "_all_lora_classes", None)
    if not isinstance(classes, tuple):
        raise RuntimeError("this vLLM keeps its LoRA layers elsewhere; serve this model without LoRA")
    if any(known.__name__ == "RegroupedQKVParallelLinearWithLoRA" for known in classes):
        return

    class RegroupedQKVParallelLinearWithLoRA(layer_class):
        """Reorders the rows of ``q_proj``'s B matrix as the base layer reorders its weight's."""

        base_layer: RegroupedQKVParallelLinear

        def slice_lora_b(self, lora_b: list[Tensor | None]) -> list[Tensor | None]:
            """This rank's rows of the B matrices of q, k and v."""
            query, *rest = lora_b
            if query is not None and not _is_blank(query):
                query = self.base_layer.regroup(query)
            return super().slice_lora_b([query, *rest])

        @classmethod
        def can_replace_layer(
            cls,
            source_layer: nn.Module,
            lora_config: LoRAConfig,
            packed_modules_list: list[str],
            model_config: object = None,
            decorate: bool = True,
        ) -> bool:
            """Whether this class wraps ``source_layer``."""
            return type(source_layer) is RegroupedQKVParallelLinear and len(packed_modules_list) == 3

    utils._all_lora_classes = (RegroupedQKVParallelLinearWithLoRA, *classes)
