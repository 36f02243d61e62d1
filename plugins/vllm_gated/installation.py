"""What ``register()`` does where all is well, in the order of dependence. Raises where something is not."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

import wrapt

from vllm_gated.refusal import refuse_gated_models

logger = logging.getLogger(__name__)

SUPPORTED_VERSIONS = ">=0.32,<0.34"

ARCHITECTURES = {
    "GatedQwen3ForCausalLM": "vllm_gated.dense:GatedQwen3ForCausalLM",
    "GatedQwen3MoeForCausalLM": "vllm_gated.moe:GatedQwen3MoeForCausalLM",
}

# What to run once vLLM has imported a module. Importing these layers already at registration would slow down the
# processes that have no model, and can break those that vLLM forks.
GUARDS = {
    "vllm.model_executor.layers.linear": "vllm_gated.guard:guard_layers",
    "vllm.model_executor.layers.fused_moe.routed_experts": "vllm_gated.expert_guard:guard_experts",
    "vllm.model_executor.model_loader.base_loader": "vllm_gated.unused_tensors:guard_loader",
}


class UnsupportedVersionError(RuntimeError):
    """The plugin was not written for this vLLM."""


def install() -> None:
    """Makes vLLM serve the gated families, and guards every load; safe to call again.

    Raises:
        UnsupportedVersionError: vLLM is too old or too new.
        Exception: Whatever an import or a change in vLLM causes.
    """
    check_version()
    from vllm import ModelRegistry

    from vllm_gated import config_reading

    for module, location in GUARDS.items():
        wrapt.register_post_import_hook(functools.partial(_guard, location), module)
    for architecture, location in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, location)
    config_reading.install()


def check_version() -> None:
    """Compares vLLM's version with ``SUPPORTED_VERSIONS``.

    Raises:
        UnsupportedVersionError: It lies outside.
    """
    import vllm
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        is_supported = SpecifierSet(SUPPORTED_VERSIONS).contains(Version(vllm.__version__), prereleases=True)
    except InvalidVersion:
        is_supported = False
    if not is_supported:
        raise UnsupportedVersionError(
            f"vLLM is {vllm.__version__}, and the plugin needs {SUPPORTED_VERSIONS}; install such a vLLM, or a "
            "release of gated-serving for yours."
        )


def _guard(location: str, _imported: ModuleType) -> None:
    """Runs a guard's installation. A failure must not break the import, which every model needs, only gated models."""
    module, _, function = location.partition(":")
    try:
        getattr(importlib.import_module(module), function)()
    except Exception as error:
        logger.exception("%s failed; gated models will be refused", location)
        refuse_gated_models(f"{location} failed with {type(error).__name__}: {error}")
