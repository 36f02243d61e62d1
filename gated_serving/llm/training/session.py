"""One training from its settings to a finished model folder; can be killed at any moment and resumed.

The output folder holds ``run.json`` (the settings), ``data.json`` (a digest of the data), ``tokenizer/``,
``checkpoints/``, ``tensorboard/``, ``metrics.jsonl`` and, once the run is over, the model itself: weights, config,
tokenizer, generation config and ``training_record.json``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import platform
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from datasets import Dataset, are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, set_seed
from transformers.utils import logging as transformers_logging

from gated_serving.llm.training import checkpoints
from gated_serving.llm.training.architecture import build_config, build_model, count_parameters
from gated_serving.llm.training.documents import load_documents, split_documents
from gated_serving.llm.training.output_folder import UnusableInputError, check_data, claim, discard
from gated_serving.llm.training.packing import collate, make_sequences
from gated_serving.llm.training.settings import TrainingRun
from gated_serving.llm.training.telemetry import MetricsLog, read_metrics
from gated_serving.llm.training.tokenizer import load_tokenizer, train_tokenizer
from gated_serving.llm.training.trainer import ResumableTrainer, held_out_loss, training_arguments
from gated_serving.run_folder import OutputFolderError, locked

logger = logging.getLogger(__name__)

RECORD = "training_record.json"
METRICS = "metrics.jsonl"
_STAGING = ".finished.partial"


def train(run: TrainingRun, output: Path, *, resume: bool = False, progress: bool = True) -> Path:
    """Trains a model, or goes on training it.

    Args:
        run: The whole settings.
        output: The run's folder.
        resume: Go on from the last whole checkpoint; starts from the beginning where there is none.
        progress: Whether to show progress bars; without them the losses and the time left are logged.

    Returns:
        ``output``, which now holds the finished model.

    Raises:
        OutputFolderError: The folder is in use and ``resume`` was not asked for, or it holds a run with other settings.
        UnusableInputError: The data, the tokenizer or the machine cannot be used as asked.
    """
    state = PartialState(cpu=not torch.accelerator.is_available())
    if run.runtime.fsdp and (state.num_processes == 1 or not torch.accelerator.is_available()):
        # accelerate would train on without sharding and not say so
        raise UnusableInputError(
            "runtime.fsdp=True: sharding needs several processes on accelerators; start the command with torchrun or "
            "accelerate launch, or set runtime.fsdp=false"
        )
    with _bars(shown=progress), locked(output) if state.is_main_process else contextlib.nullcontext():
        with state.main_process_first():
            is_new = claim(run, output, resume=resume or not state.is_main_process)
        if checkpoints.is_whole(output):
            logger.info("%s holds the finished model already", output)
            return output
        try:
            _train(run, output, state, progress=progress)
        except Exception:
            if is_new:
                discard(output)
            raise
    return output


@contextlib.contextmanager
def _bars(*, shown: bool) -> Iterator[None]:
    """Keeps the libraries from drawing progress bars of their own where none are asked for."""
    with contextlib.ExitStack() as afterwards:
        if not shown and not are_progress_bars_disabled():
            disable_progress_bars()
            afterwards.callback(enable_progress_bars)
        if not shown and transformers_logging.is_progress_bar_enabled():
            transformers_logging.disable_progress_bar()
            afterwards.callback(transformers_logging.enable_progress_bar)
        yield


def _train(run: TrainingRun, output: Path, state: PartialState, *, progress: bool) -> None:
    if run.runtime.num_threads is not None:
        torch.set_num_threads(run.runtime.num_threads)
    documents, tokenizer, sequences, model = _prepare(run, output, state)
    logger.info(
        "%d documents and %d sequences to train on, %d and %d held out",
        len(documents["train"]), len(sequences["train"]), len(documents["held_out"]), len(sequences["held_out"]),
    )  # fmt: skip
    num_steps = run.num_steps(state.num_processes)
    tokens_per_step = run.optimisation.batch_size * run.optimisation.gradient_accumulation_steps
    tokens_per_step *= run.data.sequence_length * state.num_processes
    trainer = ResumableTrainer(
        model=model,
        args=training_arguments(run, output, num_steps, progress=progress),
        train_dataset=sequences["train"],
        eval_dataset=_first(sequences["held_out"], run.runtime.eval_sequences),
        data_collator=collate,
        processing_class=tokenizer,
        callbacks=[MetricsLog(output / METRICS, tokens_per_step, logs_lines=not progress)],
    )
    trainer.remove_callback(PrinterCallback)  # it prints the same values without their step
    start = checkpoints.last_complete(output / "checkpoints")
    if start is not None:
        logger.info("resuming from step %d", checkpoints.step_of(start))
    try:
        trainer.train(resume_from_checkpoint=str(start) if start else None)
        if trainer.state.global_step != num_steps:
            raise UnusableInputError(
                f"optimisation.num_tokens={run.optimisation.num_tokens}: training ended at step "
                f"{trainer.state.global_step} of {num_steps}; no model is written"
            )
        _finish(run, output, trainer, tokenizer, documents, sequences["held_out"], tokens=num_steps * tokens_per_step)
    except UnusableInputError:
        raise
    except Exception as error:
        if start is not None and not trainer.has_stepped:
            raise OutputFolderError(
                f"{start}: the run cannot go on from this checkpoint ({error}); if it is damaged, delete it, and "
                "--resume goes on from the one before"
            ) from error
        if isinstance(error, (OSError, SafetensorError)):
            raise OutputFolderError(
                f"{output}: stopped at step {trainer.state.global_step} ({error}); once that is mended, --resume goes "
                "on from the last checkpoint, if there was one by then"
            ) from error
        raise


def _prepare(
    run: TrainingRun, output: Path, state: PartialState
) -> tuple[dict[str, Dataset], PreTrainedTokenizerBase, dict[str, Dataset], PreTrainedModel]:
    """Documents and packed sequences of each side, the tokenizer and the model before its first step."""
    with state.main_process_first():
        try:
            documents = split_documents(load_documents(run.data, output / "cache"), run.data.held_out_share)
            tokenizer = _tokenizer(run, documents, output / "tokenizer")
            sequences = {side: make_sequences(documents[side], tokenizer, run.data) for side in documents}
            config = build_config(
                run.model,
                vocab_size=len(tokenizer),
                eos_token_id=tokenizer.eos_token_id,  # pyright: ignore[reportArgumentType]
            )
            if state.is_main_process:
                check_data(output, sequences)
            set_seed(run.optimisation.seed)
            model = build_model(run.model, config)
        except (OSError, ValueError) as error:
            raise UnusableInputError(str(error)) from error
    batch = run.optimisation.batch_size * state.num_processes
    if len(sequences["train"]) < batch:
        raise UnusableInputError(
            f"optimisation.batch_size={run.optimisation.batch_size}: {state.num_processes} process(es) take {batch} "
            f"sequences at once, and the training documents make {len(sequences['train'])}; give more documents, a "
            "smaller batch_size or a shorter data.sequence_length"
        )
    return documents, tokenizer, sequences, model


def _first(sequences: Dataset, limit: int | None) -> Dataset:
    return sequences if limit is None else sequences.select(range(min(limit, len(sequences))))


def _tokenizer(run: TrainingRun, documents: dict[str, Dataset], folder: Path) -> PreTrainedTokenizerBase:
    if run.tokenizer.path is not None:
        return load_tokenizer(run.tokenizer.path)
    if not folder.exists():
        staging = folder.with_suffix(".partial")
        shutil.rmtree(staging, ignore_errors=True)
        trained = train_tokenizer(
            documents["train"]["text"], run.tokenizer, max_length=run.model.max_position_embeddings
        )
        trained.save_pretrained(staging)
        staging.rename(folder)
    return load_tokenizer(str(folder))


def _finish(
    run: TrainingRun,
    output: Path,
    trainer: ResumableTrainer,
    tokenizer: PreTrainedTokenizerBase,
    documents: dict[str, Dataset],
    held_out: Dataset,
    *,
    tokens: int,
) -> None:
    """Writes the finished model beside the run, then moves it in."""
    # Every process measures all of it, because a sharded model runs only where all processes run it.
    model = trainer.model_wrapped if trainer.is_fsdp_enabled else trainer.accelerator.unwrap_model(trainer.model)
    assert model is not None
    loss = held_out_loss(model, held_out, run.optimisation.batch_size)
    if not math.isfinite(loss[0]):
        raise UnusableInputError(
            f"the held-out loss after step {trainer.state.global_step} is {loss[0]}: training diverged and no model is "
            "written; try a lower optimisation.learning_rate or a longer optimisation.warmup_share in another --output"
        )
    staging = output / _STAGING
    if trainer.is_world_process_zero():
        shutil.rmtree(staging, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(staging), _internal_call=True)
    trainer.accelerator.wait_for_everyone()
    if not trainer.is_world_process_zero():
        return
    (staging / "training_args.bin").unlink(missing_ok=True)  # a pickle; run.json says the same
    _allow_cache(staging)
    tokenizer.save_pretrained(staging)
    GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id
    ).save_pretrained(staging)
    record = _record(run, output, trainer, documents, loss, tokens=tokens)
    (staging / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    checkpoints.publish_files(staging, output)


def _allow_cache(folder: Path) -> None:
    """The Trainer switches the config's cache off for training; a finished model generates with it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["use_cache"] = True
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _record(
    run: TrainingRun,
    output: Path,
    trainer: ResumableTrainer,
    documents: dict[str, Dataset],
    held_out: tuple[float, int],
    *,
    tokens: int,
) -> dict[str, Any]:
    metrics = read_metrics(output / METRICS)
    model = trainer.accelerator.unwrap_model(trainer.model)
    gates = [line["mean_gate"] for line in metrics if "mean_gate" in line]
    loss, count = held_out
    num_bytes = {side: sum(len(text.encode()) for text in documents[side]["text"]) for side in documents}
    return {
        "recipe": run.name,
        "settings": dataclasses.asdict(run),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_parameters": count_parameters(model),
        "num_documents": {side: len(documents[side]) for side in documents},
        "num_bytes": num_bytes,
        "num_train_sequences": len(trainer.train_dataset),  # pyright: ignore[reportArgumentType]
        "num_tokens": tokens,
        "num_steps": trainer.state.global_step,
        "seconds": metrics[-1]["seconds"] if metrics else None,
        "train_loss": next((line["loss"] for line in reversed(metrics) if "loss" in line), None),
        "held_out_loss": loss,
        "held_out_tokens": count,
        "held_out_bits_per_byte": loss * count / math.log(2) / num_bytes["held_out"],
        "mean_gate": gates[-1] if gates else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": _device(trainer.args.device, trainer.args.world_size),
    }


def _device(device: torch.device, num_processes: int) -> str:
    if device.type == "cuda":
        return f"{num_processes} x {torch.cuda.get_device_name(device)}"
    return f"CPU, {num_processes} process(es) of {torch.get_num_threads()} thread(s)"
