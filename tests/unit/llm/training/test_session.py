from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_training import tiny_run, write_documents
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3NextForCausalLM, Trainer

from gated_serving.llm.models import GatedQwen3ForCausalLM
from gated_serving.llm.recipes import find_recipe
from gated_serving.llm.training import checkpoints
from gated_serving.llm.training.overrides import apply_overrides
from gated_serving.llm.training.session import RECORD, UnusableInputError, train
from gated_serving.llm.training.settings import TrainingRun
from gated_serving.llm.training.telemetry import read_metrics
from gated_serving.llm.training.trainer import ResumableTrainer
from gated_serving.run_folder import OutputFolderError, locked

KILLED_IN_A_CHECKPOINT = """
import os, signal, sys
from pathlib import Path
from tiny_training import tiny_run
from gated_serving.llm.training.session import train
from gated_serving.llm.training.trainer import ResumableTrainer

class Killed(ResumableTrainer):
    def _save_rng_state(self, output_dir):
        if self.state.global_step == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)

import gated_serving.llm.training.session as session
session.ResumableTrainer = Killed
train(tiny_run(Path(sys.argv[1])), Path(sys.argv[2]), progress=False)
"""


TRAINED_BY_SEVERAL = """
from pathlib import Path
from tiny_training import tiny_run
from gated_serving.llm.training.session import train

train(tiny_run(Path(sys.argv[1])), Path(sys.argv[2]), progress=False)
"""
TESTS = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def run(documents: Path) -> TrainingRun:
    return tiny_run(documents)


@pytest.fixture(scope="module")
def unbroken(run: TrainingRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(run, tmp_path_factory.mktemp("runs") / "unbroken", progress=False)


def values(output: Path, *names: str) -> list[tuple[Any, ...]]:
    lines = read_metrics(output / "metrics.jsonl")
    return [tuple(line[name] for name in names) for line in lines if all(name in line for name in names)]


def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_as_if_nothing_had_happened(
    run: TrainingRun, unbroken: Path, documents: Path, tmp_path: Path
) -> None:
    output = tmp_path / "killed"
    died = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{KILLED_IN_A_CHECKPOINT}",
         str(documents), str(output)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL, died.stderr
    half_written = output / "checkpoints" / "checkpoint-30"
    assert (half_written / "model.safetensors").exists()
    assert not checkpoints.is_whole(output)
    assert checkpoints.last_complete(output / "checkpoints") == output / "checkpoints" / "checkpoint-20"

    train(run, output, resume=True, progress=False)

    names = ("step", "tokens", "loss", "lr", "grad_norm")
    assert [step for step, *_ in values(output, *names)] == list(range(5, 45, 5))
    assert values(output, *names) == values(unbroken, *names)
    assert values(output, "step", "eval_loss") == values(unbroken, "step", "eval_loss")
    weights, expected = load_file(output / "model.safetensors"), load_file(unbroken / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_the_loss_falls_and_the_rate_follows_warm_up_plateau_and_decay(run: TrainingRun, unbroken: Path) -> None:
    losses = [loss for (loss,) in values(unbroken, "loss")]
    assert losses[-1] < losses[0] - 1
    rates = dict(values(unbroken, "step", "lr"))
    peak = run.optimisation.learning_rate * 2.0  # the tiny run's multiplier for gated models
    assert rates[5] == rates[25] == pytest.approx(peak)
    assert 0 <= rates[40] < rates[35] < peak


def test_the_mean_gate_of_every_layer_is_logged(unbroken: Path) -> None:
    gates = [gate for (gate,) in values(unbroken, "mean_gate")]
    assert len(gates) == 2
    assert all(len(gate) == 2 and all(0 < value < 1 for value in gate) for gate in gates)


def test_the_output_is_a_whole_model_folder(run: TrainingRun, unbroken: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(unbroken)
    tokenizer = AutoTokenizer.from_pretrained(unbroken)
    assert isinstance(model, GatedQwen3ForCausalLM)
    assert model.config.use_cache
    assert GenerationConfig.from_pretrained(unbroken).eos_token_id == tokenizer.eos_token_id
    record = json.loads((unbroken / RECORD).read_text())
    assert record["num_tokens"] == run.optimisation.num_tokens
    assert record["settings"] == json.loads(json.dumps(dataclasses.asdict(run)))
    assert record["num_documents"]["train"] + record["num_documents"]["held_out"] == 60
    assert not list(unbroken.glob("*.partial"))
    assert not list(unbroken.glob("*.bin"))
    assert list((unbroken / "tensorboard").iterdir())


def test_the_held_out_loss_is_that_of_the_saved_model_over_every_held_out_token(
    run: TrainingRun, unbroken: Path
) -> None:
    from gated_serving.llm.training.documents import load_documents, split_documents

    record = json.loads((unbroken / RECORD).read_text())
    texts = split_documents(load_documents(run.data, unbroken / "cache"), run.data.held_out_share)["held_out"]["text"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(unbroken), AutoTokenizer.from_pretrained(unbroken)
    ids = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    starts = {0, *(i + 1 for i, token in enumerate(ids) if token == tokenizer.eos_token_id)}
    total, count = 0.0, 0
    for begin in range(0, len(ids), run.data.sequence_length):
        end = min(begin + run.data.sequence_length, len(ids))
        cuts = sorted({begin, end, *(start for start in starts if begin < start < end)})
        for first, last in itertools.pairwise(cuts):
            if last - first < 2:
                continue
            piece = torch.tensor([ids[first:last]])
            total += model(input_ids=piece, labels=piece).loss.item() * (last - first - 1)
            count += last - first - 1
    assert record["held_out_tokens"] == count
    assert record["held_out_loss"] == pytest.approx(total / count, rel=1e-4)


def test_a_folder_with_a_run_is_not_overwritten(run: TrainingRun, unbroken: Path, documents: Path) -> None:
    before = (unbroken / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(OutputFolderError, match="holds a run already: go on with --resume"):
        train(run, unbroken, progress=False)
    other = tiny_run(documents, "optimisation.seed=1")
    with pytest.raises(OutputFolderError, match=r"other settings: optimisation\.seed is 0 there and 1 here"):
        train(other, unbroken, resume=True, progress=False)
    assert train(run, unbroken, resume=True, progress=False) == unbroken  # it is finished: nothing is done again
    assert (unbroken / "model.safetensors").stat().st_mtime_ns == before


def test_a_folder_with_something_else_is_left_alone(run: TrainingRun, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(OutputFolderError, match="is not empty and holds no run"):
        train(run, tmp_path, resume=True, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def copy_until(unbroken: Path, step: int, output: Path) -> Path:
    """A run as if it had been stopped after a checkpoint."""
    name = f"checkpoints/checkpoint-{step}"
    shutil.copytree(unbroken / name, output / name)
    shutil.copytree(unbroken / "tokenizer", output / "tokenizer")
    for file in ("run.json", "metrics.jsonl"):
        shutil.copy(unbroken / file, output / file)
    return output


def test_a_stopped_run_may_go_on_with_a_larger_budget(documents: Path, unbroken: Path, tmp_path: Path) -> None:
    output = copy_until(unbroken, 20, tmp_path / "run")
    train(tiny_run(documents, "optimisation.num_tokens=5120"), output, resume=True, progress=False)
    before, after = values(unbroken, "step", "loss"), values(output, "step", "loss")
    assert after[:4] == before[:4]
    assert after[-1][0] == 80
    rates = dict(values(output, "step", "lr"))
    assert rates[20] == rates[55] > rates[80]  # the plateau grew, and the decay comes at the new end
    assert json.loads((output / RECORD).read_text())["num_tokens"] == 5120


def test_the_budget_cannot_change_once_the_decay_has_begun(documents: Path, unbroken: Path, tmp_path: Path) -> None:
    output = copy_until(unbroken, 30, tmp_path / "run")
    run = tiny_run(documents, "optimisation.num_tokens=5120")
    with pytest.raises(OutputFolderError, match=r"optimisation.num_tokens=2560, not 5120: the budget can change only"):
        train(run, output, resume=True, progress=False)


def test_a_model_with_too_few_embeddings_for_its_tokenizer_is_refused(documents: Path, tmp_path: Path) -> None:
    with pytest.raises(UnusableInputError, match=r"vocab_size=260: must be at least \d+, the entries"):
        train(tiny_run(documents, "model.vocab_size=260"), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()  # the same command works once this is mended


def test_two_processes_train_one_model(documents: Path, tmp_path: Path) -> None:
    script, output = tmp_path / "script.py", tmp_path / "run"
    script.write_text(f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{TRAINED_BY_SEVERAL}")
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script), str(documents), str(output)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert values(output, "step", "tokens", "lr")[-1][:2] == (20, 2560)  # half the steps, of twice as many tokens
    assert [step for step, _ in values(output, "step", "loss")] == [5, 10, 15, 20]
    losses = [loss for (loss,) in values(output, "loss")]
    assert losses[-1] < losses[0] - 1
    assert checkpoints.is_whole(output)


def test_sharding_where_there_is_nothing_to_shard_over_is_refused(documents: Path, tmp_path: Path) -> None:
    run = tiny_run(documents, "runtime.fsdp_layer=Qwen3DecoderLayer", "runtime.fsdp=true")
    with pytest.raises(UnusableInputError, match=r"runtime.fsdp=True: sharding needs several processes"):
        train(run, tmp_path / "run", progress=False)


def test_a_small_hybrid_trains_and_is_saved_in_the_library_s_own_format(documents: Path, tmp_path: Path) -> None:
    run = apply_overrides(
        find_recipe("tiny-qwen3-next"),
        [f"data.source={documents}", "data.held_out_share=0.2", "data.sequence_length=64", "tokenizer.vocab_size=300",
         "optimisation.num_tokens=512", "optimisation.batch_size=2", "runtime.log_steps=1", "runtime.save_steps=4"],
    )  # fmt: skip
    output = train(run, tmp_path / "run", progress=False)
    config = json.loads((output / "config.json").read_text())
    assert config["architectures"] == ["Qwen3NextForCausalLM"]
    assert isinstance(AutoModelForCausalLM.from_pretrained(output), Qwen3NextForCausalLM)
    losses = [loss for (loss,) in values(output, "loss")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_fewer_sequences_than_a_batch_are_refused(documents: Path, tmp_path: Path) -> None:
    with pytest.raises(UnusableInputError, match=r"batch_size=500: 1 process\(es\) take 500 sequences at once, and"):
        train(tiny_run(documents, "optimisation.batch_size=500"), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_fewer_held_out_sequences_than_a_batch_are_all_evaluated(documents: Path, tmp_path: Path) -> None:
    run = tiny_run(documents, "runtime.eval_sequences=1", "optimisation.num_tokens=320", "runtime.eval_steps=5")
    output = train(run, tmp_path / "run", progress=False)
    losses = values(output, "step", "eval_loss")
    assert [step for step, _ in losses] == [5]
    assert math.isfinite(losses[0][1])
    assert len(values(output, "mean_gate")) == 1


def test_a_run_that_diverges_is_not_finished(documents: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run = tiny_run(documents, "optimisation.learning_rate=1e30", "optimisation.num_tokens=640")
    with pytest.raises(UnusableInputError, match="held-out loss after step 10 is nan: training diverged"):
        train(run, output, progress=False)
    assert not checkpoints.is_whole(output)
    assert not list(output.glob("*.safetensors"))


def test_training_that_ends_early_is_not_finished(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResumableTrainer, "train", lambda self, resume_from_checkpoint: None)
    with pytest.raises(UnusableInputError, match="training ended at step 0 of 40; no model is written"):
        train(tiny_run(documents), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_two_trainings_do_not_share_a_folder(run: TrainingRun, unbroken: Path, tmp_path: Path) -> None:
    output = copy_until(unbroken, 20, tmp_path / "run")
    before = sorted(output.rglob("*"))
    with locked(output), pytest.raises(OutputFolderError, match="another training is writing here"):
        train(run, output, resume=True, progress=False)
    assert sorted(output.rglob("*")) == before
    with locked(output):  # it ended with its holder
        pass


def test_a_child_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    ready, written = os.pipe()
    ended, end = os.pipe()
    with locked(tmp_path):
        child = os.fork()
        if child == 0:
            os.close(end)
            os.write(written, b"1")
            os.read(ended, 1)
            os._exit(0)
        os.read(ready, 1)
    try:
        with locked(tmp_path):
            pass
    finally:
        os.close(end)
        os.waitpid(child, 0)


def test_a_run_goes_on_with_its_own_data_only(unbroken: Path, tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "documents")
    moved = tiny_run(documents)
    output = copy_until(unbroken, 20, tmp_path / "run")
    shutil.copy(unbroken / "data.json", output)
    (output / "run.json").write_text(json.dumps(dataclasses.asdict(moved)))
    (documents / "module_07.py").write_text("changed = True\n")
    with pytest.raises(OutputFolderError, match="holds a run on other data: its train sequences"):
        train(moved, output, resume=True, progress=False)
    assert checkpoints.last_complete(output / "checkpoints") == output / "checkpoints" / "checkpoint-20"

    write_documents(documents)
    train(moved, output, resume=True, progress=False)
    assert values(output, "step", "loss") == values(unbroken, "step", "loss")


def test_a_run_that_does_not_know_its_data_goes_on_with_a_warning(
    run: TrainingRun, unbroken: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = copy_until(unbroken, 30, tmp_path / "run")
    train(run, output, resume=True, progress=False)
    assert [message for message in caplog.messages if "does not say which data it began with" in message]
    assert json.loads((output / "data.json").read_text()) == json.loads((unbroken / "data.json").read_text())


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_damaged_checkpoint_is_named_and_kept(run: TrainingRun, unbroken: Path, tmp_path: Path, file: str) -> None:
    output = copy_until(unbroken, 20, tmp_path / "run")
    damaged = output / "checkpoints" / "checkpoint-20" / file
    damaged.write_bytes(damaged.read_bytes()[:40])
    with pytest.raises(OutputFolderError, match=r"checkpoint-20: the run cannot go on from this checkpoint .*delete"):
        train(run, output, resume=True, progress=False)
    assert damaged.exists()


def test_a_checkpoint_that_cannot_be_written_is_no_traceback(
    run: TrainingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, *args: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(Trainer, "_save_checkpoint", full)
    with pytest.raises(
        OutputFolderError, match=r"stopped at step 10 \(the checkpoint of step 10 was not written: No sp"
    ):
        train(run, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["file", "file/below", "n" * 300])
def test_an_output_that_can_be_no_folder_is_refused(run: TrainingRun, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputFolderError, match="cannot be the folder of a run"):
        train(run, tmp_path / name, progress=False)
    assert (tmp_path / "file").read_text() == "mine"
