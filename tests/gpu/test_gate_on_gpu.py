import itertools

import pytest
import torch

from gated_serving.attention import Activation, GateConfig, Operation, apply_gate, reference_gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "operation"), itertools.product(Activation, Operation))
def test_compiled_gate_equals_the_reference(activation, operation, dtype: torch.dtype) -> None:
    gate = GateConfig(activation=activation, operation=operation, granularity="elementwise")
    compiled = torch.compile(apply_gate, dynamic=True, fullgraph=True)
    for sizes in [(1, 1, 1), (7, 3, 5), (33, 16, 128)]:
        gated, logits = (torch.randn(sizes, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
        output = compiled(gated, logits, gate)
        expected = reference_gate(gated.cpu().double(), logits.cpu().double(), gate).to(dtype)
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(output.cpu(), expected, atol=tolerance, rtol=tolerance)
