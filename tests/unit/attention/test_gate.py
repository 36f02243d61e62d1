import itertools

import pytest
import torch

from gated_serving.attention import Activation, GateConfig, Operation, Sharing, apply_gate, gate_scores, reference_gate

VARIANTS = [
    GateConfig(
        activation=activation, operation=operation, sharing=sharing, top_k_share=share, granularity=granularity,
        packing="separate",
    )
    for activation, operation, sharing, share, granularity in itertools.product(
        Activation, Operation, Sharing, (None, 0.3, 1.0), ("headwise", "elementwise")
    )
]  # fmt: skip
SIZES = [(1, 1, 1), (5, 3, 7), (2, 8, 4)]


def inputs(gate: GateConfig, sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, head_dim = sizes
    generator = torch.Generator().manual_seed(7)
    width = 1 if gate.granularity == "headwise" else head_dim
    gated = torch.randn(num_tokens, num_heads, head_dim, generator=generator, dtype=dtype)
    logits = torch.randn(num_tokens, num_heads, width, generator=generator, dtype=dtype)
    return gated.requires_grad_(), logits.requires_grad_()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("gate", VARIANTS, ids=str)
def test_value_and_gradient_equal_the_reference(gate: GateConfig, sizes: tuple[int, int, int]) -> None:
    results = []
    for function in (apply_gate, reference_gate):
        gated, logits = inputs(gate, sizes, torch.float64)
        output = function(gated, logits, gate)
        output.square().sum().backward()
        results.append((output.detach(), gated.grad, logits.grad))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize(
    "gate",
    [
        GateConfig(),
        GateConfig(granularity="elementwise", activation="silu", operation="add"),
        GateConfig(granularity="elementwise", sharing="shared", top_k_share=0.3),
    ],
    ids=str,
)
def test_the_compiled_form_reads_no_memory_of_its_own(gate: GateConfig) -> None:
    """Compiled with dynamic shapes, and memory that it may be given again filled with NaN beforehand."""
    compiled = torch.compile(apply_gate, dynamic=True, fullgraph=True)
    for sizes in SIZES[1:]:  # sizes of 1 would be compiled anew, each for itself
        gated, logits = inputs(gate, sizes, torch.float32)
        del_me = [torch.full(sizes, float("nan")) for _ in range(8)]
        del del_me
        torch.testing.assert_close(compiled(gated, logits, gate), reference_gate(gated, logits, gate))


def test_a_constant_gate_is_the_same_for_every_token() -> None:
    gate = GateConfig(input="constant", packing="separate", granularity="elementwise")
    gated, logits = torch.ones(2, 3, 4, 5), torch.randn(4, 5)
    scores = apply_gate(gated, logits, gate)
    torch.testing.assert_close(scores, torch.sigmoid(logits).expand(2, 3, 4, 5))


def test_the_result_keeps_the_dtype_of_what_is_gated() -> None:
    gated, logits = torch.ones(2, 3, 4, dtype=torch.bfloat16), torch.zeros(2, 3, 1, dtype=torch.float32)
    assert apply_gate(gated, logits, GateConfig()).dtype is torch.bfloat16


@pytest.mark.parametrize(("share", "kept"), [(0.3, 3), (0.1, 1), (0.01, 1), (0.55, 6), (1.0, 10)])
def test_top_k_keeps_the_largest_share_of_a_tokens_values(share: float, kept: int) -> None:
    logits = torch.randn(4, 2, 5)
    gate = GateConfig(top_k_share=share, granularity="elementwise")
    scores = gate_scores(logits, gate).flatten(1)
    dense = gate_scores(logits, GateConfig(granularity="elementwise")).flatten(1)
    assert ((scores > 0).sum(1) == kept).all()
    assert (scores.topk(kept).values == dense.topk(kept).values).all()


def test_a_shared_gate_is_the_mean_of_the_scores_not_of_the_logits() -> None:
    logits = torch.tensor([[[-2.0], [4.0]]])
    score = gate_scores(logits, GateConfig(sharing="shared"))
    torch.testing.assert_close(score, torch.sigmoid(logits).mean(1, keepdim=True))


@pytest.mark.parametrize(
    ("activation", "at_zero"), [("sigmoid", 0.5), ("silu", 0.0), ("softplus", 0.6931472), ("non_sparse_sigmoid", 0.75)]
)
def test_activations_at_zero(activation: str, at_zero: float) -> None:
    assert gate_scores(torch.zeros(1, 1, 1), GateConfig(activation=activation)).item() == pytest.approx(at_zero)
