"""A gated model in plain tensor algebra, float64, one sequence at a time: what every implementation is compared with.

Written from the paper and from the description of the formats, without transformers' or vLLM's layers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gated_serving.attention import AttentionShape, GateConfig, GateInput, Position, reference_gate, reference_split


def reference_logits(weights: Mapping[str, Tensor], config, tokens: list[int]) -> Tensor:
    """Logits ``[T, vocab]`` of a gated dense or mixture-of-experts model.

    Args:
        weights: A state dict in the names of the checkpoint format.
        config: A ``GatedQwen3Config`` or ``GatedQwen3MoeConfig``.
        tokens: Token ids.
    """
    weights = {name: tensor.double() for name, tensor in weights.items()}
    eps = config.rms_norm_eps
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        x = x + _attention(weights, f"{at}self_attn.", config, _rms(x, weights[f"{at}input_layernorm.weight"], eps))
        normed = _rms(x, weights[f"{at}post_attention_layernorm.weight"], eps)
        if f"{at}mlp.gate.weight" in weights:
            x = x + _experts(weights, f"{at}mlp.", config, normed)
        else:
            x = x + _feed_forward(weights, f"{at}mlp.", normed)
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return _rms(x, weights["model.norm.weight"], eps) @ head.T


def greedy(weights: Mapping[str, Tensor], config, prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens that the model continues with, largest logit each time."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(reference_logits(weights, config, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def _attention(weights: Mapping[str, Tensor], at: str, config, x: Tensor) -> Tensor:
    gate: GateConfig = config.gate
    shape: AttentionShape = config.attention_shape
    num_tokens = x.shape[0]

    def heads(projected: Tensor, num_heads: int) -> Tensor:
        return projected.view(num_tokens, num_heads, shape.head_dim)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{at}{name}.weight"].T + weights.get(f"{at}{name}.bias", torch.zeros((), dtype=x.dtype))

    if gate.is_packed:
        rows, gate_rows = reference_split(weights[f"{at}q_proj.weight"], gate, shape)
        q, logits = x @ rows.T, x @ gate_rows.T
        if f"{at}q_proj.bias" in weights:
            bias, gate_bias = reference_split(weights[f"{at}q_proj.bias"], gate, shape)
            q, logits = q + bias, logits + gate_bias
    else:
        q = linear("q_proj", x)
        constant = gate.input is GateInput.CONSTANT
        logits = weights[f"{at}g_const.weight"].repeat(num_tokens, 1, 1) if constant else linear("g_proj", x)
    logits = logits.view(num_tokens, gate.num_gate_heads(shape), gate.gate_width(shape))

    def gated(position: Position, y: Tensor) -> Tensor:
        return reference_gate(y, logits, gate) if gate.position is position else y

    q = gated(Position.G4, heads(q, shape.num_heads))
    k = gated(Position.G3, heads(linear("k_proj", x), shape.num_kv_heads))
    v = gated(Position.G2, heads(linear("v_proj", x), shape.num_kv_heads))
    if config.use_qk_norm:
        q = _rms(q, weights[f"{at}q_norm.weight"], config.rms_norm_eps)
        k = _rms(k, weights[f"{at}k_norm.weight"], config.rms_norm_eps)
    theta = config.rope_parameters["rope_theta"]
    q, k = _rotate(q, theta), _rotate(k, theta)
    attended = torch.empty_like(q)
    for head in range(shape.num_heads):
        kv_head = head // shape.group_size
        scores = q[:, head] @ k[:, kv_head].T / shape.head_dim**0.5
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        attended[:, head] = scores.softmax(-1) @ v[:, kv_head]
    output = linear("o_proj", gated(Position.G1, attended).reshape(num_tokens, -1))
    return gated(Position.G5, output[:, None])[:, 0]


def _feed_forward(weights: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    gate, up = x @ weights[f"{at}gate_proj.weight"].T, x @ weights[f"{at}up_proj.weight"].T
    return (gate * gate.sigmoid() * up) @ weights[f"{at}down_proj.weight"].T


def _experts(weights: Mapping[str, Tensor], at: str, config, x: Tensor) -> Tensor:
    rows = []
    for token in x:
        routing, chosen = (weights[f"{at}gate.weight"] @ token).softmax(-1).topk(config.num_experts_per_tok)
        if config.norm_topk_prob:
            routing = routing / routing.sum()
        experts = [_feed_forward(weights, f"{at}experts.{index}.", token) for index in chosen.tolist()]
        rows.append((routing[:, None] * torch.stack(experts)).sum(0))
    return torch.stack(rows)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary position embedding of ``[T, heads, D]``, channel i turning with channel i + D/2."""
    num_tokens, _, dim = x.shape
    frequencies = theta ** (-torch.arange(dim // 2, dtype=x.dtype) * 2 / dim)
    turned = torch.polar(
        torch.ones(num_tokens, dim // 2, dtype=x.dtype), torch.arange(num_tokens)[:, None] * frequencies
    )
    rotated = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * turned[:, None]
    return torch.cat([rotated.real, rotated.imag], dim=-1)
