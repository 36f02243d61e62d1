"""Small random checkpoints in the released models' format, and the logits that a right implementation gives for them.

Nothing here uses a model library or this project: it is what the tests compare the project with.

Legend: T tokens, N query heads, K key/value heads, D head dim, W gate values a head, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Gate = Literal["none", "headwise", "elementwise"]
Weights = Literal["safetensors", "sharded", "bin", "sharded_bin"]

NORM_EPSILON = 1e-6
ROPE_THETA = 10000.0
NUM_SHARDS = 3


def make_official(
    folder: str | Path,
    *,
    gate: Gate = "headwise",
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    layers: int = 2,
    hidden: int = 96,
    ffn: int = 160,
    vocab: int = 1000,
    qk_norm: bool = True,
    qkv_bias: bool = False,
    tied: bool = False,
    model_type: str = "qwen2",
    weights: Weights = "safetensors",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    experts: int = 4,
    experts_per_token: int = 2,
) -> Path:
    """Writes a random checkpoint and returns its folder.

    Args:
        folder: Made if need be.
        gate: "none" gives the same files without a gate.
        heads: Query heads; a multiple of ``kv_heads``.
        kv_heads: Key/value heads.
        head_dim: Channels of a head.
        layers: Decoder layers.
        hidden: Channels of the residual stream.
        ffn: Channels inside the MLP, or inside each expert.
        vocab: Tokens.
        qk_norm: Whether queries and keys are normalised.
        qkv_bias: Whether q, k, v and o have a bias.
        tied: Whether the embedding is the head too.
        model_type: "qwen2", "qwen3" or "qwen3_moe"; the last has experts in place of the MLP.
        weights: One safetensors file, several with an index, or the same as pickled .bin.
        seed: Of the random generator.
        dtype: Of the stored weights.
        experts: Experts a layer, for "qwen3_moe".
        experts_per_token: How many of them a token uses.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    is_moe = model_type == "qwen3_moe"
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if is_moe else "Qwen3ForCausalLM"],
        "model_type": model_type,
        "headwise_attn_output_gate": gate == "headwise",
        "elementwise_attn_output_gate": gate == "elementwise",
        "use_qk_norm": qk_norm,
        "qkv_bias": qkv_bias,
        "attention_bias": qkv_bias,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": NORM_EPSILON,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if is_moe:
        config |= {
            "num_experts": experts,
            "num_experts_per_tok": experts_per_token,
            "moe_intermediate_size": ffn,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    tensors = {name: tensor.to(dtype) for name, tensor in _draw_tensors(config, seed)}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_weights(folder, tensors, weights)
    return folder


def write_weights(folder: Path, tensors: dict[str, Tensor], weights: Weights) -> None:
    """Writes tensors as one file, or as ``NUM_SHARDS`` files and an index."""
    stem, suffix = ("pytorch_model", "bin") if weights.endswith("bin") else ("model", "safetensors")
    if not weights.startswith("sharded"):
        _write_file(folder / f"{stem}.{suffix}", tensors)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(NUM_SHARDS):
        file = f"{stem}-{shard + 1:05d}-of-{NUM_SHARDS:05d}.{suffix}"
        members = names[shard::NUM_SHARDS]
        _write_file(folder / file, {name: tensors[name] for name in members})
        weight_map |= dict.fromkeys(members, file)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder, whatever files they are in."""
    folder = Path(folder)
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(file)
    for file in sorted(folder.glob("pytorch_model*.bin")):
        tensors |= torch.load(file, weights_only=True)
    return tensors


def reference_logits(folder: str | Path, tokens: Sequence[int], *, drop_gate: bool = False) -> Tensor:
    """What a right implementation computes, in float64 with plain tensor algebra.

    Args:
        folder: Made by ``make_official``.
        tokens: T token ids.
        drop_gate: Gives the wrong answer of a loader that keeps the first ``N * D`` rows of ``q_proj`` only.

    Returns:
        Logits ``[T, vocab]``.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    weights = {name: tensor.double() for name, tensor in read_weights(folder).items()}
    state = weights["model.embed_tokens.weight"][list(tokens)]
    for layer in range(config["num_hidden_layers"]):
        own = _below(weights, f"model.layers.{layer}.")
        normed = _normalise(state, own["input_layernorm.weight"])
        state = state + _attention(normed, _below(own, "self_attn."), config, drop_gate=drop_gate)
        normed = _normalise(state, own["post_attention_layernorm.weight"])
        state = state + _feed_forward(normed, _below(own, "mlp."), config)
    state = _normalise(state, weights["model.norm.weight"])
    return state @ weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T


def greedy_tokens(folder: str | Path, prompt: Sequence[int], num_tokens: int, *, drop_gate: bool = False) -> list[int]:
    """The tokens that greedy decoding must give after a prompt."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(reference_logits(folder, tokens, drop_gate=drop_gate)[-1].argmax()))
    return tokens[len(prompt) :]


def _draw_tensors(config: dict[str, Any], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Random tensors whose activations stay near one, with attention and gates well away from uniform."""
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim, kv_rows = config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    query_rows = config["num_attention_heads"] * dim
    packed_rows = config["num_attention_heads"] * (dim + _gate_width(config))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    def vector(size: int, centre: float, spread: float) -> Tensor:
        return centre + spread * torch.randn(size, generator=generator)

    # A tied head multiplies the embedding with itself: smaller, or every token would predict itself.
    embedding_gain = 0.15 * hidden**0.5 if config["tie_word_embeddings"] else hidden**0.5
    yield "model.embed_tokens.weight", matrix(vocab, hidden, embedding_gain)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", vector(hidden, 1.0, 0.25)
        for name, rows, columns in (
            ("q_proj", packed_rows, hidden),
            ("k_proj", kv_rows, hidden),
            ("v_proj", kv_rows, hidden),
            ("o_proj", hidden, query_rows),
        ):
            yield f"{at}self_attn.{name}.weight", matrix(rows, columns, 2.0)
            if config["qkv_bias"]:
                yield f"{at}self_attn.{name}.bias", vector(rows, 0.0, 0.4)
        if config["use_qk_norm"]:
            yield at + "self_attn.q_norm.weight", vector(dim, 1.0, 0.25)
            yield at + "self_attn.k_norm.weight", vector(dim, 1.0, 0.25)
        yield at + "post_attention_layernorm.weight", vector(hidden, 1.0, 0.25)
        if "num_experts" in config:
            yield at + "mlp.gate.weight", matrix(config["num_experts"], hidden, 2.0)
            blocks = [f"{at}mlp.experts.{expert}." for expert in range(config["num_experts"])]
        else:
            blocks = [at + "mlp."]
        for block in blocks:
            yield block + "gate_proj.weight", matrix(ffn, hidden)
            yield block + "up_proj.weight", matrix(ffn, hidden)
            yield block + "down_proj.weight", matrix(hidden, ffn, 2.0)
    yield "model.norm.weight", vector(hidden, 1.0, 0.25)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", matrix(vocab, hidden, 1.5)


def _gate_width(config: dict[str, Any]) -> int:
    if config["elementwise_attn_output_gate"]:
        return config["head_dim"]
    return 1 if config["headwise_attn_output_gate"] else 0


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    if path.suffix == ".bin":
        torch.save(tensors, path)
    else:
        save_file(tensors, path, metadata={"format": "pt"})


def _below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _normalise(x: Tensor, scale: Tensor) -> Tensor:
    return scale * x / (x.square().mean(-1, keepdim=True) + NORM_EPSILON).sqrt()


def _project(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    projected = x @ weights[f"{name}.weight"].T
    return projected + weights[f"{name}.bias"] if f"{name}.bias" in weights else projected


def _rotate(heads: Tensor) -> Tensor:
    """Rotary embedding of ``[T, heads, D]``: channel i turns with channel i + D/2, written as complex numbers."""
    num_tokens, _, dim = heads.shape
    half = dim // 2
    frequencies = ROPE_THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(num_tokens, dtype=torch.float64)[:, None] * frequencies
    turned = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def _attention(normed: Tensor, weights: dict[str, Tensor], config: dict[str, Any], *, drop_gate: bool) -> Tensor:
    """Gated attention of ``[T, H]``, one query head after another."""
    num_heads, num_kv_heads, dim = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    num_tokens, width, group = normed.shape[0], _gate_width(config), num_heads // num_kv_heads
    packed = _project(normed, weights, "q_proj")
    if drop_gate:
        packed, width = packed[:, : num_heads * dim], 0
    # Each group's block of rows holds the queries of its heads first, then their gate values.
    blocks = packed.chunk(num_kv_heads, dim=-1)
    query = torch.cat([block[:, : group * dim] for block in blocks], -1).view(num_tokens, num_heads, dim)
    gate = torch.cat([block[:, group * dim :] for block in blocks], -1).view(num_tokens, num_heads, width)
    key = _project(normed, weights, "k_proj").view(num_tokens, num_kv_heads, dim)
    value = _project(normed, weights, "v_proj").view(num_tokens, num_kv_heads, dim)
    if config["use_qk_norm"]:
        query, key = _normalise(query, weights["q_norm.weight"]), _normalise(key, weights["k_norm.weight"])
    query, key = _rotate(query), _rotate(key)
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    outputs: list[Tensor] = []
    for head in range(num_heads):
        scores = query[:, head] @ key[:, head // group].T / dim**0.5
        output = scores.masked_fill(future, -torch.inf).softmax(-1) @ value[:, head // group]
        outputs.append(output * gate[:, head].sigmoid() if width else output)
    return _project(torch.cat(outputs, -1), weights, "o_proj")


def _feed_forward(normed: Tensor, weights: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """The MLP of ``[T, H]``, or the weighted sum of each token's best experts."""
    if "num_experts" not in config:
        return _swiglu(normed, weights)
    probabilities = _project(normed, weights, "gate").softmax(-1)
    share, chosen = probabilities.topk(config["num_experts_per_tok"], dim=-1)
    if config["norm_topk_prob"]:
        share = share / share.sum(-1, keepdim=True)
    rows: list[Tensor] = []
    for token in range(normed.shape[0]):
        outputs = [_swiglu(normed[token], _below(weights, f"experts.{int(expert)}.")) for expert in chosen[token]]
        rows.append(share[token] @ torch.stack(outputs))
    return torch.stack(rows)


def _swiglu(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    gated = _project(x, weights, "gate_proj")
    return _project(gated * gated.sigmoid() * _project(x, weights, "up_proj"), weights, "down_proj")
