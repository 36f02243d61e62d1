"""The whole configuration of a training run, as frozen dataclasses; a recipe is a function that returns one.

Every section checks its own values when it is made. ``TrainingRun`` checks what two sections must agree on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from gated_serving.attention import GateConfig
from gated_serving.run_settings import require, require_above_0, require_at_least

Family = Literal["gated_qwen3", "gated_qwen3_moe", "qwen3", "qwen3_moe", "qwen3_next"]
GATED_FAMILIES: tuple[Family, ...] = ("gated_qwen3", "gated_qwen3_moe")
MOE_FAMILIES: tuple[Family, ...] = ("gated_qwen3_moe", "qwen3_moe", "qwen3_next")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Architecture and sizes; names are those of transformers' configs, and so are the ``gate_*`` fields.

    Args:
        family: Which model classes.
        hidden_size: Channels of the residual stream.
        num_hidden_layers: Layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key/value heads.
        head_dim: Channels of a head.
        intermediate_size: Channels of a dense feed-forward layer.
        max_position_embeddings: Longest context the config admits, in tokens; at least the training length.
        rope_theta: Base of the rotary embedding.
        tie_word_embeddings: Whether input and output embeddings are one matrix.
        initializer_range: Standard deviation of the weights at the start.
        attention_bias: Whether the attention projections have biases.
        vocab_size: Rows of the embedding; None takes the tokenizer's size.
        num_experts: Experts of a mixture; only for the mixture families.
        num_experts_per_tok: Experts that a token uses.
        moe_intermediate_size: Channels of an expert.
        gate_position: See ``GateConfig`` for this and the other ``gate_*`` fields; only for the gated families.
        gate_granularity: One value a head or a channel.
        gate_sharing: Per head, or shared.
        gate_operation: Multiply or add.
        gate_activation: From logit to score.
        gate_input: Hidden states, or a constant.
        gate_packing: Where the rows lie on disk.
        gate_bias: Bias of a separate gate projection.
        gate_top_k_share: Share of gate values kept.
        gate_init_scale: Standard deviation of the gate's rows at the start, in units of ``initializer_range``.
        gate_init_bias: The gate's bias at the start.
        extra: Further fields of the transformers config, by name.
    """

    family: Family = "gated_qwen3"
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    attention_bias: bool = False
    vocab_size: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    gate_position: str = "G1"
    gate_granularity: str = "headwise"
    gate_sharing: str = "per_head"
    gate_operation: str = "multiply"
    gate_activation: str = "sigmoid"
    gate_input: str = "hidden_states"
    gate_packing: str = "kv_group"
    gate_bias: bool = False
    gate_top_k_share: float | None = None
    gate_init_scale: float = 1.0
    gate_init_bias: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_at_least(
            self, 1, "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "max_position_embeddings", "vocab_size",
        )  # fmt: skip
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even, for the rotary embedding")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        require(heads % kv_heads == 0, "num_attention_heads", heads,
                f"a multiple of num_key_value_heads, which is {kv_heads}")  # fmt: skip
        require_above_0(self, "rope_theta", "initializer_range")
        for name in ("gate_init_scale", "gate_init_bias"):
            require(math.isfinite(getattr(self, name)), name, getattr(self, name), "a finite number")
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            value = getattr(self, name)
            if self.family in MOE_FAMILIES:
                require(value is not None and value > 0, name, value, f"given for the family {self.family!r}")
            else:
                require(value is None, name, value, f"left out: the family {self.family!r} has no experts")
        if self.num_experts is not None and self.num_experts_per_tok is not None:
            require(self.num_experts_per_tok <= self.num_experts, "num_experts_per_tok", self.num_experts_per_tok,
                    f"at most num_experts, which is {self.num_experts}")  # fmt: skip
        if self.is_gated:
            GateConfig.from_fields(self.gate_fields())
        elif changed := [name for name, value in self.gate_fields().items() if value != _GATE_DEFAULTS[name]]:
            raise ValueError(f"{changed[0]}={getattr(self, changed[0])!r}: the family {self.family!r} has no such gate")

    @property
    def is_gated(self) -> bool:
        """Whether the gate is this project's own; Qwen3-Next has its own gate, which is part of the family."""
        return self.family in GATED_FAMILIES

    def gate_fields(self) -> dict[str, Any]:
        """The ``gate_*`` fields, as a model config takes them."""
        return {name: getattr(self, name) for name in _GATE_DEFAULTS}


_GATE_DEFAULTS: dict[str, Any] = GateConfig().to_fields()


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which documents, and how they become sequences.

    Args:
        source: ``stdlib`` (the running interpreter's own standard library), a file, a folder, a glob pattern, or the
            name of a Hugging Face dataset.
        format: What the source holds. ``auto`` goes by its name: an existing path or pattern by its files' endings,
            anything else is a dataset's name.
        pattern: Which files of a folder are read.
        text_field: Column that holds the text (JSONL, Parquet, datasets).
        dataset_config: Configuration of a Hugging Face dataset.
        dataset_split: Split of a Hugging Face dataset.
        max_documents: Read at most this many documents, the first ones.
        held_out_share: Share of documents kept apart for evaluation; a document's own hash decides.
        sequence_length: Tokens of a training sequence.
        layout: ``packed`` fills a sequence with several documents, which do not see each other; ``one_document`` pads
            instead. Recurrent layers (Qwen3-Next) carry state over document boundaries, so they need the latter.
        num_processes: Processes that tokenise.
    """

    source: str
    format: Literal["auto", "text", "jsonl", "parquet", "dataset"] = "auto"
    pattern: str = "**/*"
    text_field: str = "text"
    dataset_config: str | None = None
    dataset_split: str = "train"
    max_documents: int | None = None
    held_out_share: float = 0.03
    sequence_length: int = 512
    layout: Literal["packed", "one_document"] = "packed"
    num_processes: int | None = None

    def __post_init__(self) -> None:
        require(bool(self.source), "source", self.source, "a path, a pattern, 'stdlib' or a dataset's name")
        require(0 < self.held_out_share < 1, "held_out_share", self.held_out_share, "above 0 and below 1")
        require(self.sequence_length >= 2, "sequence_length", self.sequence_length, "at least 2")
        require(self.max_documents is None or self.max_documents > 1, "max_documents", self.max_documents,
                "at least 2, or null for all")  # fmt: skip
        require(bool(self.pattern) and not PurePath(self.pattern).is_absolute(), "pattern", self.pattern,
                "a pattern of paths inside the folder, such as '**/*.py'")  # fmt: skip
        require_at_least(self, 1, "num_processes")


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """A tokenizer that is given, or one trained on the training documents.

    Args:
        path: Folder or name of a tokenizer to use; None trains one.
        vocab_size: Entries of a trained tokenizer, with its 256 bytes and its end-of-text token.
    """

    path: str | None = None
    vocab_size: int = 4096

    def __post_init__(self) -> None:
        require(self.vocab_size >= 257, "vocab_size", self.vocab_size, "at least 257 (every byte and end-of-text)")


@dataclass(frozen=True, kw_only=True)
class OptimisationSettings:
    """Budget, schedule and numerics.

    Args:
        num_tokens: Tokens to train on; rounded up to whole steps.
        batch_size: Sequences a device and micro-step.
        gradient_accumulation_steps: Micro-steps a step.
        learning_rate: Peak learning rate of an ungated model.
        gated_lr_multiplier: What a gated model's peak is multiplied by; gates bear 1.5 to 2.0.
        schedule: ``wsd`` (warm-up, stable, decay) or ``cosine``.
        warmup_share: Share of the steps that warm up.
        decay_share: Share of the steps that decay (``wsd``).
        min_lr_share: Learning rate at the end, in units of the peak.
        adam_beta1: AdamW's first decay rate.
        adam_beta2: AdamW's second decay rate.
        weight_decay: AdamW's weight decay, on matrices.
        max_grad_norm: Gradients are clipped to this norm; 0 does not clip.
        precision: ``fp32``, or ``bf16`` autocast over float32 weights.
        compile: Whether the model runs through torch.compile.
        gradient_checkpointing: Whether activations are computed again in the backward pass.
        seed: Seed of weights and of the order of sequences.
    """

    num_tokens: int
    batch_size: int = 8
    gradient_accumulation_steps: int = 1
    learning_rate: float = 2e-3
    gated_lr_multiplier: float = 1.5
    schedule: Literal["wsd", "cosine"] = "wsd"
    warmup_share: float = 0.03
    decay_share: float = 0.3
    min_lr_share: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    gradient_checkpointing: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_tokens", "batch_size", "gradient_accumulation_steps")
        require_above_0(self, "learning_rate", "gated_lr_multiplier")
        for name in ("adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "from 0 to below 1")
        for name in ("weight_decay", "max_grad_norm"):
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "a finite number, at least 0")
        for name in ("warmup_share", "decay_share", "min_lr_share"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "from 0 to 1")
        require(self.warmup_share + self.decay_share <= 1, "decay_share", self.decay_share,
                f"at most 1 - warmup_share, which is {1 - self.warmup_share:g}")  # fmt: skip
        require(0 <= self.seed < 2**32, "seed", self.seed, "from 0 to 2**32 - 1")


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """How the run is watched, saved and spread.

    Args:
        log_steps: Steps between two lines of the logs.
        eval_steps: Steps between two evaluations on the held-out documents.
        eval_sequences: Sequences of such an evaluation, the first ones; None takes all. The last one takes all.
        save_steps: Steps between two checkpoints; a multiple of ``log_steps``, so that a resumed run logs the same
            averages as an unbroken one.
        keep_checkpoints: Checkpoints kept; at least 2, so that one is whole while the next is written.
        num_threads: Threads of one process on the CPU; None leaves it to torch.
        fsdp: Whether parameters are sharded over the processes that accelerate or torchrun started.
        fsdp_layer: Class of the layers that are sharded as a unit.
    """

    log_steps: int = 10
    eval_steps: int = 200
    eval_sequences: int | None = None
    save_steps: int = 200
    keep_checkpoints: int = 2
    num_threads: int | None = None
    fsdp: bool = False
    fsdp_layer: str | None = None

    def __post_init__(self) -> None:
        require_at_least(self, 1, "log_steps", "eval_steps", "save_steps", "num_threads")
        require(self.eval_sequences is None or self.eval_sequences >= 1, "eval_sequences", self.eval_sequences,
                "at least 1, or null for all")  # fmt: skip
        require(self.keep_checkpoints >= 2, "keep_checkpoints", self.keep_checkpoints, "at least 2")
        require(self.save_steps % self.log_steps == 0, "save_steps", self.save_steps,
                f"a multiple of log_steps, which is {self.log_steps}")  # fmt: skip
        require(not self.fsdp or self.fsdp_layer is not None, "fsdp_layer", self.fsdp_layer,
                "the name of the layer class when fsdp is true")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A whole run: what a recipe returns.

    Raises:
        ValueError: Two sections do not agree.
    """

    name: str
    model: ModelSettings
    data: DataSettings
    tokenizer: TokenizerSettings
    optimisation: OptimisationSettings
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)

    def __post_init__(self) -> None:
        require(
            self.data.sequence_length <= self.model.max_position_embeddings,
            "data.sequence_length", self.data.sequence_length,
            f"at most model.max_position_embeddings, which is {self.model.max_position_embeddings}",
        )  # fmt: skip
        if self.model.family == "qwen3_next" and self.data.layout != "one_document":
            raise ValueError(
                f"data.layout={self.data.layout!r}: the recurrent layers of model.family='qwen3_next' carry state from "
                "one document into the next; use 'one_document'"
            )

    @property
    def peak_learning_rate(self) -> float:
        """The peak learning rate, with the multiplier where the model is gated."""
        multiplier = self.optimisation.gated_lr_multiplier if self.model.is_gated else 1.0
        return self.optimisation.learning_rate * multiplier

    def num_steps(self, num_devices: int = 1) -> int:
        """Optimiser steps that the token budget makes."""
        step = self.optimisation
        tokens = step.batch_size * step.gradient_accumulation_steps * self.data.sequence_length * num_devices
        return -(-step.num_tokens // tokens)
