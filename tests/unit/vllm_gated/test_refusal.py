import ast
import sys
from pathlib import Path

import pytest

import vllm_gated
from vllm_gated.refusal import GatedModelRefusedError, raise_if_gated


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "qwen2", "headwise_attn_output_gate": True}, "headwise_attn_output_gate"),
        ({"model_type": "anything", "elementwise_attn_output_gate": True}, "elementwise_attn_output_gate"),
        ({"model_type": "gated_qwen3"}, "gated_qwen3"),
        ({"model_type": "gated_qwen3_moe"}, "gated_qwen3_moe"),
    ],
)
def test_gated_configs_are_refused_with_the_reason(config, found):
    with pytest.raises(GatedModelRefusedError, match=f"(?s){found}.*because of the test"):
        raise_if_gated(config, "because of the test")


@pytest.mark.parametrize(
    "config",
    [{}, {"model_type": "qwen3"}, {"model_type": "qwen2", "headwise_attn_output_gate": False}, {"model_type": "llama"}],
)
def test_other_configs_pass(config):
    raise_if_gated(config, "because of the test")


@pytest.mark.parametrize("module", ["__init__", "refusal"])
def test_the_fallback_needs_nothing_that_can_be_missing(module):
    tree = ast.parse((Path(vllm_gated.__file__).parent / f"{module}.py").read_text())
    top_level = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in top_level]
    assert {str(name).split(".")[0] for name in names} <= sys.stdlib_module_names
