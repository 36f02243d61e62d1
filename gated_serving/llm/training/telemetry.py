"""What a run writes down: one JSON line for every log event, and the mean gate of every layer at each evaluation."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gated_serving.attention import gate_scores
from gated_serving.llm.models.attention import GatedAttention

logger = logging.getLogger(__name__)

_NAMES = {"learning_rate": "lr", "grad_norm": "grad_norm", "loss": "loss", "eval_loss": "eval_loss"}
_LABELS = {"loss": "loss", "eval_loss": "held-out loss"}


class MetricsLog(TrainerCallback):
    """Appends to ``metrics.jsonl``: step, tokens, seconds and, as they come, loss, lr, grad_norm, tokens_per_s,
    eval_loss and mean_gate (one value a layer).

    Args:
        path: The file. Lines past the step that a run resumes from are dropped, so that no step appears twice.
        tokens_per_step: Tokens of one optimiser step over all devices.
        logs_lines: Whether the losses also go to the log, a line each, with the time that is left.
    """

    def __init__(self, path: Path, tokens_per_step: int, *, logs_lines: bool = False) -> None:
        self._path = path
        self._tokens_per_step = tokens_per_step
        self._logs_lines = logs_lines
        self._last: tuple[float, int] | None = None
        self._seconds_before = 0.0
        self._started = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Drops what lies past the step that the run starts from."""
        self._started = time.perf_counter()
        self._last = (self._started, state.global_step)
        if not state.is_world_process_zero:
            return
        kept = [line for line in read_metrics(self._path) if line["step"] <= state.global_step]
        self._seconds_before = kept[-1]["seconds"] if kept else 0.0
        # Written beside and exchanged, so that a kill in between loses nothing.
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        partial.replace(self._path)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes the losses and rates that the Trainer reports."""
        values = {new: logs[old] for old, new in _NAMES.items() if logs and old in logs}
        if not values or not state.is_world_process_zero:
            return
        now = time.perf_counter()
        if "loss" in values and self._last is not None:
            then, step = self._last
            values["tokens_per_s"] = round((state.global_step - step) * self._tokens_per_step / (now - then), 1)
        self._append(state, values)
        if self._logs_lines:
            logger.info("%s", describe_progress(state.global_step, state.max_steps, self._tokens_per_step, values))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the mean gates, over the first held-out batch."""
        model, batches = kwargs.get("model"), kwargs.get("eval_dataloader")
        if model is not None and batches is not None and not args.fsdp:
            batch = next(iter(batches), None)
            means = mean_gates(model, batch) if batch is not None else []
            if means and state.is_world_process_zero:
                self._append(state, {"mean_gate": means})
        self._last = (time.perf_counter(), state.global_step)  # an evaluation's time is not training time

    def _append(self, state: TrainerState, values: dict[str, Any]) -> None:
        now = time.perf_counter()
        line = {
            "step": state.global_step,
            "tokens": state.global_step * self._tokens_per_step,
            "seconds": round(self._seconds_before + now - self._started, 2),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line | values) + "\n")
        if "loss" in values:
            self._last = (now, state.global_step)


def describe_progress(step: int, num_steps: int, tokens_per_step: int, values: dict[str, Any]) -> str:
    """One line of a log: how far the run is, its loss or held-out loss, its speed, and the time it has left.

    Args:
        step: Optimiser steps done.
        num_steps: Optimiser steps of the whole run.
        tokens_per_step: Tokens of one optimiser step over all devices.
        values: What ``metrics.jsonl`` gets; ``loss``, ``eval_loss`` (nats a token) and ``tokens_per_s`` are told.
    """
    parts = [f"step {step}/{num_steps}", f"{step * tokens_per_step:,} tokens"]
    parts += [f"{label} {values[name]:.4f}" for name, label in _LABELS.items() if name in values]
    if rate := values.get("tokens_per_s"):
        left = round((num_steps - step) * tokens_per_step / rate)
        parts += [f"{rate:,.0f} tokens/s", f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"]
    return ", ".join(parts)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads ``metrics.jsonl``; a last line that a killed process left unfinished is skipped."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@torch.no_grad()
def mean_gates(model: nn.Module, batch: dict[str, Tensor]) -> list[float]:
    """The mean gate score of every gated layer over one batch, in the order of the layers."""
    means: list[float] = []

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(layer, GatedAttention)
        _, logits = layer._project_query(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
        means.append(round(gate_scores(logits.float(), layer.gate).mean().item(), 4))

    layers = [layer for layer in model.modules() if isinstance(layer, GatedAttention)]
    if not layers:
        return []
    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        device = next(model.parameters()).device
        model(**{name: value.to(device) for name, value in batch.items() if name != "labels"}, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return means
