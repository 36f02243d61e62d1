"""The doctor's verdicts on healthy and damaged checkpoints, from config and headers alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_factory import make_official, read_weights, write_weights
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from gated_serving.llm.checkpoints import BrokenConfig, ConversionError, convert, examine
from gated_serving.llm.models import GatedQwen3Config, GatedQwen3ForCausalLM

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("weights", ["safetensors", "sharded_bin"])
@pytest.mark.parametrize("gate", ["headwise", "elementwise"])
def test_official(tmp_path, gate, weights):
    report = examine(make_official(tmp_path, gate=gate, weights=weights, tied=True)).to_json()
    assert {"format", "gate", "num_parameters", "stock_vllm", "servable", "problems"} <= report.keys()
    assert (report["format"], report["servable"], report["stock_vllm"]) == ("official", True, "wrong")
    assert report["gate"]["position"] == "G1"
    assert report["gate"]["granularity"] == gate
    assert report["gate"]["packing"] == "kv_group"
    assert report["problems"] == []
    assert report["num_parameters"] == sum(tensor.numel() for tensor in read_weights(tmp_path).values())


def test_tied_head_that_is_stored_counts_once(tmp_path):
    folder = make_official(tmp_path, tied=True)
    count = examine(folder).num_parameters
    rewrite(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    diagnosis = examine(folder)
    assert (diagnosis.num_parameters, diagnosis.servable) == (count, True)


def test_own_format(tmp_path):
    config = GatedQwen3Config(
        hidden_size=48, intermediate_size=80, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=64, gate_position="G5", gate_granularity="elementwise", gate_packing="separate",
    )  # fmt: skip
    GatedQwen3ForCausalLM(config).save_pretrained(tmp_path)
    diagnosis = examine(tmp_path)
    assert (diagnosis.format, diagnosis.stock_vllm.outcome, diagnosis.servable) == ("gated_qwen3", "refuses", True)
    reconfigure(tmp_path, gate_colour="blue")
    diagnosis = examine(tmp_path)
    assert not diagnosis.servable
    assert "gate_colour" in diagnosis.problems[0].message


def test_qwen3_next(tmp_path):
    config = Qwen3NextConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=64, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    Qwen3NextForCausalLM(config).save_pretrained(tmp_path)
    report = examine(tmp_path).to_json()
    assert (report["format"], report["servable"], report["stock_vllm"]) == ("qwen3_next", True, "right")
    assert (report["gate"]["granularity"], report["gate"]["packing"]) == ("elementwise", "per_head")
    rewrite(tmp_path, lambda w: w.update({Q_PROJ.replace(".0.", ".3."): torch.zeros(128, 64)}))
    assert not examine(tmp_path).servable


@pytest.mark.parametrize(
    ("variant", "outcome", "servable"),
    [
        ({}, "right", True),
        ({"model_type": "qwen3_moe"}, "right", True),
        ({"qkv_bias": True}, "wrong", False),  # vLLM's class skips o_proj's bias
        ({"qk_norm": False}, "refuses", False),  # and asks for the norms
    ],
)
def test_ungated(tmp_path, variant, outcome, servable):
    diagnosis = examine(make_official(tmp_path, gate="none", **variant))
    assert (diagnosis.format, diagnosis.gate) == ("ungated", None)
    assert (diagnosis.stock_vllm.outcome, diagnosis.servable) == (outcome, servable)


def test_family_without_any_sign_of_a_gate(tmp_path):
    write_weights(tmp_path, {"model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4)}, "safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    diagnosis = examine(tmp_path)
    assert (diagnosis.format, diagnosis.servable) == ("ungated", True)
    assert "not checked" in diagnosis.notes[0]


def test_family_with_a_gate_that_is_not_known(tmp_path):
    write_weights(tmp_path, {"model.layers.0.self_attn.g_proj.weight": torch.ones(4, 4)}, "safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    diagnosis = examine(tmp_path)
    assert (diagnosis.format, diagnosis.servable) == ("unknown", False)
    assert diagnosis.problems[0].tensor == "model.layers.0.self_attn.g_proj.weight"


@pytest.mark.parametrize("gate", ["headwise", "elementwise"])
def test_lost_flags(tmp_path, gate):
    folder = make_official(tmp_path, gate=gate)
    reconfigure(folder, **{f"{gate}_attn_output_gate": False})
    diagnosis = examine(folder)
    assert (diagnosis.stock_vllm.outcome, diagnosis.servable) == ("wrong", False)
    assert diagnosis.problems[0].tensor == Q_PROJ
    assert f"{gate}_attn_output_gate=true" in diagnosis.problems[0].message


def test_gate_in_config_but_not_in_the_weights(tmp_path):
    folder = make_official(tmp_path, gate="none")
    reconfigure(folder, headwise_attn_output_gate=True)
    diagnosis = examine(folder)
    assert (diagnosis.format, diagnosis.servable) == ("official", False)
    assert (diagnosis.problems[0].expected, diagnosis.problems[0].found) == ((132, 96), (128, 96))
    assert diagnosis.stock_vllm.outcome == "wrong"


def test_other_gate_in_config_than_in_the_weights(tmp_path):
    folder = make_official(tmp_path, gate="elementwise")
    reconfigure(folder, headwise_attn_output_gate=True, elementwise_attn_output_gate=False)
    assert "the rows of an elementwise gate" in examine(folder).problems[0].message


@pytest.mark.parametrize(
    ("change", "kind", "tensor"),
    [
        (lambda w: w.pop("model.norm.weight"), "missing", "model.norm.weight"),
        (lambda w: w.update({"model.layers.0.self_attn.g_proj.weight": torch.ones(4, 96)}), "extra", "g_proj"),
        (lambda w: w.update({"model.layers.1.mlp.up_proj.weight": torch.ones(4, 96)}), "wrong_shape", "up_proj"),
        (lambda w: w.update({"model.layers.2.mlp.up_proj.weight": torch.ones(160, 96)}), "extra", "layers.2"),
        (lambda w: w.update({"model.norm.weight": torch.tensor(1.0)}), "wrong_shape", "model.norm.weight"),
    ],
)
def test_damaged_tensors(tmp_path, change, kind, tensor):
    folder = make_official(tmp_path)
    rewrite(folder, change)
    diagnosis = examine(folder)
    assert not diagnosis.servable
    assert [problem.kind for problem in diagnosis.problems] == [kind]
    assert tensor in str(diagnosis.problems[0].tensor)
    assert str(diagnosis.problems[0].tensor) in diagnosis.problems[0].message


@pytest.mark.parametrize(
    "fields",
    [
        {"headwise_attn_output_gate": True, "elementwise_attn_output_gate": True},
        {"headwise_value_gate": True},
        {"gate_position": "G2"},
    ],
)
def test_configs_that_promise_something_else(tmp_path, fields):
    folder = make_official(tmp_path)
    reconfigure(folder, **fields)
    diagnosis = examine(folder)
    assert not diagnosis.servable
    assert next(iter(fields)) in " ".join(problem.message for problem in diagnosis.problems)


def test_a_quantised_gate_is_served_and_its_tensors_are_left_to_vllm(tmp_path):
    folder = make_official(tmp_path)
    reconfigure(folder, quantization_config={"quant_method": "compressed-tensors"})
    diagnosis = examine(folder)
    assert diagnosis.servable
    assert diagnosis.stock_vllm.outcome == "wrong"
    assert any("not checked" in note for note in diagnosis.notes)


def test_mixed_dtypes_are_a_note(tmp_path):
    folder = make_official(tmp_path)
    rewrite(folder, lambda w: w.update({"model.norm.weight": w["model.norm.weight"].bfloat16()}))
    diagnosis = examine(folder)
    assert diagnosis.servable
    assert "dtype" in diagnosis.notes[0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint32, torch.complex64, torch.float8_e4m3fn])
def test_numbers_that_need_a_quantisation(tmp_path, dtype):
    folder = make_official(tmp_path)
    rewrite(folder, lambda w: w.update({Q_PROJ: torch.zeros(w[Q_PROJ].shape, dtype=dtype)}))
    diagnosis = examine(folder)
    assert not diagnosis.servable
    assert diagnosis.stock_vllm.outcome == "wrong"
    assert [(problem.kind, problem.tensor) for problem in diagnosis.problems] == [("dtype", Q_PROJ)]
    with pytest.raises(ConversionError, match="quantization_config"):
        convert(folder, tmp_path / "own")
    reconfigure(folder, quantization_config={"quant_method": "compressed-tensors"})
    assert examine(folder).servable


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_of_any_width(tmp_path, dtype):
    assert examine(make_official(tmp_path, dtype=dtype)).servable


@pytest.mark.parametrize("place", [".", "original"])
def test_files_that_vllm_takes_in_place_of_all_others(tmp_path, place):
    folder = make_official(tmp_path)
    (folder / place).mkdir(exist_ok=True)
    (folder / place / "consolidated.safetensors").write_bytes(b"weights")
    diagnosis = examine(folder)
    assert (diagnosis.servable, diagnosis.problems[0].kind) == (False, "files")
    assert "consolidated.safetensors" in diagnosis.problems[0].message
    (folder / "config.json").write_text('{"model_type": "mistral", "architectures": ["MistralForCausalLM"]}')
    rewrite(folder, lambda w: [w.pop(name) for name in list(w) if "q_proj" in name])
    assert examine(folder).servable is (place == ".")


@pytest.mark.parametrize("gate", ["headwise", "elementwise", "none"])
def test_rows_of_a_gate_in_another_family(tmp_path, gate):
    folder = make_official(tmp_path, gate=gate)
    fields = {"headwise_attn_output_gate": None, "elementwise_attn_output_gate": None}
    reconfigure(folder, **fields, model_type="llama", architectures=["LlamaForCausalLM"])
    diagnosis = examine(folder)
    assert diagnosis.servable is (gate == "none")
    assert [problem.tensor for problem in diagnosis.problems][:1] == ([] if gate == "none" else [Q_PROJ])


def test_wider_heads_than_the_usual_fields_say_are_no_gate(tmp_path):
    folder = make_official(tmp_path, gate="none", head_dim=32)
    reconfigure(folder, model_type="llama", architectures=["LlamaForCausalLM"], head_dim=16)
    assert examine(folder).servable


@pytest.mark.parametrize("name", ["attn_gate", "self_attn.wg", "gate", "self_attn.g_proj"])
def test_names_of_gates_in_another_family(tmp_path, name):
    folder = make_official(tmp_path, gate="none")
    reconfigure(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    tensor = f"model.layers.0.{name}.weight"
    rewrite(folder, lambda w: w.update({tensor: torch.ones(4, 96)}))
    assert [problem.tensor for problem in examine(folder).problems] == [tensor]


def test_router_of_experts_is_no_gate_of_attention(tmp_path):
    folder = make_official(tmp_path, gate="none", model_type="qwen3_moe")
    reconfigure(folder, model_type="mixtral", architectures=["MixtralForCausalLM"])
    assert examine(folder).servable


def test_activation_that_vllm_does_not_compute(tmp_path):
    folder = make_official(tmp_path)
    reconfigure(folder, hidden_act="gelu")
    diagnosis = examine(folder)
    assert (diagnosis.servable, diagnosis.stock_vllm.outcome) == (False, "refuses")
    assert "hidden_act='gelu'" in diagnosis.problems[0].message


def test_both_flags_are_a_problem_and_nothing_else(tmp_path):
    folder = make_official(tmp_path)
    reconfigure(folder, elementwise_attn_output_gate=True)
    diagnosis = examine(folder)
    assert (diagnosis.servable, diagnosis.notes) == (False, ())


def test_command(tmp_path):
    good = make_official(tmp_path / "good")
    lost = make_official(tmp_path / "lost")
    reconfigure(lost, headwise_attn_output_gate=False)
    for folder, code in ((good, 0), (lost, 1), (tmp_path / "nowhere", 2)):
        plain = run("doctor", str(folder))
        as_json = run("doctor", str(folder), "--json")
        assert (plain.returncode, as_json.returncode) == (code, code)
        report = json.loads(as_json.stdout)
        assert report["servable"] is (code == 0) if code < 2 else "no such folder" in report["error"]
        assert "Traceback" not in plain.stderr + as_json.stderr
    assert "can be served right" in run("doctor", str(good)).stdout


@pytest.mark.parametrize(
    "fields",
    [{"model_type": None}, {"model_type": 3}, {"hidden_size": None}, {"num_attention_heads": "x"}, {"head_dim": -1},
     {"num_key_value_heads": 3}, {"architectures": "Qwen3ForCausalLM"}, {"num_hidden_layers": 1.5}],
)  # fmt: skip
def test_senseless_configs_are_unreadable(tmp_path, fields):
    folder = make_official(tmp_path)
    reconfigure(folder, **fields)
    done = run("doctor", str(folder), "--json")
    assert done.returncode == 2
    assert "config.json" in json.loads(done.stdout)["error"]


@pytest.mark.parametrize(
    "fields",
    [{"num_hidden_layers": 10**9}, {"num_experts": 10**9}, {"num_experts": 10**5, "num_hidden_layers": 10**4},
     {"model_type": "qwen3_next", "num_hidden_layers": 10**9}, {"model_type": "qwen3_next", "layer_types": 7},
     {"headwise_attn_output_gate": "false"}, {"tie_word_embeddings": "false"}, {"use_qk_norm": 0},
     {"rms_norm_eps": -1}, {"rms_norm_eps": "x"}],
)  # fmt: skip
def test_values_that_no_model_has_are_named(tmp_path, fields):
    folder = make_official(tmp_path, model_type="qwen3_moe")
    reconfigure(folder, **fields)
    with pytest.raises(BrokenConfig, match="|".join(f"{name}=" for name in fields)):
        examine(folder)


def run(*arguments):
    command = [str(Path(sys.executable).with_name("gated-serving")), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def reconfigure(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def rewrite(folder, change):
    tensors = read_weights(folder)
    change(tensors)
    write_weights(folder, tensors, "safetensors")
