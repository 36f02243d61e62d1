"""The mixture-of-experts gated family on vLLM: its own Qwen3-MoE with the attention layer exchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.qwen3_moe import (
    Qwen3MoeDecoderLayer,
    Qwen3MoeForCausalLM,
    Qwen3MoeMLP,
    Qwen3MoeModel,
    Qwen3MoeSparseMoeBlock,
)
from vllm.model_executor.models.utils import extract_layer_index, maybe_prefix

from gated_serving.llm.models.configuration import GatedQwen3MoeConfig
from vllm_gated.attention import GatedAttention
from vllm_gated.completeness import load_completely
from vllm_gated.head import make_head


class GatedQwen3MoeDecoderLayer(Qwen3MoeDecoderLayer):
    """Gated attention and vLLM's own experts."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)  # Qwen3MoeDecoderLayer's own would build an ungated attention first
        config = cast("GatedQwen3MoeConfig", vllm_config.model_config.hf_text_config)
        quant_config = vllm_config.quant_config
        self.hidden_size = config.hidden_size
        self.self_attn = GatedAttention(
            config, cache_config=vllm_config.cache_config, quant_config=quant_config, prefix=f"{prefix}.self_attn"
        )
        if _has_experts(config, extract_layer_index(prefix)):
            self.mlp = Qwen3MoeSparseMoeBlock(vllm_config=vllm_config, prefix=f"{prefix}.mlp")
        else:
            self.mlp = Qwen3MoeMLP(
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                hidden_act=config.hidden_act,
                quant_config=quant_config,
                prefix=f"{prefix}.mlp",
            )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


@support_torch_compile
class GatedQwen3MoeModel(Qwen3MoeModel):
    """The transformer without a head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, decoder_layer_type=GatedQwen3MoeDecoderLayer)


class GatedQwen3MoeForCausalLM(Qwen3MoeForCausalLM):
    """The language model that vLLM serves for ``gated_qwen3_moe`` and for gated checkpoints named ``qwen3_moe``."""

    # Of a model without dense layers; vLLM also asks the class, so a model that has some gets a mapping of its own.
    packed_modules_mapping: dict[str, list[str]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)  # Qwen3MoeForCausalLM's own would build an ungated model first
        config = cast("GatedQwen3MoeConfig", vllm_config.model_config.hf_text_config)
        self.config = config
        self.quant_config = vllm_config.quant_config
        self.parallel_config = vllm_config.parallel_config
        if any(not _has_experts(config, layer) for layer in range(config.num_hidden_layers)):
            self._pack_dense_layers()
        self.model = GatedQwen3MoeModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = make_head(config, self.model.embed_tokens, self.quant_config, prefix)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
        self._describe_experts()

    def _pack_dense_layers(self) -> None:
        """Says how dense layers among the experts are packed, for this model and not for its whole class."""
        self.packed_modules_mapping = self.packed_modules_mapping | {"gate_up_proj": ["gate_proj", "up_proj"]}
        if self.quant_config is not None:
            self.quant_config.packed_modules_mapping = (
                self.quant_config.packed_modules_mapping | self.packed_modules_mapping
            )

    def _describe_experts(self) -> None:
        """Sets what vLLM's expert load balancing reads."""
        blocks = [
            layer.mlp
            for layer in self.model.layers
            if isinstance(layer, GatedQwen3MoeDecoderLayer) and isinstance(layer.mlp, Qwen3MoeSparseMoeBlock)
        ]
        if not blocks:
            raise ValueError(
                "gated_qwen3_moe without a mixture-of-experts layer on this pipeline rank; use gated_qwen3"
            )
        self.moe_layers = [block.experts for block in blocks]
        self.num_moe_layers = len(blocks)
        self.num_expert_groups = 1
        self.num_shared_experts = 0
        self.num_logical_experts = blocks[0].n_logical_experts
        self.num_physical_experts = blocks[0].n_physical_experts
        self.num_local_physical_experts = blocks[0].n_local_physical_experts
        self.num_routed_experts = blocks[0].n_routed_experts
        self.num_redundant_experts = blocks[0].n_redundant_experts

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As in vLLM, and refuses a checkpoint that has less or more than the model."""
        return load_completely(self, super().load_weights, weights)


def _has_experts(config: GatedQwen3MoeConfig, layer: int) -> bool:
    """Whether a layer's feed-forward part is a mixture of experts."""
    if layer in (config.mlp_only_layers or []):
        return False
    return config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
