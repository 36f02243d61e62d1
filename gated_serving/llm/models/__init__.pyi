from .configuration import (
    GatedQwen3Config as GatedQwen3Config,
    GatedQwen3MoeConfig as GatedQwen3MoeConfig,
)
from .dense import (
    GatedQwen3ForCausalLM as GatedQwen3ForCausalLM,
    GatedQwen3Model as GatedQwen3Model,
)
from .moe import (
    GatedQwen3MoeForCausalLM as GatedQwen3MoeForCausalLM,
    GatedQwen3MoeModel as GatedQwen3MoeModel,
)

__all__ = [
    "GatedQwen3Config",
    "GatedQwen3ForCausalLM",
    "GatedQwen3Model",
    "GatedQwen3MoeConfig",
    "GatedQwen3MoeForCausalLM",
    "GatedQwen3MoeModel",
]
