from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import tiny_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from gated_serving.llm.training.publish import publish
from gated_serving.llm.training.session import RECORD, train


@pytest.fixture(scope="module")
def runs(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A gated and an ungated run."""
    folder = tmp_path_factory.mktemp("published")
    short = ("optimisation.num_tokens=640", "runtime.save_steps=5")
    gated = train(tiny_run(documents, *short), folder / "gated", progress=False)
    ungated = train(tiny_run(documents, *short, family="qwen3"), folder / "ungated", progress=False)
    return gated, ungated


def test_a_published_model_is_small_and_whole(runs: tuple[Path, Path], tmp_path: Path) -> None:
    gated, ungated = runs
    publish(gated, tmp_path / "model", beside=ungated)
    weights, trained = load_file(tmp_path / "model" / "model.safetensors"), load_file(gated / "model.safetensors")
    assert weights.keys() == trained.keys()
    assert all(torch.equal(weights[name], trained[name].to(torch.bfloat16)) for name in weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_card_takes_its_figures_from_the_records(runs: tuple[Path, Path], tmp_path: Path) -> None:
    gated, ungated = runs
    publish(gated, tmp_path / "model", beside=ungated)
    card = (tmp_path / "model" / "README.md").read_text()
    for run in runs:
        record = json.loads((run / RECORD).read_text())
        assert f"{record['held_out_loss']:.4f}" in card
        assert f"{record['held_out_bits_per_byte']:.4f}" in card
    assert "640 tokens in 10 steps of 2 x 32 tokens" in card
    assert "early state" not in card
    assert "def fibonacci(n):" in card


def test_an_unfinished_run_is_published_from_its_last_whole_checkpoint(runs: tuple[Path, Path], tmp_path: Path) -> None:
    gated, _ = runs
    unfinished = tmp_path / "run"
    unfinished.mkdir()
    for name in ("run.json", "metrics.jsonl", "checkpoints"):
        (unfinished / name).symlink_to(gated / name)
    publish(unfinished, tmp_path / "model")
    assert "early state: 10 of 10 steps" in (tmp_path / "model" / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() > 0


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a finished model nor a whole checkpoint"):
        publish(tmp_path, tmp_path / "model")
    assert not (tmp_path / "model").exists()
