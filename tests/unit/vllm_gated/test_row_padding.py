import pytest
import torch
from torch import nn
from vllm.platforms import current_platform

from vllm_gated.projections import ROW_MULTIPLE, RowPaddingLinearMethod

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="rows are padded for vLLM's CPU kernels only")


@pytest.mark.parametrize("num_rows", [1, 31, 32, 1032])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_padded_projection_keeps_its_answers_and_adds_columns_of_zeros(num_rows, has_bias, num_tokens):
    torch.manual_seed(0)
    layer = nn.Linear(64, num_rows, bias=has_bias)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    states = torch.randn(num_tokens, 64)
    expected = layer(states)
    method = RowPaddingLinearMethod()

    method.process_weights_after_loading(layer)
    result = method.apply(layer, states, layer.bias)

    assert result.shape[1] % ROW_MULTIPLE == 0
    assert result.shape[1] - num_rows < ROW_MULTIPLE
    torch.testing.assert_close(result[:, :num_rows], expected, rtol=1e-5, atol=1e-5)
    assert not result[:, num_rows:].any()
