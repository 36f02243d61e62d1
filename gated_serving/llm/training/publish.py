"""Turns a run into a small model folder to ship: weights in bfloat16, and a card whose figures come from the logs.

``python -m gated_serving.llm.training.publish RUN DESTINATION [--beside UNGATED_RUN]``
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from transformers import AutoTokenizer, PreTrainedModel

from gated_serving.llm.training import checkpoints
from gated_serving.llm.training.model_card import write_card
from gated_serving.llm.training.session import METRICS, RECORD
from gated_serving.llm.training.telemetry import read_metrics

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
PROMPTS = (
    "def fibonacci(n):",
    "import os\n\nclass ",
    "for i in range(",
    'def read_file(path):\n    """Read',
)
_COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SAMPLE_TOKENS = 48


def publish(run: Path, destination: Path, *, beside: Path | None = None) -> None:
    """Writes the model of a run, finished or not, to ``destination``; its config comes last.

    Args:
        run: Folder of a run. Where it is not finished, its last whole checkpoint is taken and the card says so.
        destination: Folder of the published model; what it held of these files is replaced.
        beside: Folder of a run to compare the held-out loss with.

    Raises:
        FileNotFoundError: The run has neither a finished model nor a checkpoint.
    """
    source = run if checkpoints.is_whole(run) else checkpoints.last_complete(run / "checkpoints")
    if source is None:
        raise FileNotFoundError(f"{run} has neither a finished model nor a whole checkpoint")
    record = read_record(run)
    staging = destination.with_name(destination.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    _cast_weights(source / WEIGHTS, staging / WEIGHTS)
    config = json.loads((source / "config.json").read_text())
    config |= {"dtype": "bfloat16", "use_cache": True}
    (staging / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name in _COPIED:
        shutil.copyfile(source / name, staging / name)
    (staging / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    samples = complete(staging, PROMPTS)
    (staging / "README.md").write_text(write_card(record, read_record(beside) if beside else None, samples))
    checkpoints.publish_files(staging, destination)


def read_record(run: Path) -> dict[str, Any]:
    """The training record of a run; of an unfinished one what can be said so far, with ``num_steps_planned``."""
    path = run / RECORD
    if checkpoints.is_whole(run):
        return json.loads(path.read_text())
    last = checkpoints.last_complete(run / "checkpoints")
    if last is None:
        raise FileNotFoundError(f"{run} has neither a finished model nor a whole checkpoint")
    step = checkpoints.step_of(last)
    state = json.loads((last / "trainer_state.json").read_text())
    metrics = [line for line in read_metrics(run / METRICS) if line["step"] <= step]
    settings = json.loads((run / "run.json").read_text())
    losses = [line["loss"] for line in metrics if "loss" in line]
    evaluated = [line["eval_loss"] for line in metrics if "eval_loss" in line]
    return {
        "recipe": settings["name"],
        "settings": settings,
        "num_parameters": _count_parameters(last / WEIGHTS),
        "num_tokens": metrics[-1]["tokens"],
        "num_steps": step,
        "num_steps_planned": state["max_steps"],
        "seconds": metrics[-1]["seconds"],
        "train_loss": losses[-1] if losses else None,
        "held_out_loss": evaluated[-1] if evaluated else None,
    }


def complete(folder: Path, prompts: Sequence[str], *, num_tokens: int = _SAMPLE_TOKENS) -> list[tuple[str, str]]:
    """Greedy completions of a model folder, each with its prompt."""
    from gated_serving.llm.training.architecture import model_class

    config = json.loads((folder / "config.json").read_text())
    model = model_class(config["model_type"]).from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples: list[tuple[str, str]] = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
            max_new_tokens=num_tokens, do_sample=False,
        )  # fmt: skip
        samples.append((prompt, tokenizer.decode(output[0], skip_special_tokens=True)))
    return samples


def _cast_weights(source: Path, destination: Path) -> None:
    with safe_open(source, framework="pt") as file:
        tensors = {name: file.get_tensor(name).to(torch.bfloat16) for name in file.keys()}  # noqa: SIM118  # no mapping
    destination.write_bytes(save(tensors, metadata={"format": "pt"}))  # save_file would let only its owner read it


def _count_parameters(weights: Path) -> int:
    with safe_open(weights, framework="pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118  # no mapping


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Turn a run into a model folder to ship.")
    parser.add_argument("run", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--beside", type=Path, default=None, help="a run to compare the held-out loss with")
    parsed = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    publish(parsed.run, parsed.destination, beside=parsed.beside)
    logger.info("published to %s", parsed.destination)


if __name__ == "__main__":
    main()
