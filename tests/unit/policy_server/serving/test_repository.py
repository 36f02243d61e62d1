"""Loading versions from a folder that is not trusted: every forged or half-copied one is refused with a reason."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from served_policies import make_model, write_policy

from policy_server.engines import EngineError
from policy_server.external_data import refuse_external_data
from policy_server.repository import load_version
from policy_server.repository_scan import LoadError, fingerprint, scan
from policy_server.settings import ServerSettings


def settings_of(repository: Path, **values: Any) -> ServerSettings:
    return ServerSettings(repository=repository, **values)


def refusal(folder: Path, **values: Any) -> str:
    with pytest.raises(LoadError) as refused:
        load_version(folder, settings_of(folder.parents[1], **values))
    assert str(folder.parent) in str(refused.value)
    return str(refused.value)


def change_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "policy.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_whole_version_loads_and_is_warm(tmp_path: Path) -> None:
    loaded = load_version(write_policy(tmp_path, fields={"goal": 2}, distribution=True), settings_of(tmp_path))
    assert (loaded.manifest.name, loaded.manifest.version) == ("tiny", 1)
    assert 0 < loaded.batch_s < 5
    inputs = {"observation": np.ones((2, 3)), "goal": np.ones((2, 2)), "noise": np.zeros((2, 3))}
    outputs = loaded.engine.run({name: values.astype(np.float32) for name, values in inputs.items()})
    np.testing.assert_array_equal(outputs["action"], np.ones((2, 3), np.float32))


def test_scanning_takes_names_and_whole_numbers_only(tmp_path: Path) -> None:
    write_policy(tmp_path, version=1)
    write_policy(tmp_path, version=10)
    write_policy(tmp_path, version=9)
    for name in ("01", "0", "-1", "1.5", "latest", ".export-2", "٣", "1" * 30):
        (tmp_path / "tiny" / name).mkdir()
    for name in (".hidden", "with space", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "tiny" / "3").write_text("a file")
    assert {name: list(folders) for name, folders in scan(tmp_path).items()} == {"tiny": [1, 9, 10]}


def test_a_repository_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot be read"):
        scan(tmp_path / "none")


def test_the_fingerprint_changes_with_any_file(tmp_path: Path) -> None:
    folder = write_policy(tmp_path)
    seen = {fingerprint(folder)}
    (folder / "policy.json").write_text("{}")
    seen.add(fingerprint(folder))
    (folder.parent / "serving.json").write_text("{}")
    seen.add(fingerprint(folder))
    os.utime(folder / "policy.onnx", ns=(1, 1))
    seen.add(fingerprint(folder))
    assert len(seen) == 4


def test_missing_and_cut_off_files_are_refused(tmp_path: Path) -> None:
    folder = write_policy(tmp_path)
    content = (folder / "policy.onnx").read_bytes()
    (folder / "policy.onnx").write_bytes(content[:-5])
    assert "still being copied" in refusal(folder)
    (folder / "policy.onnx").unlink()
    assert "is the copy complete" in refusal(folder)
    (folder / "policy.json").write_text('{"format": "gated-ser')
    assert "not JSON" in refusal(folder)
    (folder / "policy.json").unlink()
    assert "cannot be read" in refusal(folder)


def test_a_changed_model_does_not_pass_its_hash(tmp_path: Path) -> None:
    folder = write_policy(tmp_path)
    content = bytearray((folder / "policy.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "policy.onnx").write_bytes(bytes(content))
    assert "SHA-256" in refusal(folder)


def test_name_and_version_have_to_be_those_of_the_folders(tmp_path: Path) -> None:
    folder = write_policy(tmp_path)
    other = folder.rename(folder.parent / "2")
    assert "says tiny 1; rename the folders" in refusal(other)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "sub/policy.onnx", ".."])
def test_files_outside_the_folder_are_never_read(tmp_path: Path, name: str) -> None:
    folder = write_policy(tmp_path)
    files = json.loads((folder / "policy.json").read_text())["files"]
    change_manifest(folder, files={**files, name: "0" * 64})
    assert "not a file of this folder" in refusal(folder)


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    folder = write_policy(tmp_path)
    outside = tmp_path / "outside.onnx"
    (folder / "policy.onnx").rename(outside)
    (folder / "policy.onnx").symlink_to(outside)
    assert "not a file inside its folder" in refusal(folder)


def test_a_version_that_is_a_link_to_a_folder_loads(tmp_path: Path) -> None:
    elsewhere = tmp_path / "store"
    folder = write_policy(tmp_path / "repository")
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    assert load_version(folder, settings_of(tmp_path / "repository")).manifest.version == 1


def test_sizes_are_limited(tmp_path: Path) -> None:
    assert "at most 100 are allowed" in refusal(write_policy(tmp_path), max_model_bytes=100)


def test_a_pipe_in_place_of_the_model_is_refused_at_once(tmp_path: Path) -> None:
    folder = write_policy(tmp_path)
    (folder / "policy.onnx").unlink()
    os.mkfifo(folder / "policy.onnx")
    assert "not a file" in refusal(folder)


def external_model(where: str) -> onnx.ModelProto:
    model = make_model(1)
    tensor = numpy_helper.from_array(np.zeros(3, np.float32), "hidden")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    if where == "initializer":
        model.graph.initializer.append(tensor)
    elif where == "constant":
        model.graph.node.append(helper.make_node("Constant", [], ["c"], value=tensor))
    elif where == "subgraph":
        body = helper.make_graph([], "body", [], [], initializer=[tensor])
        model.graph.node.append(helper.make_node("If", ["condition"], ["out"], then_branch=body, else_branch=body))
    elif where == "function":
        node = helper.make_node("Constant", [], ["y"], value=tensor)
        model.functions.append(helper.make_function("own", "f", [], ["y"], [node], [helper.make_opsetid("", 18)]))
    elif where == "sparse":
        indices = numpy_helper.from_array(np.zeros(3, np.int64), "indices")
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(tensor, indices, [9]))
    return model


@pytest.mark.parametrize("where", ["initializer", "constant", "subgraph", "function", "sparse"])
def test_weights_in_other_files_are_refused_wherever_they_hide(tmp_path: Path, where: str) -> None:
    model = external_model(where)
    with pytest.raises(EngineError, match="lies in another file"):
        refuse_external_data(model.SerializeToString())
    assert "lies in another file" in refusal(write_policy(tmp_path, model=model))


def test_a_model_without_external_data_passes() -> None:
    refuse_external_data(make_model(1, fields={"goal": 2}, distribution=True).SerializeToString())


@pytest.mark.parametrize(
    "content", [b"", b"no onnx at all", b"\x00" * 100, b"\xff" * 1000, b"\x3a\xff\xff\xff\xff\x0f"]
)
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    refusal(write_policy(tmp_path, model=content))


def test_operators_of_unknown_domains_are_refused(tmp_path: Path) -> None:
    model = make_model(1)
    model.graph.node[0].domain = "evil"
    model.opset_import.append(helper.make_opsetid("evil", 1))
    assert "onnxruntime does not load it" in refusal(write_policy(tmp_path, model=model))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"observation": [{"name": "state", "shape": [3]}]}, "inputs are"),
        ({"observation": [{"name": "observation", "shape": [4]}]}, "input observation"),
        ({"observation": [{"name": "observation", "shape": [3], "dtype": "int64"}]}, "the graph says float32"),
        ({"action": {"shape": [2], "kind": "continuous", "dtype": "float32"}}, "output action"),
        (
            {"outputs": "distribution", "distribution": {"kind": "gaussian", "noise_size": 3}},
            "inputs are",
        ),
    ],
)
def test_a_graph_that_is_not_what_the_manifest_says_is_refused(tmp_path: Path, changes: Any, words: str) -> None:
    folder = write_policy(tmp_path)
    change_manifest(folder, **changes)
    assert words in refusal(folder)


def test_a_fixed_batch_is_refused(tmp_path: Path) -> None:
    model = make_model(1)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    assert "batch is fixed" in refusal(write_policy(tmp_path, model=model))


def test_a_policy_whose_actions_are_not_finite_is_refused(tmp_path: Path) -> None:
    model = make_model(1)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.float32(np.nan), "factor"))
    model.graph.node[-1].CopyFrom(helper.make_node("Identity", ["scaled"], ["action"]))
    assert "not finite" in refusal(write_policy(tmp_path, model=model))


def endless_model() -> onnx.ModelProto:
    """Loops without an end before it gives the right answer."""
    one = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["goes_on"], ["goes_on_out"]),
            helper.make_node("Add", ["carried", "carried"], ["carried_out"]),
        ],
        "body",
        [
            one("iteration", TensorProto.INT64, []),
            one("goes_on", TensorProto.BOOL, []),
            one("carried", TensorProto.FLOAT, ["batch", 3]),
        ],
        [one("goes_on_out", TensorProto.BOOL, []), one("carried_out", TensorProto.FLOAT, ["batch", 3])],
    )
    forever = numpy_helper.from_array(np.asarray(2**62, np.int64), "forever")
    yes = numpy_helper.from_array(np.asarray(True), "yes")
    graph = helper.make_graph(
        [helper.make_node("Loop", ["forever", "yes", "observation"], ["action"], body=body)],
        "endless",
        [one("observation", TensorProto.FLOAT, ["batch", 3])],
        [one("action", TensorProto.FLOAT, ["batch", 3])],
        initializer=[forever, yes],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_a_graph_that_never_ends_is_given_up(tmp_path: Path) -> None:
    folder = write_policy(tmp_path, model=endless_model())
    started = time.monotonic()
    assert "took longer than 0.5 s" in refusal(folder, load_timeout_s=0.5)
    assert time.monotonic() - started < 60


def test_settings_of_its_own_are_read_and_checked(tmp_path: Path) -> None:
    folder = write_policy(tmp_path)
    overrides = tmp_path / "tiny" / "serving.json"
    overrides.write_text('{"batching": {"max_batch": 7, "max_delay_ms": 2}, "engine": {"intra_op_threads": 2}}')
    loaded = load_version(folder, settings_of(tmp_path))
    assert (loaded.batching.max_batch, loaded.batching.max_delay_ms, loaded.batching.max_queue) == (7, 2, 1024)
    assert loaded.engine_settings.intra_op_threads == 2
    for content, words in (
        ('{"batching": {"max_batch": 0}}', "batching.max_batch=0"),
        ('{"batching": {"max_batsh": 1}}', "batching.max_batsh"),
        ('{"batch": {}}', "batch"),
        ("{", "serving.json"),
        ("[" * 100_000, "serving.json"),
        ('{"engine": {"engine": "abacus"}}', "engine.engine='abacus'"),
    ):
        overrides.write_text(content)
        assert words in refusal(folder)
