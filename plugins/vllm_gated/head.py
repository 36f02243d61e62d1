"""The output layer of both gated families: hidden states to logits."""

from __future__ import annotations

from typing import Any, cast

from vllm.distributed import get_pp_group
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import PPMissingLayer, maybe_prefix

from gated_serving.llm.models.configuration import GatedQwen3Config, GatedQwen3MoeConfig


def make_head(
    config: GatedQwen3Config | GatedQwen3MoeConfig, embedding: Any, quant_config: QuantizationConfig | None, prefix: str
) -> ParallelLMHead:
    """The output layer, with the input embedding's weight where they are tied; a placeholder before the last rank.

    Args:
        config: The model's.
        embedding: Its input embedding, which the last pipeline rank of a tied model always has.
        quant_config: How weights are stored, if quantised.
        prefix: Of the whole model's names.
    """
    if not get_pp_group().is_last_rank:
        return cast("ParallelLMHead", PPMissingLayer())
    head = ParallelLMHead(
        config.vocab_size, config.hidden_size, quant_config=quant_config, prefix=maybe_prefix(prefix, "lm_head")
    )
    return cast("ParallelLMHead", head.tie_weights(embedding)) if config.tie_word_embeddings else head
