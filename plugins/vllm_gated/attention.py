"""Gated attention on vLLM's layers, for the dense and the mixture-of-experts family.

Legend: T tokens of the batch, N query heads, K key/value heads, D head dim, H hidden size, W gate width; all heads are
this tensor-parallel rank's unless said otherwise.
"""

from __future__ import annotations

from torch import Tensor, nn
from vllm.config import CacheConfig
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.utils import extract_layer_index

from gated_serving.attention import (
    GateInput,
    Operation,
    Packing,
    Position,
    apply_gate,
    gate_scores,
    split_projection,
    split_projection_by_block,
)
from gated_serving.llm.models.configuration import GatedQwen3Config, GatedQwen3MoeConfig
from vllm_gated.guard import require_guarded_layers
from vllm_gated.lora import enable_lora_on
from vllm_gated.projections import (
    ConstantGate,
    RankShare,
    crosses_heads,
    gate_projection,
    gives_all_heads,
    qkv_gate_projection,
)


class GatedAttention(nn.Module):
    """Qwen3's attention with a gate at one of the five positions (arXiv 2505.06708, section 2.2).

    The same computation as ``gated_serving.llm.models.attention.GatedAttention``: the logits come from the layer's
    normalised input, and at G2 to G4 the gate acts before qk-norm and rotation.
    """

    def __init__(
        self,
        config: GatedQwen3Config | GatedQwen3MoeConfig,
        *,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        require_guarded_layers()
        _refuse_unsupported(config)
        self.gate = gate = config.gate
        self.share = share = RankShare.here(config.attention_shape)
        self.local_shape = local = share.local_shape
        self.head_dim = local.head_dim
        self.q_size = gate.num_query_rows(local)
        self.kv_size = local.num_kv_heads * local.head_dim
        self.qkv_size = self.q_size + 2 * self.kv_size  # the projection may have more columns, of zeros
        has_bias = bool(config.attention_bias)

        self.qkv_proj = qkv_gate_projection(
            gate, share, bias=has_bias, quant_config=quant_config, prefix=f"{prefix}.qkv_proj"
        )
        enable_lora_on(self.qkv_proj)
        if gate.input is GateInput.CONSTANT:
            self.g_const = ConstantGate(gate, share.shape)
        elif not gate.is_packed:
            self.g_proj = gate_projection(gate, share, quant_config=quant_config, prefix=f"{prefix}.g_proj")
        self.keeps_blocks = gate.is_packed and gate.position in (Position.G1, Position.G4) and not crosses_heads(gate)
        num_blocks = local.num_heads if gate.packing is Packing.PER_HEAD else local.num_kv_heads
        by_block = (num_blocks, -1, self.head_dim)
        self.attended_sizes = by_block if self.keeps_blocks else (-1, self.head_dim)
        self.gathers_logits = gate.is_packed and crosses_heads(gate) and share.num_ranks > 1
        has_all_logits = self.gathers_logits or gate.input is GateInput.CONSTANT
        if not gate.is_packed:
            has_all_logits = has_all_logits or gives_all_heads(gate, share)
        self.head_slice = share.gate_head_slice(gate) if has_all_logits and share.num_ranks > 1 else None

        self.o_proj = RowParallelLinear(
            share.shape.num_query_rows, config.hidden_size, bias=has_bias, quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )  # fmt: skip
        self.rotary_emb = get_rope(
            local.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters or {}),
        )
        self.attn = Attention(
            local.num_heads, local.head_dim, local.head_dim**-0.5, num_kv_heads=local.num_kv_heads,
            cache_config=cache_config, quant_config=quant_config,
            per_layer_sliding_window=_sliding_window(config, extract_layer_index(prefix)), prefix=f"{prefix}.attn",
        )  # fmt: skip
        self.q_norm = RMSNorm(local.head_dim, eps=config.rms_norm_eps) if config.use_qk_norm else None
        self.k_norm = RMSNorm(local.head_dim, eps=config.rms_norm_eps) if config.use_qk_norm else None

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Positions ``[T]`` and normalised hidden states ``[T, H]`` to ``[T, H]``."""
        qkv, _ = self.qkv_proj(hidden_states)
        query, key, value = qkv[..., : self.qkv_size].split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        query, logits = self._split_gate(query, hidden_states)  # heads by block where they are packed
        query = self._gated_at(Position.G4, query, logits)
        key = self._gated_at(Position.G3, key.unflatten(-1, (-1, self.head_dim)), logits)
        value = self._gated_at(Position.G2, value.unflatten(-1, (-1, self.head_dim)), logits)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self.rotary_emb(positions, query.flatten(1), key.flatten(1))
        attended = self.attn(query, key, value.flatten(1))
        attended = self._gated_at(Position.G1, attended.unflatten(-1, self.attended_sizes), logits)
        output, _ = self.o_proj(attended.flatten(1))
        return self._gated_at(Position.G5, output.unsqueeze(-2), logits).squeeze(-2)

    def _split_gate(self, projected: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Queries ``[T, N, D]``, and the logits ``[T, gate heads, W]`` (constant: ``[gate heads, W]``).

        The logits are this rank's, or all heads' where ``head_slice`` says which of them are this rank's. Where
        ``keeps_blocks``, heads stay by block: ``[T, blocks, N / blocks, D]``, and the logits likewise.
        """
        gate = self.gate
        if self.keeps_blocks:
            return split_projection_by_block(projected, gate, self.local_shape)
        if gate.is_packed:
            query, logits = split_projection(projected, gate, self.local_shape)
            return query, self._gather_heads(logits) if self.gathers_logits else logits
        query = projected.unflatten(-1, (-1, self.head_dim))
        if gate.input is GateInput.CONSTANT:
            return query, self.g_const()
        logits, _ = self.g_proj(hidden_states)
        return query, logits.unflatten(-1, (-1, gate.gate_width(self.local_shape)))

    def _gather_heads(self, logits: Tensor) -> Tensor:
        """All ranks' logits in head order; key/value heads that several ranks hold appear once."""
        width = logits.shape[-1]
        gathered = tensor_model_parallel_all_gather(logits.flatten(-2).contiguous()).unflatten(-1, (-1, width))
        replicas = self.share.kv_replicas if self.gate.position in (Position.G2, Position.G3) else 1
        return gathered[..., ::replicas, :]

    def _gated_at(self, position: Position, states: Tensor, logits: Tensor) -> Tensor:
        if self.gate.position is not position:
            return states
        if self.head_slice is None:
            return apply_gate(states, logits, self.gate)
        scores = gate_scores(logits, self.gate)
        if scores.shape[-2] > 1:
            scores = scores[..., self.head_slice, :]
        scores = scores.to(states.dtype)
        return states + scores if self.gate.operation is Operation.ADD else states * scores


def _refuse_unsupported(config: GatedQwen3Config | GatedQwen3MoeConfig) -> None:
    if getattr(config, "dual_chunk_attention_config", None):
        raise ValueError("dual_chunk_attention_config: gated models have no dual chunk attention; remove it")
    if not getattr(config, "is_causal", True):
        raise ValueError("is_causal=false: gated models are served as causal language models only")


def _sliding_window(config: GatedQwen3Config | GatedQwen3MoeConfig, layer: int) -> int | None:
    layer_types = getattr(config, "layer_types", None)
    if layer_types and layer_types[layer] == "sliding_attention":
        return config.sliding_window
    return None
