"""Biases that a model skips while it loads: refused where they matter, let pass where they are harmless."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from vllm_gated.unused_tensors import UnusedTensorError, watch_loading

AT = "model.layers.0.self_attn."


class Fusing(nn.Module):
    """Fuses q_proj into qkv_proj as vLLM's models do, and skips whatever else it does not know."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        layer = nn.Module()
        layer.self_attn = nn.Module()
        layer.self_attn.qkv_proj = nn.Linear(4, 4, bias=bias)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([layer])

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            own = name.replace("q_proj", "qkv_proj")
            if own in parameters:
                parameters[own].data.copy_(tensor)
        return set(parameters)


def load(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    watch_loading(model)
    model.load_weights(tensors.items())  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("order", [1, -1])
def test_a_bias_that_is_skipped_beside_its_weight_is_refused(order: int) -> None:
    tensors = [(f"{AT}q_proj.weight", torch.ones(4, 4)), (f"{AT}q_proj.bias", torch.ones(4))]
    with pytest.raises(UnusedTensorError, match=r"self_attn\.q_proj\.bias, shape \[4\].*a bias that Fusing has no use"):
        load(Fusing(bias=False), dict(tensors[::order]))


@pytest.mark.parametrize(
    ("model_has_bias", "name", "value", "weight"),
    [
        (True, f"{AT}q_proj.bias", 1.0, f"{AT}q_proj.weight"),
        (False, f"{AT}q_proj.bias", 0.0, f"{AT}q_proj.weight"),
        (False, f"{AT}q_proj.bias", 1.0, f"{AT}q_proj.qweight"),
        (False, "model.layers.7.self_attn.q_proj.bias", 1.0, "model.layers.7.self_attn.q_proj.weight"),
        (False, "model.post_layernorm.bias", 1.0, "model.post_layernorm.weight"),
    ],
    ids=["used", "zero", "GPTQ's", "of a layer that is elsewhere", "of no attention or feed-forward layer"],
)
def test_other_biases_pass(model_has_bias: bool, name: str, value: float, weight: str) -> None:
    model = Fusing(bias=model_has_bias)
    load(model, {name: torch.full((4,), value), weight: torch.ones(4, 4)})
    if model_has_bias:
        assert torch.equal(model.get_parameter(f"{AT}qkv_proj.bias"), torch.ones(4))
