"""The linear layers of gated attention, split over tensor-parallel ranks.

Legend: N query heads, K key/value heads, D head dim, W gate width, H hidden size, P tensor-parallel ranks.

``q_proj`` keeps the row order it has on disk, gate rows included. A rank then needs one contiguous slice of it, vLLM's
own ``QKVParallelLinear`` does the slicing, and so does its LoRA layer for the adapter's B matrix. Only the
``kv_group`` packing with fewer key/value heads than ranks needs rows from two places; that case has a class of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.platforms import current_platform

from gated_serving.attention import AttentionShape, GateConfig, Packing, Position, Sharing, split_rows

ROW_MULTIPLE = 32
"""Rows that vLLM's CPU kernels take at a time."""


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What one tensor-parallel rank holds of an attention layer.

    Args:
        shape: Sizes of the whole layer.
        rank: This rank.
        num_ranks: All ranks.

    Raises:
        ValueError: The heads cannot be divided over so many ranks.
    """

    shape: AttentionShape
    rank: int
    num_ranks: int

    def __post_init__(self) -> None:
        if self.shape.num_heads % self.num_ranks:
            raise ValueError(
                f"tensor_parallel_size={self.num_ranks} does not divide num_attention_heads={self.shape.num_heads}"
            )
        if max(self.shape.num_kv_heads, self.num_ranks) % min(self.shape.num_kv_heads, self.num_ranks):
            raise ValueError(
                f"tensor_parallel_size={self.num_ranks} and num_key_value_heads={self.shape.num_kv_heads}: "
                "one must be a multiple of the other"
            )

    @classmethod
    def here(cls, shape: AttentionShape) -> RankShare:
        """The share of the calling rank."""
        return cls(shape=shape, rank=get_tensor_model_parallel_rank(), num_ranks=get_tensor_model_parallel_world_size())

    @property
    def kv_replicas(self) -> int:
        """Ranks that hold the same key/value head."""
        return max(1, self.num_ranks // self.shape.num_kv_heads)

    @property
    def local_shape(self) -> AttentionShape:
        """Sizes of this rank's part."""
        return AttentionShape(
            hidden_size=self.shape.hidden_size,
            num_heads=self.shape.num_heads // self.num_ranks,
            num_kv_heads=max(1, self.shape.num_kv_heads // self.num_ranks),
            head_dim=self.shape.head_dim,
        )

    def gate_head_slice(self, gate: GateConfig) -> slice:
        """Which of the layer's gate heads act on this rank's heads."""
        if gate.position is Position.G5:
            return slice(0, 1)
        num_heads = gate.num_gate_heads(self.local_shape)
        replicas = self.kv_replicas if gate.position in (Position.G2, Position.G3) else 1
        first = self.rank // replicas * num_heads
        return slice(first, first + num_heads)

    def packed_rows(self, gate: GateConfig) -> Tensor:
        """Rows of the packed ``q_proj`` on disk that this rank holds, in its local order: int64 ``[local rows]``."""
        indices = torch.arange(gate.num_query_rows(self.shape), device="cpu")
        queries, gates = split_rows(indices, gate, self.shape)
        local = self.local_shape
        blocks = local.num_kv_heads if gate.packing is Packing.KV_GROUP else local.num_heads
        queries = queries.view(self.num_ranks, blocks, -1)[self.rank]
        gates = gates.view(gate.num_gate_heads(self.shape), -1)[self.gate_head_slice(gate)].reshape(blocks, -1)
        return torch.cat([queries, gates], dim=1).flatten()


def crosses_heads(gate: GateConfig) -> bool:
    """Whether one head's score depends on the other heads' logits (their mean, or the largest of them all)."""
    return gate.sharing is Sharing.SHARED or gate.top_k_share is not None


def qkv_gate_projection(
    gate: GateConfig, share: RankShare, *, bias: bool, quant_config: QuantizationConfig | None, prefix: str
) -> QKVParallelLinear:
    """One projection ``[..., H]`` to this rank's queries (with packed gates), keys and values.

    vLLM's class counts in heads of one size, which gate rows are not. Told that every row is a head of size 1, it
    slices right.
    """
    local, shape = share.local_shape, share.shape
    num_ranks = share.num_ranks
    local_kv_rows = local.num_kv_heads * shape.head_dim
    needs_regrouping = gate.is_packed and gate.packing is Packing.KV_GROUP and share.kv_replicas > 1
    linear_class = RegroupedQKVParallelLinear if needs_regrouping else QKVParallelLinear
    projection = linear_class(
        shape.hidden_size,
        1,
        gate.num_query_rows(local) * num_ranks,
        local_kv_rows * num_ranks,
        bias=bias,
        quant_config=quant_config,
        prefix=prefix,
    )
    projection.total_num_kv_heads = shape.num_kv_heads * shape.head_dim
    projection.num_kv_head_replicas = share.kv_replicas
    if _may_pad(projection):
        projection.quant_method = RowPaddingLinearMethod()
    if isinstance(projection, RegroupedQKVParallelLinear):
        projection.set_row_order(gate, shape, num_ranks)
    return projection


class RowPaddingLinearMethod(UnquantizedLinearMethod):
    """On a CPU, fills the loaded weight with rows of zeros up to the next multiple of ``ROW_MULTIPLE``.

    The kernels work on so many rows at a time, and gate rows seldom fill the last of them: 1,032 rows cost 5 to 19 us
    more than 1,056. The layer's output gets as many columns more, at its end, which the caller leaves out.
    """

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pads weight and bias, then lets vLLM pack them for its kernels."""
        num_missing = -cast("Tensor", layer.weight).shape[0] % ROW_MULTIPLE
        for name in ("weight", "bias"):
            parameter = getattr(layer, name, None)
            if num_missing and parameter is not None:
                padding = parameter.new_zeros(num_missing, *parameter.shape[1:])
                setattr(layer, name, nn.Parameter(torch.cat([parameter.data, padding]), requires_grad=False))
        super().process_weights_after_loading(layer)


def _may_pad(projection: QKVParallelLinear) -> bool:
    """Whether nothing else looks at the rows after loading: adapters add to them, quantised ones lie otherwise."""
    is_plain = type(projection.quant_method) is UnquantizedLinearMethod
    return is_plain and current_platform.is_cpu() and get_current_vllm_config().lora_config is None


class RegroupedQKVParallelLinear(QKVParallelLinear):
    """For ``kv_group`` packing with fewer key/value heads than ranks: each rank's queries and gates become neighbours.

    On disk a group holds all its queries and then all its gates; ranks that share the group need a part of each. The
    rows are reordered before vLLM slices them (gates at G2 and G3 repeated for each rank of the group).
    """

    row_order: Tensor

    def set_row_order(self, gate: GateConfig, shape: AttentionShape, num_ranks: int) -> None:
        """Fixes the order, int64 ``[rows of all ranks]``, once the layer is made."""
        shares = [RankShare(shape=shape, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
        self.row_order = torch.cat([share.packed_rows(gate) for share in shares])
        self.num_disk_rows = gate.num_query_rows(shape)

    def regroup(self, packed: Tensor, *, dim: int = 0) -> Tensor:
        """Reorders the rows of ``q_proj`` (dimension ``dim``) so that each rank's are contiguous.

        Raises:
            ValueError: The number of rows is wrong.
        """
        if packed.shape[dim] != self.num_disk_rows:
            raise ValueError(
                f"{self.prefix}: q_proj has {packed.shape[dim]} rows, shape {list(packed.shape)}, expected "
                f"{self.num_disk_rows} with the gate's"
            )
        return packed.index_select(dim, self.row_order.to(packed.device))

    def _regroup_shard(self, param: nn.Parameter, loaded_weight: Tensor, shard_id: str | None) -> Tensor:
        output_dim = getattr(param, "output_dim", None)
        if shard_id != "q" or output_dim is None:
            return loaded_weight
        if getattr(param, "packed_dim", None) == output_dim or loaded_weight.shape[output_dim] != self.num_disk_rows:
            raise ValueError(
                f"{self.prefix}: q_proj of shape {list(loaded_weight.shape)} packs several rows into one number or "
                f"does not have {self.num_disk_rows} of them, so its rows cannot be divided over more ranks than "
                "key/value heads; use a smaller tensor_parallel_size, or gate_packing='per_head' or 'separate'"
            )
        return self.regroup(loaded_weight, dim=output_dim)

    def weight_loader(self, param: Any, loaded_weight: Tensor, loaded_shard_id: str | None = None) -> None:
        """As in vLLM, for reordered rows."""
        super().weight_loader(param, self._regroup_shard(param, loaded_weight, loaded_shard_id), loaded_shard_id)

    def weight_loader_v2(self, param: Any, loaded_weight: Tensor, loaded_shard_id: str | None = None) -> None:
        """As in vLLM, for reordered rows."""
        super().weight_loader_v2(param, self._regroup_shard(param, loaded_weight, loaded_shard_id), loaded_shard_id)


def gate_projection(
    gate: GateConfig, share: RankShare, *, quant_config: QuantizationConfig | None, prefix: str
) -> ColumnParallelLinear | ReplicatedLinear:
    """``g_proj``: ``[..., H]`` to this rank's gate logits, or to all of them where ``gives_all_heads``."""
    linear_class = ReplicatedLinear if gives_all_heads(gate, share) else ColumnParallelLinear
    return linear_class(
        share.shape.hidden_size,
        gate.num_gate_rows(share.shape),
        bias=gate.bias,
        quant_config=quant_config,
        prefix=prefix,
    )


def gives_all_heads(gate: GateConfig, share: RankShare) -> bool:
    """Whether every rank computes the logits of all gate heads: where a head needs the others', or ranks share one."""
    is_shared_by_ranks = gate.position in (Position.G2, Position.G3) and share.kv_replicas > 1
    return crosses_heads(gate) or gate.position is Position.G5 or is_shared_by_ranks


class ConstantGate(nn.Module):
    """The logits of a gate that does not look at its input, ``[gate heads, W]``, whole on every rank."""

    def __init__(self, gate: GateConfig, shape: AttentionShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(gate.num_gate_heads(shape), gate.gate_width(shape)), requires_grad=False)

    def forward(self) -> Tensor:
        """The logits, the same for every token."""
        return self.weight
