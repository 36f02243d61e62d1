"""transformers' Trainer, with checkpoints that are marked when they are whole."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from gated_serving.llm.training.checkpoints import mark_complete
from gated_serving.llm.training.packing import IGNORED_LABEL, collate
from gated_serving.llm.training.settings import TrainingRun


class ResumableTrainer(Trainer):
    """The Trainer; a checkpoint's marker is written when every process has written its part.

    Attributes:
        has_stepped: Whether training itself has begun, so that a checkpoint to resume from has been read.
    """

    has_stepped = False

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One micro-step."""
        self.has_stepped = True
        return super().training_step(*args, **kwargs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Every held-out sequence, also where they do not fill a batch; only training needs full batches."""
        drop_last, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.args.dataloader_drop_last = drop_last

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        try:
            super()._save_checkpoint(model, trial)
        except (RuntimeError, SafetensorError) as error:  # both also mean a full disk
            raise OSError(f"the checkpoint of step {self.state.global_step} was not written: {error}") from error
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            folder = Path(str(self.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            mark_complete(folder)


def training_arguments(run: TrainingRun, output: Path, num_steps: int, *, progress: bool) -> TrainingArguments:
    """The Trainer's arguments of a run.

    Args:
        run: The settings.
        output: The run's folder; checkpoints go to ``checkpoints`` and TensorBoard's files to ``tensorboard`` in it.
        num_steps: Optimiser steps.
        progress: Whether to show a progress bar.
    """
    step, runtime = run.optimisation, run.runtime
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(output / "tensorboard")  # the Trainer takes it from nowhere else
    warmup = math.ceil(num_steps * step.warmup_share)
    schedule: dict[str, Any]
    if step.schedule == "wsd":
        kind = "warmup_stable_decay"
        schedule = {
            "num_decay_steps": math.floor(num_steps * step.decay_share),
            "decay_type": "linear",
            "min_lr_ratio": step.min_lr_share,
        }
    else:
        kind = "cosine_with_min_lr"
        schedule = {"min_lr_rate": step.min_lr_share}
    return TrainingArguments(
        output_dir=str(output / "checkpoints"),
        max_steps=num_steps,
        use_cpu=not torch.accelerator.is_available(),
        per_device_train_batch_size=step.batch_size,
        per_device_eval_batch_size=step.batch_size,
        gradient_accumulation_steps=step.gradient_accumulation_steps,
        learning_rate=run.peak_learning_rate,
        lr_scheduler_type=kind,
        lr_scheduler_kwargs=schedule,
        warmup_steps=warmup,
        adam_beta1=step.adam_beta1,
        adam_beta2=step.adam_beta2,
        weight_decay=step.weight_decay,
        max_grad_norm=step.max_grad_norm,
        bf16=step.precision == "bf16",
        torch_compile=step.compile,
        gradient_checkpointing=step.gradient_checkpointing and not runtime.fsdp,
        seed=step.seed,
        data_seed=step.seed,
        logging_steps=runtime.log_steps,
        logging_nan_inf_filter=False,  # a loss that is not a number must be seen
        eval_strategy="steps",
        eval_steps=runtime.eval_steps,
        save_strategy="steps",
        save_steps=runtime.save_steps,
        save_total_limit=runtime.keep_checkpoints,
        prediction_loss_only=True,
        remove_unused_columns=False,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=["tensorboard"],
        disable_tqdm=not progress,
        fsdp=True if runtime.fsdp else None,  # pyright: ignore[reportArgumentType]  # declared str, documented bool
        fsdp_config=_fsdp_config(run) if runtime.fsdp else None,
    )


def _fsdp_config(run: TrainingRun) -> dict[str, Any]:
    return {
        "version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": [run.runtime.fsdp_layer],
        "activation_checkpointing": run.optimisation.gradient_checkpointing,
        "state_dict_type": "FULL_STATE_DICT",
    }


@torch.no_grad()
def held_out_loss(model: nn.Module, sequences: Dataset, batch_size: int) -> tuple[float, int]:
    """The mean negative log-likelihood over every predicted held-out token, in nats, and how many there are.

    The Trainer's own ``eval_loss`` is a mean over batches, in which tokens of shorter sequences weigh more.
    """
    model.eval()
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for batch in DataLoader(sequences, batch_size=batch_size, collate_fn=collate):  # pyright: ignore[reportArgumentType]
        batch = {name: value.to(device) for name, value in batch.items()}
        labels = batch.pop("labels")[:, 1:]
        logits = model(**batch, use_cache=False).logits[:, :-1].float()
        total += F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        ).item()
        count += int((labels != IGNORED_LABEL).sum())
    return (total / count if count else math.nan), count
