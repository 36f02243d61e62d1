"""Named training runs. A recipe is a function that returns a whole configuration; overrides change few fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gated_serving.llm.training.settings import (
    DataSettings,
    ModelSettings,
    OptimisationSettings,
    RuntimeSettings,
    TokenizerSettings,
    TrainingRun,
)


def tiny_python() -> TrainingRun:
    """About 5M parameters with headwise gates, on the Python standard library's source; for a CPU."""
    return TrainingRun(
        name="tiny-python",
        model=ModelSettings(
            family="gated_qwen3",
            hidden_size=256,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            intermediate_size=704,
            max_position_embeddings=2048,
            gate_init_scale=0.5,
        ),
        data=DataSettings(source="stdlib", sequence_length=512),
        tokenizer=TokenizerSettings(vocab_size=4096),
        optimisation=OptimisationSettings(
            num_tokens=3_000_000, batch_size=4, learning_rate=2e-3, gated_lr_multiplier=1.5
        ),
        runtime=RuntimeSettings(log_steps=10, eval_steps=200, eval_sequences=64, save_steps=50, num_threads=1),
    )


def tiny_python_ungated() -> TrainingRun:
    """The shape, data and budget of ``tiny-python`` without gates, to compare."""
    run = tiny_python()
    model = dataclasses.replace(run.model, family="qwen3", gate_init_scale=1.0)
    return dataclasses.replace(run, name="tiny-python-ungated", model=model)


def tiny_qwen3_next() -> TrainingRun:
    """A small hybrid of gated DeltaNet, gated attention and experts (Qwen3-Next); trains on a CPU."""
    return TrainingRun(
        name="tiny-qwen3-next",
        model=ModelSettings(
            family="qwen3_next",
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            intermediate_size=256,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            extra={
                "linear_num_key_heads": 1,
                "linear_num_value_heads": 2,
                "linear_key_head_dim": 128,  # the width that vLLM's CPU kernels have
                "linear_value_head_dim": 128,
                "shared_expert_intermediate_size": 128,
            },
        ),
        # The recurrent layers would carry state from one packed document into the next.
        data=DataSettings(source="stdlib", sequence_length=256, layout="one_document"),
        tokenizer=TokenizerSettings(vocab_size=4096),
        optimisation=OptimisationSettings(num_tokens=1_000_000, batch_size=4, learning_rate=2e-3),
        runtime=RuntimeSettings(log_steps=10, eval_steps=200, eval_sequences=64, save_steps=50),
    )


def gated_1_7b() -> TrainingRun:
    """The released dense 1.7B shape with headwise gates; for several GPUs."""
    return TrainingRun(
        name="gated-1.7b",
        model=ModelSettings(
            family="gated_qwen3",
            hidden_size=2048,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=6144,
            max_position_embeddings=4096,
            vocab_size=152_064,
            gate_init_scale=0.5,
        ),
        data=_web_text(),
        tokenizer=TokenizerSettings(path="Qwen/Qwen3-0.6B"),
        optimisation=OptimisationSettings(
            num_tokens=30_000_000_000,
            batch_size=4,
            gradient_accumulation_steps=8,
            learning_rate=2e-3,
            gated_lr_multiplier=2.0,
            warmup_share=0.01,
            decay_share=0.2,
            precision="bf16",
            compile=True,
            gradient_checkpointing=True,
        ),
        runtime=_sharded("Qwen3DecoderLayer"),
    )


def gated_1_7b_elementwise() -> TrainingRun:
    """The released dense 1.7B shape with elementwise gates; for several GPUs."""
    run = gated_1_7b()
    # The feed-forward is narrower by about what the gate adds, as in the released pair.
    model = dataclasses.replace(run.model, gate_granularity="elementwise", intermediate_size=5504)
    return dataclasses.replace(run, name="gated-1.7b-elementwise", model=model)


def gated_moe_15a2b() -> TrainingRun:
    """The mixture of 15B parameters, 2B of them active, with headwise gates; for several GPUs.

    Layers, heads and hidden size follow from the parameters that arXiv 2505.06708 counts for its gates (Table 1), and
    it names 128 experts of which 8 are used. The width of an expert is not published; 768 makes 15.6B parameters in
    all and 2.0B active. The paper speaks of 2.54B active, which no width reaches together with 15B in all and 8 of 128
    experts, unless there are parts that it does not describe.
    """
    run = gated_1_7b()
    model = dataclasses.replace(
        run.model,
        family="gated_qwen3_moe",
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        extra={"output_router_logits": True},  # adds the loss that balances the experts
    )
    optimisation = dataclasses.replace(run.optimisation, batch_size=2, gradient_accumulation_steps=16, compile=False)
    return dataclasses.replace(
        run,
        name="gated-moe-15a2b",
        model=model,
        optimisation=optimisation,
        runtime=_sharded("Qwen3MoeDecoderLayer"),
    )


def _web_text() -> DataSettings:
    return DataSettings(
        source="HuggingFaceFW/fineweb-edu",
        format="dataset",
        dataset_config="sample-100BT",
        sequence_length=4096,
        held_out_share=0.0005,
        num_processes=16,
    )


def _sharded(layer: str) -> RuntimeSettings:
    return RuntimeSettings(
        log_steps=10, eval_steps=1000, eval_sequences=1024, save_steps=500, fsdp=True, fsdp_layer=layer
    )


RECIPES: dict[str, Callable[[], TrainingRun]] = {
    "tiny-python": tiny_python,
    "tiny-python-ungated": tiny_python_ungated,
    "tiny-qwen3-next": tiny_qwen3_next,
    "gated-1.7b": gated_1_7b,
    "gated-1.7b-elementwise": gated_1_7b_elementwise,
    "gated-moe-15a2b": gated_moe_15a2b,
}
"""Every recipe by the name the command line knows."""


def find_recipe(name: str) -> TrainingRun:
    """The configuration of a recipe.

    Raises:
        ValueError: There is no such recipe.
    """
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}; known are {', '.join(RECIPES)}")
    return RECIPES[name]()
