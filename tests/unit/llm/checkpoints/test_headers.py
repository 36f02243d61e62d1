"""Tensor headers are read without the weights, and a broken file is refused with its name and the cause."""

import json
import re
import struct

import pytest
import torch
from checkpoint_factory import make_official, read_weights
from safetensors.torch import load_file, save_file

from gated_serving.llm.checkpoints import (
    BrokenConfig,
    BrokenWeights,
    CheckpointNotFound,
    PickledObjects,
    find_folder,
    read_config,
    read_headers,
)


@pytest.mark.parametrize("weights", ["safetensors", "sharded", "bin", "sharded_bin"])
def test_names_shapes_and_dtypes(tmp_path, weights):
    folder = make_official(tmp_path, weights=weights, dtype=torch.bfloat16, qkv_bias=True)
    headers = read_headers(folder)
    assert {name: header.shape for name, header in headers.items()} == {
        name: tuple(tensor.shape) for name, tensor in read_weights(folder).items()
    }
    assert {header.dtype for header in headers.values()} == {"BF16"}
    assert all(header.file.is_file() for header in headers.values())


def test_old_bin_files_that_cannot_be_mapped(tmp_path):
    torch.save({"a": torch.ones(3, 2)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert read_headers(tmp_path)["a"].shape == (3, 2)


@pytest.mark.parametrize("kept_bytes", [0, 5, 100, -1, -5000])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_truncated_file(tmp_path, file, kept_bytes):
    make_official(tmp_path, weights="bin" if file.endswith("bin") else "safetensors")
    content = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(content[:kept_bytes])
    with pytest.raises((BrokenWeights, PickledObjects), match=file):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "BANANA", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "f32", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": null, "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b'{"a":' * 100_000,
    ],
)
def test_broken_safetensors_header(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(BrokenWeights, match=r"model\.safetensors"):
        read_headers(tmp_path)


def test_header_length_beyond_the_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(BrokenWeights, match="header should take"):
        read_headers(tmp_path)


def test_no_weights(tmp_path):
    with pytest.raises(BrokenWeights, match="no weights found"):
        read_headers(tmp_path)


def test_index_that_names_a_missing_shard(tmp_path):
    folder = make_official(tmp_path, weights="sharded")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BrokenWeights, match="model-00002-of-00003"):
        read_headers(folder)


def test_index_that_names_a_tensor_its_file_lacks(tmp_path):
    folder = make_official(tmp_path, weights="sharded")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(BrokenWeights, match=r"model\.extra\.weight is in this file, but it is not"):
        read_headers(folder)


def edit_index(folder, change):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))


def test_index_that_names_the_wrong_file(tmp_path):
    folder = make_official(tmp_path, weights="sharded")
    edit_index(folder, lambda places: places.update({"model.norm.weight": "model-00001-of-00003.safetensors"}))
    with pytest.raises(BrokenWeights, match=r"model\.norm\.weight, which the index says is in model-00001"):
        read_headers(folder)


def test_tensor_of_which_the_index_says_nothing(tmp_path):
    folder = make_official(tmp_path, weights="sharded")
    edit_index(folder, lambda places: places.pop("model.norm.weight"))
    with pytest.raises(BrokenWeights, match=r"model\.norm\.weight, of which the index says nothing"):
        read_headers(folder)


def test_tensor_in_two_files(tmp_path):
    folder = make_official(tmp_path, weights="sharded")
    first, second = (folder / f"model-0000{number}-of-00003.safetensors" for number in (1, 2))
    repeated = load_file(first)
    save_file(load_file(second) | repeated, second)
    with pytest.raises(BrokenWeights, match=r"model-00002-of-00003.*model-00001-of-00003"):
        read_headers(folder)


@pytest.mark.parametrize(
    ("weights", "stray"),
    [
        ("safetensors", "model-00002-of-00002.safetensors"),
        ("safetensors", "adapter_model.safetensors"),
        ("bin", "old.bin"),
        ("sharded_bin", "pytorch_model-00004-of-00004.bin"),
        ("bin", "weights.safetensors"),
    ],
)
def test_further_file_that_vllm_would_load_too(tmp_path, weights, stray):
    folder = make_official(tmp_path, weights=weights)
    (folder / stray).write_bytes(b"weights")
    with pytest.raises(BrokenWeights, match=rf"{re.escape(stray)}: a weight file beside"):
        read_headers(folder)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_single_file_beside_an_index_of_others(tmp_path, suffix):
    folder = make_official(tmp_path, weights="sharded" if suffix == "safetensors" else "sharded_bin")
    make_official(tmp_path, weights="safetensors" if suffix == "safetensors" else "bin", seed=1)
    with pytest.raises(BrokenWeights, match=r"transformers would load the one and vLLM the others"):
        read_headers(folder)


@pytest.mark.parametrize(
    ("weights", "others"),
    [
        ("safetensors", ["pytorch_model.bin", "optimizer.bin", "original/consolidated.00.pth", "onnx/model.onnx"]),
        ("sharded", ["pytorch_model.bin", "adapter_model.safetensors", "consolidated.safetensors"]),
        ("bin", ["training_args.bin", "optimizer.bin", "original/old.bin", "scheduler.pt"]),
        ("safetensors", ["consolidated.safetensors", ".old.safetensors"]),
    ],
)
def test_files_that_are_not_loaded_do_no_harm(tmp_path, weights, others):
    folder = make_official(tmp_path, weights=weights)
    names = set(read_headers(folder))
    for other in others:
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_bytes(b"weights")
    assert set(read_headers(folder)) == names


def test_index_of_the_single_file_itself(tmp_path):
    folder = make_official(tmp_path)
    names = set(read_headers(folder))
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(read_headers(folder)) == names


@pytest.mark.parametrize("content", ["", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b.safetensors"}}', "[]"])
def test_broken_index(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(BrokenWeights, match=r"index\.json"):
        read_headers(tmp_path)


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_pickled_objects_are_not_unpickled(tmp_path):
    made_by_the_code = tmp_path / "made"
    torch.save({"a": RunsCode(made_by_the_code)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(PickledObjects, match=r"pytorch_model\.bin"):
        read_headers(tmp_path)
    assert not made_by_the_code.exists()


@pytest.mark.parametrize("content", [{"state": {"a": torch.ones(2)}}, [torch.ones(2)], {1: torch.ones(2)}])
def test_bin_files_that_are_no_state_dict(tmp_path, content):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(BrokenWeights, match=r"pytorch_model\.bin"):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.complex64).conj(),
    ],
)
def test_bin_files_of_tensors_without_plain_numbers(tmp_path, tensor):
    torch.save({"a": tensor}, tmp_path / "pytorch_model.bin")
    with pytest.raises((BrokenWeights, PickledObjects), match=r"pytorch_model\.bin"):
        read_headers(tmp_path)


@pytest.mark.parametrize("step", [7, 31, 97])
def test_damaged_old_bin_files(tmp_path, step):
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(3, 2), "b": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
    content = file.read_bytes()
    refused = 0
    for position in range(0, len(content), step):
        file.write_bytes(content[:position] + bytes([content[position] ^ 0x55]) + content[position + 1 :])
        try:
            read_headers(tmp_path)
        except (BrokenWeights, PickledObjects) as error:
            refused += 1
            assert "pytorch_model.bin" in str(error)  # noqa: PT017  # data bytes may change without being noticed
    assert refused > 0


@pytest.mark.parametrize("content", ["", "{", "[]", '"x"', b"\xff\xfe", "[" * 100_000])
def test_broken_config(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BrokenConfig, match=r"config\.json"):
        read_config(tmp_path)


def test_no_config(tmp_path):
    with pytest.raises(BrokenConfig, match=r"no config\.json"):
        read_config(tmp_path)


def test_adapter_folder(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(BrokenConfig, match="LoRA adapter"):
        read_config(tmp_path)


def test_folders_that_are_not_there(tmp_path):
    with pytest.raises(CheckpointNotFound, match="no such folder"):
        find_folder(tmp_path / "nowhere" / "at" / "all")
    with pytest.raises(CheckpointNotFound, match="no such folder"):
        find_folder(tmp_path / ("x" * 300))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointNotFound, match="a file"):
        find_folder(tmp_path / "model.safetensors")


def test_repository_without_a_hub():
    with pytest.raises(CheckpointNotFound, match="local cache"):
        find_folder("nobody-at-all/no-such-model")
