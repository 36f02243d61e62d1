"""The dense gated family: transformers' Qwen3 with the attention layer exchanged."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, Qwen3Model, Qwen3PreTrainedModel

from gated_serving.llm.models.attention import GatedAttention
from gated_serving.llm.models.configuration import GatedQwen3Config
from gated_serving.llm.models.projections import init_gate


class GatedQwen3PreTrainedModel(Qwen3PreTrainedModel):
    """What the dense classes share: the config class and how the gate starts."""

    config: GatedQwen3Config
    config_class = GatedQwen3Config

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        init_gate(module, initializer_range=self.config.initializer_range)


class GatedQwen3Model(GatedQwen3PreTrainedModel, Qwen3Model):
    """The transformer without a head."""

    def __init__(self, config: GatedQwen3Config) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = GatedAttention(config, index)
        self.post_init()


class GatedQwen3ForCausalLM(GatedQwen3PreTrainedModel, Qwen3ForCausalLM):
    """The language model. ``from_pretrained`` reads the project's own format and the released checkpoints'."""

    def __init__(self, config: GatedQwen3Config) -> None:
        Qwen3PreTrainedModel.__init__(self, config)  # Qwen3ForCausalLM's own would build an ungated model first
        self.model = GatedQwen3Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
