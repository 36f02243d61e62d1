import pytest
import torch
from reference_model import reference_logits
from tiny_models import VARIANTS, tiny_config, tiny_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import gated_serving  # noqa: F401  # registers the families
from gated_serving.llm.models import GatedQwen3Config, GatedQwen3ForCausalLM, GatedQwen3MoeConfig

TOKENS = [1, 5, 6, 7, 300, 2, 44]


def checkpoint_tensors(model: torch.nn.Module, folder) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_reference(variant: str, moe: bool, tmp_path) -> None:
    model = tiny_model(moe=moe, **VARIANTS[variant])
    weights = checkpoint_tensors(model, tmp_path)
    logits = model.double()(torch.tensor([TOKENS])).logits[0]
    # transformers normalises in float32 whatever the dtype
    torch.testing.assert_close(logits, reference_logits(weights, model.config, TOKENS), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_auto_classes_find_the_family_in_a_saved_folder(moe: bool, tmp_path) -> None:
    model = tiny_model(moe=moe)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is (GatedQwen3MoeConfig if moe else GatedQwen3Config)
    assert config.gate == model.config.gate
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    tokens = torch.tensor([TOKENS])
    # The weights are the same; sums over them may differ in the last bits, as read weights lie elsewhere in memory.
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
    hidden = AutoModel.from_pretrained(tmp_path)(tokens).last_hidden_state
    torch.testing.assert_close(hidden, model.model(tokens).last_hidden_state)


@pytest.mark.parametrize("variant", ["headwise", "g2_elementwise", "g3", "g5", "constant", "top_k"])
def test_generating_with_the_cache_and_padding_equals_generating_without(variant: str) -> None:
    model = tiny_model(**VARIANTS[variant])
    prompts = torch.tensor([TOKENS, [0, 0, 0, 9, 8, 7, 6]])
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    arguments = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(prompts, use_cache=True, **arguments)
    plain = model.generate(prompts, use_cache=False, **arguments)
    alone = model.generate(torch.tensor([[9, 8, 7, 6]]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(cached, plain)
    assert torch.equal(cached[1, 7:], alone[0, 4:])


def test_eager_and_sdpa_agree_and_eager_returns_its_weights() -> None:
    model, tokens = tiny_model(), torch.tensor([TOKENS])
    sdpa = model(tokens).logits
    model.set_attn_implementation("eager")
    eager = model(tokens, output_attentions=True)
    torch.testing.assert_close(eager.logits, sdpa, atol=1e-4, rtol=1e-4)
    assert [weights.shape for weights in eager.attentions] == [(1, 4, 7, 7)] * 2
    torch.testing.assert_close(eager.attentions[0].sum(-1), torch.ones(1, 4, 7))


def test_the_experts_family_returns_attention_weights_too() -> None:
    model = tiny_model(moe=True)
    model.set_attn_implementation("eager")
    assert len(model(torch.tensor([TOKENS]), output_attentions=True).attentions) == 2


@pytest.mark.parametrize("variant", ["headwise", "separate", "g3", "shared", "top_k"])
def test_gradient_checkpointing_returns_the_same_gradients(variant: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model(**VARIANTS[variant]).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        tokens = torch.tensor([TOKENS])
        model(tokens, labels=tokens).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)
        assert gradient.abs().sum() > 0, name


def test_lora_on_q_proj_trains_and_merges_the_gate_rows(tmp_path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    model, tokens = tiny_model(), torch.tensor([TOKENS])
    rows = model.model.layers[0].self_attn.q_proj.weight.shape[0]
    assert rows == 4 * 33
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    lora_b = adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight
    assert lora_b.shape == (rows, 4)
    adapted(tokens, labels=tokens).loss.backward()
    gate_row = 2 * 32  # after the first group's two queries
    assert lora_b.grad[gate_row].abs().sum() > 0
    expected = adapted.eval()(tokens).logits
    adapted.save_pretrained(tmp_path)
    merged = PeftModel.from_pretrained(tiny_model(), tmp_path).merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("packing", ["kv_group", "per_head", "separate"])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0])
def test_gate_rows_start_at_their_scale_and_queries_at_theirs(packing: str, scale: float) -> None:
    torch.manual_seed(0)
    config = tiny_config(
        hidden_size=512, num_attention_heads=16, gate_packing=packing, gate_granularity="elementwise",
        gate_init_scale=scale, num_hidden_layers=1,
    )  # fmt: skip
    attention = GatedQwen3ForCausalLM(config).model.layers[0].self_attn
    queries, gates = attention.q_proj.weight, None
    if packing == "separate":
        gates = attention.g_proj.weight
    else:
        from gated_serving.attention import split_rows

        queries, gates = split_rows(attention.q_proj.weight, config.gate, config.attention_shape)
    assert queries.std().item() == pytest.approx(0.02, rel=0.05)
    assert gates.std().item() == pytest.approx(0.02 * scale, rel=0.05)


@pytest.mark.parametrize(
    "fields",
    [
        {"attention_bias": True},
        {"gate_packing": "separate", "gate_bias": True},
        {"gate_packing": "separate", "gate_input": "constant"},
    ],
)
def test_the_gates_bias_starts_where_the_config_says(fields: dict) -> None:
    tokens = torch.tensor([TOKENS])
    model = GatedQwen3ForCausalLM(tiny_config(gate_init_bias=30.0, gate_init_scale=0.1, **fields)).eval()
    ungated = GatedQwen3ForCausalLM(tiny_config(gate_operation="add", gate_init_bias=-30.0, **fields)).eval()
    ungated.load_state_dict({k: v for k, v in model.state_dict().items() if "g_" not in k}, strict=False)
    attention = model.model.layers[0].self_attn
    hidden = torch.randn(1, 3, 96)
    _, logits = attention._project_query(hidden)
    torch.testing.assert_close(logits.mean(), torch.tensor(30.0), atol=0.5, rtol=0)
    assert torch.isfinite(model(tokens).logits).all()


def test_loading_does_not_start_the_gate_again(tmp_path) -> None:
    model = tiny_model(gate_init_scale=0.0)
    model.save_pretrained(tmp_path)
    loaded = GatedQwen3ForCausalLM.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"gate_position": "G7"}, "gate_position='G7'"),
        ({"gate_positoin": "G1"}, "gate_positoin"),
        ({"gate_init_bias": 1.0}, "attention_bias"),
        ({"num_attention_heads": 3}, "num_heads=3"),
        ({"gate_position": "G5"}, "gate_granularity"),
    ],
)
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_a_wrong_config_is_refused_when_it_is_made(fields: dict, named: str, moe: bool) -> None:
    with pytest.raises(ValueError, match=named):
        tiny_config(moe=moe, **fields)


@pytest.mark.parametrize(
    ("fields", "millions"),
    [
        ({"gate_granularity": "headwise", "intermediate_size": 6144}, 1721.8),
        ({"gate_granularity": "elementwise", "intermediate_size": 5504}, 1728.2),
    ],
)
def test_the_released_shapes_count_their_parameters_without_memory(fields: dict, millions: float) -> None:
    config = GatedQwen3Config(
        vocab_size=152064, hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, tie_word_embeddings=True, **fields,
    )  # fmt: skip
    with torch.device("meta"):
        model = GatedQwen3ForCausalLM(config)
    assert round(model.num_parameters() / 1e6, 1) == millions


def test_the_released_baseline_counts_its_parameters() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=152064, hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, tie_word_embeddings=True, intermediate_size=6144,
    )  # fmt: skip
    with torch.device("meta"):
        assert round(Qwen3ForCausalLM(config).num_parameters() / 1e6, 1) == 1720.8
