"""A training run of a few seconds, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gated_serving.llm.training.overrides import apply_overrides
from gated_serving.llm.training.settings import (
    DataSettings,
    ModelSettings,
    OptimisationSettings,
    RuntimeSettings,
    TokenizerSettings,
    TrainingRun,
)


def write_documents(folder: Path, *, count: int = 60) -> Path:
    """Writes ``count`` Python files of varied length."""
    folder.mkdir(exist_ok=True)
    for index in range(count):
        body = "".join(f"    total += {number} * value_{index}\n" for number in range(1 + index % 7))
        (folder / f"module_{index:02}.py").write_text(
            f"def f_{index}(value_{index}):\n    total = 0\n{body}    return total\n"
        )
    return folder


def tiny_run(documents: Path, *overrides: str, **model: Any) -> TrainingRun:
    """A gated model of about 30,000 parameters, 40 steps, a checkpoint every 10."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    run = TrainingRun(
        name="tiny",
        model=ModelSettings(**sizes | model),
        data=DataSettings(source=str(documents), held_out_share=0.2, sequence_length=32),
        tokenizer=TokenizerSettings(vocab_size=300),
        optimisation=OptimisationSettings(
            num_tokens=40 * 2 * 32, batch_size=2, learning_rate=1e-2, gated_lr_multiplier=2.0, warmup_share=0.1
        ),
        runtime=RuntimeSettings(log_steps=5, eval_steps=20, save_steps=10, keep_checkpoints=4, num_threads=1),
    )
    return apply_overrides(run, overrides)
