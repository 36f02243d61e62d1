"""Weight-only quantisation: the gate's rows are dequantised with the queries, keys and values beside them."""

import json
from pathlib import Path

import torch
from checkpoint_factory import make_official, read_weights, reference_logits, write_weights
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from torch import Tensor
from vllm_engine import PROMPTS, EngineProcess

GROUP_SIZE = 32


def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Four-bit integers with a scale for each 32 inputs, as compressed-tensors stores them; and what they stand for."""
    groups = weight.unflatten(1, (-1, GROUP_SIZE))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
    integers = (groups / scale).round().clamp(-8, 7)
    packed = pack_to_int32(integers.flatten(1).to(torch.int8), 4).contiguous()
    stored = {
        "weight_packed": packed,
        "weight_scale": scale.squeeze(-1).bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, (integers * scale).flatten(1)


def make_quantized(folder: Path, dequantized: Path, **options: str) -> None:
    """Writes a four-bit checkpoint in the released format, and the same numbers unquantised."""
    make_official(folder, **options)  # pyright: ignore[reportArgumentType]
    stored, meant = {}, {}
    for name, tensor in read_weights(folder).items():
        tensors, meant[name] = quantize(tensor) if "_proj." in name else ({}, tensor.bfloat16().float())
        stored |= {f"{name.removesuffix('weight')}{kind}": part for kind, part in tensors.items()}
        if not tensors:
            stored[name] = tensor.bfloat16()
    config = json.loads((folder / "config.json").read_text())
    dequantized.mkdir()
    (dequantized / "config.json").write_text(json.dumps(config))
    write_weights(dequantized, meant, "safetensors")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP_SIZE}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, stored, "safetensors")


def test_four_bit_weights(engine: EngineProcess, tmp_path: Path) -> None:
    make_quantized(tmp_path / "quantized", tmp_path / "dequantized", gate="elementwise")
    generated = engine.generate(tmp_path / "quantized", dtype="bfloat16")
    assert generated.architecture == "GatedQwen3ForCausalLM"
    for index, prompt in enumerate(PROMPTS):
        expected = reference_logits(tmp_path / "dequantized", prompt).log_softmax(-1)
        gateless = reference_logits(tmp_path / "dequantized", prompt, drop_gate=True).log_softmax(-1)
        for position, entries in enumerate(generated.prompt_logprobs[index] or []):
            for token, logprob in entries.items():
                assert abs(logprob - expected[position, int(token)].item()) < 0.2
        assert (expected - gateless).abs().max() > 1
