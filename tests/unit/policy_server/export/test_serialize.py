"""The piecewise writer gives protobuf's own bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import TensorProto, helper
from served_policies import make_model
from small_graphs import make_graph

from policy_server.export.serialize import write_serialized


@pytest.mark.parametrize("case", ["deep", "with noise", "everything"])
def test_the_bytes_are_protobufs_own(tmp_path: Path, case: str) -> None:
    model = make_graph(depth=4) if case == "deep" else make_model(3, fields={"goal": 2}, distribution=True)
    if case == "everything":
        model.doc_string, model.producer_version, model.model_version = "text", "1", 7
        model.metadata_props.add(key="a", value="b")
        model.graph.doc_string = "graph"
        model.graph.value_info.append(helper.make_tensor_value_info("scaled", TensorProto.FLOAT, ["batch", 3]))
        model.functions.append(helper.make_function("own", "f", ["x"], ["y"], [], [helper.make_opsetid("", 18)]))
    write_serialized(model, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == model.SerializeToString()
