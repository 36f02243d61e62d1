"""Figures that the paper and the released checkpoints state."""

import pytest

from gated_serving.attention import (
    AttentionShape,
    GateConfig,
    num_attention_flops,
    num_gate_flops,
    num_gate_parameters,
)

DENSE_1_7B = AttentionShape(hidden_size=2048, num_heads=16, num_kv_heads=8, head_dim=128)
MOE_15A2B = AttentionShape(hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128)
NUM_PARAMETERS_1_7B = 1_720_837_120


@pytest.mark.parametrize(
    ("gate", "millions"),
    [
        (GateConfig(granularity="elementwise"), 201),
        (GateConfig(granularity="headwise"), 1.6),
        (GateConfig(granularity="elementwise", sharing="shared"), 201),
        (GateConfig(position="G2", granularity="elementwise"), 25),
        (GateConfig(position="G2", granularity="headwise"), 0.2),
        (GateConfig(position="G3", granularity="elementwise"), 25),
        (GateConfig(position="G4", granularity="elementwise"), 201),
        (GateConfig(position="G5", granularity="elementwise", packing="separate"), 100),
    ],
)
def test_added_parameters_are_those_of_table_1(gate: GateConfig, millions: float) -> None:
    added = num_gate_parameters(gate, MOE_15A2B, num_layers=24) / 1e6
    assert added == pytest.approx(millions, rel=0.02)


def test_headwise_gating_of_the_released_dense_model_costs_almost_nothing() -> None:
    gate = GateConfig()
    assert num_gate_parameters(gate, DENSE_1_7B, num_layers=28) == 917_504
    assert num_gate_parameters(gate, DENSE_1_7B, num_layers=28) < 0.015 * NUM_PARAMETERS_1_7B
    assert num_gate_flops(gate, DENSE_1_7B, num_layers=28) < 0.05 * 2 * NUM_PARAMETERS_1_7B


def test_elementwise_gating_stays_under_five_percent_as_released() -> None:
    """The released elementwise model pays for its gate with a narrower feed-forward layer (5504 instead of 6144)."""
    gate = GateConfig(granularity="elementwise")
    added = num_gate_flops(gate, DENSE_1_7B, num_layers=28)
    saved = 28 * 2 * 3 * 2048 * (6144 - 5504)
    baseline = 2 * NUM_PARAMETERS_1_7B
    assert 0 < added - saved < 0.005 * baseline
    assert 0.06 < added / baseline < 0.07  # what it would be without that, for the first tokens of a context
    assert added < 0.05 * (baseline + num_attention_flops(DENSE_1_7B, num_layers=28, context_length=8192))


@pytest.mark.parametrize(
    ("gate", "projection_bias", "expected"),
    [
        (GateConfig(), True, 2 * 16 * 2049),
        (GateConfig(packing="separate", bias=True), False, 2 * 16 * 2049),
        (GateConfig(packing="separate"), True, 2 * 16 * 2048),
        (GateConfig(packing="separate", input="constant"), True, 2 * 16),
    ],
)
def test_biases_and_constants_are_counted(gate: GateConfig, projection_bias: bool, expected: int) -> None:
    assert num_gate_parameters(gate, DENSE_1_7B, num_layers=2, projection_bias=projection_bias) == expected


def test_a_constant_gate_projects_nothing() -> None:
    constant = GateConfig(packing="separate", input="constant", granularity="elementwise")
    assert num_gate_flops(constant, DENSE_1_7B, num_layers=1) == 2 * 2048
