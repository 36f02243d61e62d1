"""Conversion moves rows and changes no bit, and what it leaves behind is whole or goes by another name."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_factory import make_official, read_weights, reference_logits

from gated_serving.attention import Packing
from gated_serving.llm.checkpoints import ConversionError, UnreadableCheckpoint, convert, examine, parse_size
from gated_serving.llm.checkpoints.conversion import JOURNAL
from gated_serving.llm.models import GatedQwen3Config, GatedQwen3ForCausalLM, GatedQwen3MoeForCausalLM

TOKENS = [1, 5, 6, 7, 900]
SMALL_SHARDS = 100_000


@pytest.mark.parametrize("packing", [None, *Packing])
@pytest.mark.parametrize(
    "variant",
    [
        {"heads": 6, "kv_heads": 2},
        {"gate": "elementwise", "qkv_bias": True, "weights": "sharded_bin"},
        {"tied": True, "qk_norm": False, "weights": "bin"},
        {"model_type": "qwen3_moe", "weights": "sharded"},
    ],
)
def test_converted_gives_the_same_logits(tmp_path, variant, packing):
    folder = make_official(tmp_path / "official", **variant)
    converted = convert(folder, tmp_path / "own", packing=packing, max_shard_bytes=SMALL_SHARDS)
    diagnosis = examine(converted)
    assert diagnosis.servable, diagnosis.problems
    assert diagnosis.gate is not None
    assert diagnosis.gate.packing is (packing or Packing.KV_GROUP)
    assert diagnosis.num_parameters == examine(folder).num_parameters
    model_class = GatedQwen3MoeForCausalLM if "model_type" in variant else GatedQwen3ForCausalLM
    with torch.no_grad():
        logits = model_class.from_pretrained(converted)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits.double(), reference_logits(folder, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("route", [["per_head"], ["separate"], ["separate", "per_head"], ["per_head", "separate"]])
def test_round_trip_returns_every_bit(tmp_path, route, dtype):
    folder = make_official(tmp_path / "official", heads=6, kv_heads=2, qkv_bias=True, gate="elementwise", dtype=dtype)
    last = folder
    for number, packing in enumerate([*route, "kv_group"]):
        last = convert(last, tmp_path / str(number), packing=Packing(packing), max_shard_bytes=SMALL_SHARDS)
    assert_same_bits(read_weights(last), read_weights(folder))


def test_keeps_tokenizer_and_generation_files_only(tmp_path):
    folder = make_official(tmp_path / "official")
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "vocab.json",
    ):
        (folder / name).write_text(f'"{name}"')
    (folder / "modeling_gated.py").write_text("raise SystemExit")
    converted = convert(folder, tmp_path / "own")
    assert {file.name for file in converted.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
        "chat_template.jinja", "vocab.json",
    }  # fmt: skip
    assert (converted / "tokenizer.json").read_text() == '"tokenizer.json"'


def test_shards_stay_below_the_limit(tmp_path):
    converted = convert(make_official(tmp_path / "official", layers=4), tmp_path / "own", max_shard_bytes=SMALL_SHARDS)
    for file in converted.glob("*.safetensors"):
        tensors = [tensor for name, tensor in read_weights(converted).items() if name in names_in(converted, file.name)]
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= SMALL_SHARDS


KILLED_MIDWAY = """
import os, signal, sys
from gated_serving.llm.checkpoints import convert

def die_in_the_third_shard(done, total):
    if len([name for name in os.listdir(sys.argv[2] + ".partial") if name.endswith(".safetensors")]) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

convert(sys.argv[1], sys.argv[2], max_shard_bytes=int(sys.argv[3]), on_progress=die_in_the_third_shard)
"""


@pytest.fixture
def killed(tmp_path):
    """A conversion that a real SIGKILL ended while its third shard was half written."""
    folder = make_official(tmp_path / "official", layers=4, gate="elementwise")
    target = tmp_path / "own"
    arguments = [sys.executable, "-c", KILLED_MIDWAY, str(folder), str(target), str(SMALL_SHARDS)]
    done = subprocess.run(arguments, check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return folder, target


def test_killed_conversion_leaves_nothing_that_looks_whole(killed):
    _, target = killed
    assert not target.exists()
    with pytest.raises(UnreadableCheckpoint):
        examine(target.with_name("own.partial"))


def test_killed_conversion_goes_on_with_what_is_finished(killed):
    folder, target = killed
    partial = target.with_name("own.partial")
    kept = {file.name: file.stat().st_mtime_ns for file in partial.glob("*.safetensors")}
    assert len(kept) == 2
    convert(folder, target, max_shard_bytes=SMALL_SHARDS)
    assert {name: (target / name).stat().st_mtime_ns for name in kept} == kept
    assert_same_bits(read_weights(target), read_weights(folder))
    assert not partial.exists()
    assert not (target / JOURNAL).exists()
    assert not list(target.glob("*.unfinished"))


def test_finished_shard_that_was_harmed_is_written_again(killed):
    folder, target = killed
    shard = min(target.with_name("own.partial").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    convert(folder, target, max_shard_bytes=SMALL_SHARDS)
    assert_same_bits(read_weights(target), read_weights(folder))


@pytest.mark.parametrize("change", ["source", "packing", "shard_size", "journal"])
def test_leftovers_of_another_conversion_are_not_mixed_in(killed, change):
    folder, target = killed
    if change == "source":
        shutil.rmtree(folder)
        make_official(folder, layers=4, gate="elementwise", seed=1)
    if change == "journal":
        (target.with_name("own.partial") / JOURNAL).write_text("{")
    convert(
        folder,
        target,
        packing=Packing.PER_HEAD if change == "packing" else Packing.KV_GROUP,
        max_shard_bytes=SMALL_SHARDS * 2 if change == "shard_size" else SMALL_SHARDS,
    )
    back = convert(target, target.with_name("back"), packing=Packing.KV_GROUP)
    assert_same_bits(read_weights(back), read_weights(folder))


def test_foreign_folder_in_the_way_is_left_alone(tmp_path):
    folder = make_official(tmp_path / "official")
    (tmp_path / "own.partial").mkdir()
    (tmp_path / "own.partial" / "precious").write_text("x")
    with pytest.raises(ConversionError, match=r"own\.partial"):
        convert(folder, tmp_path / "own")
    assert (tmp_path / "own.partial" / "precious").read_text() == "x"


def test_two_conversions_at_once(tmp_path):
    folder = make_official(tmp_path / "official")
    (tmp_path / "own.partial").mkdir()
    handle = os.open(tmp_path / "own.partial", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(ConversionError, match="another conversion"):
            convert(folder, tmp_path / "own")
    finally:
        os.close(handle)
    assert convert(folder, tmp_path / "own").is_dir()


def test_targets_that_are_taken(tmp_path):
    folder = make_official(tmp_path / "official")
    with pytest.raises(ConversionError, match="the source itself"):
        convert(folder, folder / ".." / "official")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(ConversionError, match="not an empty folder"):
        convert(folder, tmp_path / "full")
    (tmp_path / "empty").mkdir()
    assert examine(convert(folder, tmp_path / "empty")).servable


def test_sources_that_are_refused(tmp_path):
    ungated = make_official(tmp_path / "ungated", gate="none", model_type="qwen3")
    with pytest.raises(ConversionError, match="ungated"):
        convert(ungated, tmp_path / "own")
    damaged = make_official(tmp_path / "damaged")
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ConversionError, match=r"model\.layers\.2"):
        convert(damaged, tmp_path / "own")
    with pytest.raises(UnreadableCheckpoint):
        convert(tmp_path / "nowhere", tmp_path / "own")
    quantised = make_official(tmp_path / "quantised")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ConversionError, match="quantization_config"):
        convert(quantised, tmp_path / "own")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "quantised", "ungated"]


def test_gates_that_do_not_fit_a_packing(tmp_path):
    sizes: dict[str, Any] = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
    }  # fmt: skip
    GatedQwen3ForCausalLM(GatedQwen3Config(**sizes, gate_position="G2")).save_pretrained(tmp_path / "values")
    with pytest.raises(ConversionError, match="gate_packing='per_head'"):
        convert(tmp_path / "values", tmp_path / "own", packing=Packing.PER_HEAD)
    biased = GatedQwen3Config(**sizes, gate_packing="separate", gate_bias=True)
    GatedQwen3ForCausalLM(biased).save_pretrained(tmp_path / "biased")
    with pytest.raises(ConversionError, match="g_proj has a bias"):
        convert(tmp_path / "biased", tmp_path / "own", packing=Packing.KV_GROUP)


def test_too_little_disk(tmp_path, monkeypatch):
    folder = make_official(tmp_path / "official")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000))
    with pytest.raises(ConversionError, match="GB are free"):
        convert(folder, tmp_path / "own")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["official"]


def test_disk_that_fills_midway(tmp_path):
    folder = make_official(tmp_path / "official")

    def fill(done, total):
        if done > total / 2:
            raise OSError(28, "No space left on device")

    with pytest.raises(ConversionError, match="No space left"):
        convert(folder, tmp_path / "own", max_shard_bytes=SMALL_SHARDS, on_progress=fill)
    assert not (tmp_path / "own").exists()
    assert examine(convert(folder, tmp_path / "own", max_shard_bytes=SMALL_SHARDS)).servable


def test_source_that_changes_meanwhile_is_not_published(tmp_path):
    folder = make_official(tmp_path / "official")
    target = tmp_path / "own"

    def replace(done, total):
        if done < total / 2:
            make_official(folder, seed=1)

    with pytest.raises(ConversionError, match="changed while they were converted"):
        convert(folder, target, max_shard_bytes=SMALL_SHARDS, on_progress=replace)
    assert not target.exists()
    assert_same_bits(read_weights(convert(folder, target, max_shard_bytes=SMALL_SHARDS)), read_weights(folder))


def test_empty_folder_that_is_reached_by_another_name(tmp_path, monkeypatch):
    folder = make_official(tmp_path / "official")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert examine(convert(folder, ".")).servable
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert convert(folder, tmp_path / "link") == tmp_path / "there"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for target in ("x" * 300, tmp_path / "loop"):
        with pytest.raises(ConversionError, match="cannot be a folder here"):
            convert(folder, target)


def test_memory_stays_near_one_shard(tmp_path):
    """The same 60 MB as .bin and as safetensors; both in 4 MB shards."""
    script = (
        "import resource, sys, torch, gated_serving.llm.checkpoints.shards\n"
        "from gated_serving.llm.checkpoints import convert\n"
        "warm = convert(sys.argv[1], sys.argv[3])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "convert(sys.argv[2], sys.argv[4], max_shard_bytes=4_000_000)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)\n"
    )
    for weights in ("bin", "safetensors"):
        small = make_official(tmp_path / f"small-{weights}", weights=weights)
        big = make_official(tmp_path / f"big-{weights}", weights=weights, layers=20, hidden=256, ffn=768)
        targets = [str(tmp_path / f"own-{size}-{weights}") for size in ("small", "big")]
        done = subprocess.run(
            [sys.executable, "-c", script, str(small), str(big), *targets], check=True, capture_output=True, text=True
        )
        assert float(done.stdout) < 20, weights


@pytest.mark.parametrize(("text", "expected"), [("2GB", 2 * 10**9), ("1.5 MiB", 3 * 2**19), ("7", 7), ("5kb", 5000)])
def test_sizes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "2 apples", "9" * 400])
def test_sizes_that_make_no_sense(text):
    with pytest.raises(ValueError, match="max shard size"):
        parse_size(text)


def test_command(tmp_path):
    command = [str(Path(sys.executable).with_name("gated-serving")), "convert"]
    folder = make_official(tmp_path / "official")
    arguments = [str(folder), str(tmp_path / "own"), "--packing", "separate", "--max-shard-size", "100KB"]
    done = subprocess.run([*command, *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert examine(tmp_path / "own").servable
    again = subprocess.run([*command, *arguments], check=False, capture_output=True, text=True)
    assert (again.returncode, "not an empty folder" in again.stderr) == (1, True)
    for wrong in (["--packing", "sideways"], ["--packing", ""], ["--max-shard-size", "big"]):
        done = subprocess.run(
            [*command, str(folder), str(tmp_path / "other"), *wrong], check=False, capture_output=True, text=True
        )
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def names_in(folder, file):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return {name for name, place in index["weight_map"].items() if place == file}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
