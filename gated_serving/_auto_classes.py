"""Makes transformers' auto classes know the gated families, without importing transformers before its user does.

transformers loads its tables in the middle of importing other models, at moments when Qwen3, which the gated families
build on, may not be whole yet. So nothing is imported then: each model type is registered with a stand-in that fetches
the real config class when a config is made, and making one registers the model classes.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import wrapt


def register_when_imported() -> None:
    """Registers the model types now if transformers' config table is loaded already, else as soon as it is."""
    wrapt.register_post_import_hook(_register_model_types, "transformers.models.auto.configuration_auto")


def _register_model_types(auto: ModuleType) -> None:
    for stand_in in (_DenseConfig, _MoeConfig):
        if stand_in.model_type not in auto.CONFIG_MAPPING:
            auto.AutoConfig.register(stand_in.model_type, stand_in)


class _ConfigStandIn:
    """Stands for a config class in ``AutoConfig``'s table, and becomes that class when it is used."""

    model_type: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.config_class()(*args, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return cls.config_class().from_dict(config_dict, **kwargs)

    @classmethod
    def config_class(cls) -> Any:
        raise NotImplementedError


class _DenseConfig(_ConfigStandIn):
    model_type = "gated_qwen3"

    @classmethod
    def config_class(cls) -> Any:
        from gated_serving.llm.models.configuration import GatedQwen3Config

        return GatedQwen3Config


class _MoeConfig(_ConfigStandIn):
    model_type = "gated_qwen3_moe"

    @classmethod
    def config_class(cls) -> Any:
        from gated_serving.llm.models.configuration import GatedQwen3MoeConfig

        return GatedQwen3MoeConfig


@functools.cache
def register_models() -> None:
    """Registers the config and model classes with the auto classes, and a tokenizer class to fall back on."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer

    from gated_serving.llm.models import dense, moe

    for config, base, causal_lm in (
        (dense.GatedQwen3Config, dense.GatedQwen3Model, dense.GatedQwen3ForCausalLM),
        (moe.GatedQwen3MoeConfig, moe.GatedQwen3MoeModel, moe.GatedQwen3MoeForCausalLM),
    ):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModel.register(config, base, exist_ok=True)
        AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
        AutoTokenizer.register(config, fast_tokenizer_class=Qwen2Tokenizer, exist_ok=True)
