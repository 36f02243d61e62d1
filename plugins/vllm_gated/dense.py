"""The dense gated family on vLLM: its own Qwen3 with the attention layer exchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.models.qwen2 import Qwen2MLP, Qwen2Model
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM
from vllm.model_executor.models.utils import maybe_prefix

from gated_serving.llm.models.configuration import GatedQwen3Config
from vllm_gated.attention import GatedAttention
from vllm_gated.completeness import load_completely
from vllm_gated.head import make_head


class GatedQwen3DecoderLayer(Qwen3DecoderLayer):
    """Gated attention and vLLM's own feed-forward layer."""

    def __init__(
        self,
        config: GatedQwen3Config,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        nn.Module.__init__(self)  # Qwen3DecoderLayer's own would build an ungated attention first
        self.hidden_size = config.hidden_size
        self.self_attn = GatedAttention(
            config, cache_config=cache_config, quant_config=quant_config, prefix=f"{prefix}.self_attn"
        )
        self.mlp = Qwen2MLP(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            quant_config=quant_config,
            prefix=f"{prefix}.mlp",
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


@support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "positions": -1, "intermediate_tensors": 0, "inputs_embeds": 0}
)
class GatedQwen3Model(Qwen2Model):
    """The transformer without a head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, decoder_layer_type=GatedQwen3DecoderLayer)


class GatedQwen3ForCausalLM(Qwen3ForCausalLM):
    """The language model that vLLM serves for ``gated_qwen3`` and for the released checkpoints."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)  # Qwen3ForCausalLM's own would build an ungated model first
        config = cast("GatedQwen3Config", vllm_config.model_config.hf_config)
        self.config = config
        self.vllm_config = vllm_config
        self.quant_config = vllm_config.quant_config
        self.model = GatedQwen3Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = make_head(config, self.model.embed_tokens, vllm_config.quant_config, prefix)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As in vLLM, and refuses a checkpoint that has less or more than the model."""
        return load_completely(self, super().load_weights, weights)
