"""The mixture-of-experts gated family: transformers' Qwen3-MoE with the attention layer exchanged."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeForCausalLM,
    Qwen3MoeModel,
    Qwen3MoePreTrainedModel,
)

from gated_serving.llm.models.attention import GatedAttention
from gated_serving.llm.models.configuration import GatedQwen3MoeConfig
from gated_serving.llm.models.projections import init_gate


class GatedQwen3MoePreTrainedModel(Qwen3MoePreTrainedModel):
    """What the mixture-of-experts classes share: the config class and how the gate starts."""

    config: GatedQwen3MoeConfig
    config_class = GatedQwen3MoeConfig
    _can_record_outputs: ClassVar = (Qwen3MoePreTrainedModel._can_record_outputs or {}) | {"attentions": GatedAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        init_gate(module, initializer_range=self.config.initializer_range)


class GatedQwen3MoeModel(GatedQwen3MoePreTrainedModel, Qwen3MoeModel):
    """The transformer without a head."""

    def __init__(self, config: GatedQwen3MoeConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = GatedAttention(config, index)
        self.post_init()


class GatedQwen3MoeForCausalLM(GatedQwen3MoePreTrainedModel, Qwen3MoeForCausalLM):
    """The language model.

    ``from_pretrained`` reads the project's own format, and gated checkpoints that keep the name ``qwen3_moe``.
    """

    def __init__(self, config: GatedQwen3MoeConfig) -> None:
        Qwen3MoePreTrainedModel.__init__(self, config)  # Qwen3MoeForCausalLM's own would build an ungated model first
        self.model = GatedQwen3MoeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts = config.num_experts
        self.num_experts_per_tok = config.num_experts_per_tok
        self.post_init()


# On disk every expert has tensors of its own, as in Qwen3-MoE's checkpoints; in memory transformers fuses them. The
# rules go by model type, so a family with a name of its own has to say that they hold for it too.
register_checkpoint_conversion_mapping(
    GatedQwen3MoeConfig.model_type, get_checkpoint_conversion_mapping("qwen3_moe") or [], overwrite=True
)


# On disk every expert has its own tensors, as in all Qwen mixture-of-experts checkpoints; in memory they are stacked.
register_checkpoint_conversion_mapping(
    GatedQwen3MoeConfig.model_type, get_checkpoint_conversion_mapping("qwen3_moe") or [], overwrite=True
)
