"""The attention layer that both gated families put in place of Qwen3's.

Legend: B batch, T tokens, N query heads, K key/value heads, D head dim, H hidden size, W gate width, R gate rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from gated_serving.attention import GateInput, Position, apply_gate, split_projection
from gated_serving.llm.models.configuration import GatedQwen3Config, GatedQwen3MoeConfig
from gated_serving.llm.models.projections import ConstantGate, GateProjection, QueryGateProjection


class GatedAttention(Qwen3Attention):
    """Qwen3's attention with a gate at one of the paper's five positions (arXiv 2505.06708, section 2.2).

    The gate's logits come from the layer's normalised input. At G2 to G4 the gate acts on the projection as it is,
    before qk-norm and rotation. Deviation from Qwen3: qk-norm can be left out (``use_qk_norm``), as in some of the
    released checkpoints.
    """

    def __init__(self, config: GatedQwen3Config | GatedQwen3MoeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # pyright: ignore[reportArgumentType]  # the MoE config has the same fields
        self.gate = config.gate
        self.attention_shape = shape = config.attention_shape
        if self.gate.is_packed:
            self.q_proj = QueryGateProjection(self.gate, shape, bias=config.attention_bias)
        elif self.gate.input is GateInput.CONSTANT:
            self.g_const = ConstantGate(self.gate, shape)
        else:
            self.g_proj = GateProjection(self.gate, shape)
        if not config.use_qk_norm:
            self.q_norm = nn.Identity()
            self.k_norm = nn.Identity()

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As in transformers: hidden states ``[B, T, H]`` to ``[B, T, H]`` and, where eager, the attention weights."""
        lead = hidden_states.shape[:-1]
        query, logits = self._project_query(hidden_states)
        key = self.k_proj(hidden_states).view(*lead, -1, self.head_dim)
        value = self.v_proj(hidden_states).view(*lead, -1, self.head_dim)

        query = self._gated_at(Position.G4, query, logits)
        key = self._gated_at(Position.G3, key, logits)
        value = self._gated_at(Position.G2, value, logits).transpose(1, 2)
        query, key = self.q_norm(query).transpose(1, 2), self.k_norm(key).transpose(1, 2)
        cos, sin = position_embeddings
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)

        attend: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation or "eager", eager_attention_forward
        )
        attended, weights = attend(
            self, query, key, value, attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling, sliding_window=self.sliding_window, **kwargs,
        )  # fmt: skip
        attended = self._gated_at(Position.G1, attended.view(*lead, -1, self.head_dim), logits)
        output = self.o_proj(attended.reshape(*lead, -1))
        output = self._gated_at(Position.G5, output.unsqueeze(-2), logits).squeeze(-2)
        return output, weights

    def _project_query(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Queries ``[B, T, N, D]`` and gate logits ``[B, T, gate heads, W]`` (constant: ``[gate heads, W]``)."""
        projected = self.q_proj(hidden_states)
        if self.gate.is_packed:
            return split_projection(projected, self.gate, self.attention_shape)
        query = projected.view(*hidden_states.shape[:-1], -1, self.head_dim)
        if self.gate.input is GateInput.CONSTANT:
            return query, self.g_const()
        sizes = (self.gate.num_gate_heads(self.attention_shape), self.gate.gate_width(self.attention_shape))
        return query, self.g_proj(hidden_states).unflatten(-1, sizes)

    def _gated_at(self, position: Position, states: Tensor, logits: Tensor) -> Tensor:
        return apply_gate(states, logits, self.gate) if self.gate.position is position else states
