"""Configs of the gated model families: transformers' own Qwen3 configs plus the gate's fields.

The gate's fields are flat (``gate_position``, ``gate_granularity``, ...) so that ``--hf-overrides`` and recipes can
name them; ``config.gate`` is the validated whole.
"""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config, Qwen3MoeConfig

from gated_serving._auto_classes import register_models
from gated_serving.attention import AttentionShape, GateConfig
from gated_serving.llm.models.official import is_official_gated, translate_official


class _GatedConfigMixin:
    """What both families add: the gate, the choice of qk-norm, and reading the released checkpoints' flags."""

    @property
    def gate(self) -> GateConfig:
        """The gate of every attention layer.

        Raises:
            ValueError: A ``gate_*`` field is wrong, or does not fit the rest of the config; the message names it.
        """
        return GateConfig.from_fields({name: value for name, value in vars(self).items() if name.startswith("gate_")})

    @property
    def attention_shape(self) -> AttentionShape:
        """Sizes of one attention layer, of the whole model and not of one tensor-parallel rank."""
        num_heads = getattr(self, "num_attention_heads")  # noqa: B009  # fields come from the transformers class
        return AttentionShape(
            hidden_size=getattr(self, "hidden_size"),  # noqa: B009
            num_heads=num_heads,
            num_kv_heads=getattr(self, "num_key_value_heads"),  # noqa: B009
            head_dim=getattr(self, "head_dim", None) or getattr(self, "hidden_size") // num_heads,  # noqa: B009
        )

    def _finish(self) -> None:
        """Checks the gate, and lets the auto classes know the models that such a config is for."""
        gate, shape = self.gate, self.attention_shape
        gate.num_gate_rows(shape)
        if gate.init_bias and gate.is_packed and not getattr(self, "attention_bias"):  # noqa: B009
            raise ValueError(
                f"gate_init_bias={gate.init_bias}: the gate's rows lie in q_proj, which has no bias "
                "(attention_bias=false); set attention_bias=true, or gate_packing='separate' with gate_bias=true"
            )
        register_models()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, and reads the released checkpoints' config.json too."""
        if is_official_gated(config_dict):
            config_dict = translate_official(config_dict)
        return super().from_dict(config_dict, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


class GatedQwen3Config(_GatedConfigMixin, Qwen3Config):
    """A dense Qwen3 with gated attention; see ``GateConfig`` for the ``gate_*`` fields.

    Args:
        use_qk_norm: Whether queries and keys are RMS-normalised per head.
    """

    model_type = "gated_qwen3"

    use_qk_norm: bool = True
    gate_position: str = "G1"
    gate_granularity: str = "headwise"
    gate_sharing: str = "per_head"
    gate_operation: str = "multiply"
    gate_activation: str = "sigmoid"
    gate_input: str = "hidden_states"
    gate_packing: str = "kv_group"
    gate_bias: bool = False
    gate_top_k_share: float | int | None = None
    gate_init_scale: float | int = 1.0
    gate_init_bias: float | int = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self._finish()


class GatedQwen3MoeConfig(_GatedConfigMixin, Qwen3MoeConfig):
    """A mixture-of-experts Qwen3 with gated attention; see ``GateConfig`` for the ``gate_*`` fields.

    Args:
        head_dim: Channels of a head; None means ``hidden_size / num_attention_heads``.
        use_qk_norm: Whether queries and keys are RMS-normalised per head.
    """

    model_type = "gated_qwen3_moe"

    head_dim: int | None = None
    use_qk_norm: bool = True
    gate_position: str = "G1"
    gate_granularity: str = "headwise"
    gate_sharing: str = "per_head"
    gate_operation: str = "multiply"
    gate_activation: str = "sigmoid"
    gate_input: str = "hidden_states"
    gate_packing: str = "kv_group"
    gate_bias: bool = False
    gate_top_k_share: float | int | None = None
    gate_init_scale: float | int = 1.0
    gate_init_bias: float | int = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        self._finish()
