"""The README.md of a published model. Every figure comes from a training record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_LIMITS = """\
It is a demonstration that fits into a package: it has seen one library, a handful of megabytes. Its completions have
the form of Python and the habits of the standard library, but they are not programs to run, it knows no facts, and it
follows no instructions. The chat template only joins the messages' texts."""

_LICENCE = """\
The weights are under Apache-2.0, like the package. The training data is the source of the Python standard library,
which is under the Python Software Foundation License; completions may repeat pieces of it."""


def write_card(record: dict[str, Any], beside: dict[str, Any] | None, samples: Sequence[tuple[str, str]]) -> str:
    """The card of a model.

    Args:
        record: Its training record.
        beside: The record of the model it is compared with.
        samples: Prompts, each with the whole completed text.
    """
    settings = record["settings"]
    sections = [
        _front_matter(),
        f"# {record['recipe']}\n\n{_summary(record)}",
        f"## Use\n\n```\ngated-serving serve\n```\n\nTrained by `{_command(record)}`.",
        f"## Data\n\n{_data(record)}",
        f"## Training\n\n{_training(record)}",
        f"## Held-out loss\n\n{_losses(record, beside)}",
        "## Completions\n\nGreedy, from the published bfloat16 weights.\n\n" + "\n\n".join(map(_sample, samples)),
        f"## Limits\n\n{_LIMITS}\nTrained on sequences of {settings['data']['sequence_length']} tokens; longer "
        "contexts are untested.",
        f"## Licence\n\n{_LICENCE}",
    ]
    return "\n\n".join(sections) + "\n"


def _command(record: dict[str, Any]) -> str:
    compiled = " optimisation.compile=true" if record["settings"]["optimisation"]["compile"] else ""
    return f"gated-serving train-llm {record['recipe']}{compiled}"


def _front_matter() -> str:
    return (
        "---\nlicense: apache-2.0\nlanguage: code\npipeline_tag: text-generation\ntags: [gated-attention, python]\n---"
    )


def _summary(record: dict[str, Any]) -> str:
    model = record["settings"]["model"]
    unfinished = ""
    if "num_steps_planned" in record:
        unfinished = f" This is an early state: {record['num_steps']} of {record['num_steps_planned']} steps."
    return (
        f"A language model of {record['num_parameters'] / 1e6:.2f}M parameters whose attention is gated "
        f"({model['gate_granularity']}, position {model['gate_position']}; arXiv 2505.06708), with a byte-level BPE "
        f"tokenizer, trained on Python source code.{unfinished}"
    )


def _data(record: dict[str, Any]) -> str:
    python = f" {record['python']}" if "python" in record else ""
    text = f"The source of Python{python}'s standard library, without its tests"
    if "num_documents" not in record:
        return text + "."
    count, size = record["num_documents"], record["num_bytes"]
    return (
        f"{text}: {count['train']} files ({size['train'] / 1e6:.1f} MB) to train on, {count['held_out']} files "
        f"({size['held_out'] / 1e6:.2f} MB) held out. A file's own hash decides on which side it lies."
    )


def _training(record: dict[str, Any]) -> str:
    settings = record["settings"]
    step = settings["optimisation"]
    rate = step["learning_rate"] * step["gated_lr_multiplier"]
    lines = [
        f"- {record['num_tokens']:,} tokens in {record['num_steps']:,} steps of {step['batch_size']} x "
        f"{settings['data']['sequence_length']} tokens",
        f"- AdamW, peak learning rate {rate:g} ({step['schedule']} schedule), weight decay {step['weight_decay']:g}, "
        f"{step['precision']}",
        f"- {record['seconds'] / 60:.0f} minutes of wall time, evaluations included",
    ]
    if "device" in record:
        lines.append(f"- {record['device']}; torch {record['torch']}, transformers {record['transformers']}")
    if record.get("mean_gate"):
        lines.append(f"- mean gate by layer at the end: {', '.join(f'{gate:.3f}' for gate in record['mean_gate'])}")
    return "\n".join(lines)


def _losses(record: dict[str, Any], beside: dict[str, Any] | None) -> str:
    rows = [
        "| model | parameters | tokens | peak learning rate | loss (nats a token) | perplexity | bits a byte |",
        "|---|---|---|---|---|---|---|",
    ]
    rows += [_loss_row(one) for one in (record, beside) if one is not None]
    text = "\n".join(rows)
    if beside is None or "num_steps_planned" in record or "num_steps_planned" in beside:
        return text
    return f"{text}\n\nThe same tokenizer, data, order and budget; measured in float32 over all held-out tokens."


def _loss_row(record: dict[str, Any]) -> str:
    settings = record["settings"]
    step = settings["optimisation"]
    is_gated = settings["model"]["family"].startswith("gated")
    rate = step["learning_rate"] * (step["gated_lr_multiplier"] if is_gated else 1.0)
    loss = record["held_out_loss"]
    numbers = ("–", "–") if loss is None else (f"{loss:.4f}", f"{math.exp(loss):.2f}")  # noqa: RUF001
    bits = f"{record['held_out_bits_per_byte']:.4f}" if "held_out_bits_per_byte" in record else "–"  # noqa: RUF001
    return (
        f"| {record['recipe']} | {record['num_parameters'] / 1e6:.2f}M | {record['num_tokens']:,} | {rate:g} | "
        f"{numbers[0]} | {numbers[1]} | {bits} |"
    )


def _sample(sample: tuple[str, str]) -> str:
    prompt, text = sample
    text = "\n".join(line.rstrip() for line in text.splitlines()).rstrip()
    shown = prompt.replace("\n", "\\n")
    return f"Prompt `{shown}`:\n\n```python\n{text}\n```"
