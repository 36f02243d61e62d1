"""Reading config.json: the released checkpoints' gate flags become one of the project's own families.

The released format keeps Qwen's own model type, so the choice of class must be made where vLLM reads the config.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub.constants
from transformers import PreTrainedConfig
from vllm.transformers_utils import config as vllm_config

from gated_serving.llm.models.configuration import GatedQwen3Config, GatedQwen3MoeConfig
from gated_serving.llm.models.official import is_official_gated, translate_official

_FAMILIES: dict[str, type[PreTrainedConfig]] = {
    family.model_type: family for family in (GatedQwen3Config, GatedQwen3MoeConfig)
}


class GatedConfigParser(vllm_config.HFConfigParser):
    """vLLM's parser, except that a gated config becomes the gated family's config."""

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], PreTrainedConfig]:
        """The config as a dict and as an object, both in the project's own terms if the model is gated."""
        on_disk, _ = PreTrainedConfig.get_config_dict(
            model, revision=revision, code_revision=code_revision,
            local_files_only=huggingface_hub.constants.HF_HUB_OFFLINE, token=kwargs.get("token"),
        )  # fmt: skip
        config_dict = translated(on_disk, kwargs.get("hf_overrides"))
        if config_dict is None:
            return super().parse(model, trust_remote_code, revision, code_revision, **kwargs)
        family = _FAMILIES[config_dict["model_type"]]
        return config_dict, family.from_dict(dict(config_dict), name_or_path=str(model))


def translated(config_dict: dict[str, Any], overrides: Any = None) -> dict[str, Any] | None:
    """A gated config.json in the project's own terms, or None if it is not gated (or not Qwen's).

    Args:
        config_dict: As on disk.
        overrides: vLLM's ``hf_overrides``; where a dict, it counts as if it stood in the file.
    """
    merged = config_dict | (overrides if isinstance(overrides, dict) else {})
    if is_official_gated(merged):
        merged = translate_official(merged)
    elif merged.get("model_type") not in _FAMILIES:
        return None
    # Code that comes with a checkpoint must not take the place of the family's own class.
    merged.pop("auto_map", None)
    return merged


def install() -> None:
    """Puts the parser in the place of vLLM's for Hugging Face configs; safe to call again.

    Raises:
        RuntimeError: This vLLM chooses its parsers elsewhere.
    """
    parsers = getattr(vllm_config, "_CONFIG_FORMAT_TO_CONFIG_PARSER", None)
    if not isinstance(parsers, dict) or "hf" not in parsers:
        raise RuntimeError("vLLM's table of config parsers is not where it was")
    # Not by register_config_parser, which warns in every process that a parser is replaced.
    parsers["hf"] = GatedConfigParser
