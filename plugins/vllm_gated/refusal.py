"""The fallback when the plugin cannot work: gated models are refused, all others go on as before.

vLLM logs a plugin's failure and goes on with its own Qwen3, which drops the gate in silence. So this module must work
where nothing else does: it needs the standard library and transformers' config class only, of whatever version.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

_GATE_FLAGS = ("headwise_attn_output_gate", "elementwise_attn_output_gate")
_OWN_MODEL_TYPES = ("gated_qwen3", "gated_qwen3_moe")
_MARK = "_vllm_gated_refusal"


class GatedModelRefusedError(ValueError):
    """A gated model was asked for, and this installation could only serve it wrong."""


def refuse_gated_models(reason: str) -> None:
    """From now on reading the config of a gated model fails in this process; safe to call again.

    Args:
        reason: What is wrong and what to do, for the error message.
    """
    from transformers import PretrainedConfig  # the name that every transformers version has

    current = PretrainedConfig.__dict__["get_config_dict"].__func__
    if getattr(current, _MARK, False):
        return

    @functools.wraps(current)
    def get_config_dict(cls: type, *args: Any, **kwargs: Any) -> Any:
        result = current(cls, *args, **kwargs)
        raise_if_gated(result[0], reason)
        return result

    setattr(get_config_dict, _MARK, True)
    PretrainedConfig.get_config_dict = classmethod(get_config_dict)  # pyright: ignore[reportAttributeAccessIssue]


def raise_if_gated(config: Mapping[str, Any], reason: str) -> None:
    """Refuses a config.json that says its model is gated in a way that only this plugin understands.

    Raises:
        GatedModelRefusedError: It does.
    """
    found = [flag for flag in _GATE_FLAGS if config.get(flag)]
    if config.get("model_type") in _OWN_MODEL_TYPES:
        found.append(f"model_type={config['model_type']}")
    if found:
        raise GatedModelRefusedError(
            f"This model has gated attention ({', '.join(found)}), and the vllm_gated plugin cannot serve it: {reason} "
            "vLLM's own class would drop the gate and answer wrong, so the model is refused."
        )
