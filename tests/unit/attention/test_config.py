import dataclasses
import itertools

import pytest

from gated_serving.attention import (
    Activation,
    AttentionShape,
    GateConfig,
    GateInput,
    Granularity,
    Packing,
    Position,
    Sharing,
)

SHAPE = AttentionShape(hidden_size=96, num_heads=6, num_kv_heads=2, head_dim=32)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position", "G6"),
        ("granularity", "tokenwise"),
        ("sharing", "none"),
        ("operation", "divide"),
        ("activation", "relu"),
        ("input", "query"),
        ("packing", "interleaved"),
        ("bias", "yes"),
        ("top_k_share", 0),
        ("top_k_share", 1.2),
        ("top_k_share", True),
        ("init_scale", -0.1),
        ("init_scale", float("nan")),
        ("init_bias", float("inf")),
    ],
)
def test_a_wrong_value_is_refused_by_field_name_and_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"gate_{field}={value!r}"):
        GateConfig(**{field: value})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"position": "G5", "packing": "separate"}, "gate_granularity"),
        ({"position": "G5", "packing": "separate", "granularity": "elementwise", "sharing": "shared"}, "gate_sharing"),
        ({"position": "G5", "granularity": "elementwise"}, "gate_packing"),
        ({"position": "G2", "packing": "per_head"}, "gate_packing"),
        ({"position": "G3", "packing": "per_head"}, "gate_packing"),
        ({"input": "constant"}, "gate_packing"),
        ({"bias": True}, "gate_bias"),
        ({"bias": True, "input": "constant", "packing": "separate"}, "gate_bias"),
    ],
)
def test_fields_that_exclude_each_other_are_refused(fields: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        GateConfig(**fields)


def test_every_variant_of_the_paper_can_be_made() -> None:
    made = set()
    for position, granularity, sharing, activation, gate_input in itertools.product(
        Position, Granularity, Sharing, Activation, GateInput
    ):
        if position is Position.G5 and (granularity is Granularity.HEADWISE or sharing is Sharing.SHARED):
            continue
        made.add(
            GateConfig(
                position=position,
                granularity=granularity,
                sharing=sharing,
                activation=activation,
                input=gate_input,
                packing=Packing.SEPARATE,
            )
        )
    assert len(made) == (4 * 2 * 2 + 1) * 4 * 2


def test_fields_round_trip_through_json_types() -> None:
    gate = GateConfig(position="G2", granularity="elementwise", top_k_share=0.3, init_scale=0.2)
    fields = gate.to_fields()
    assert all(type(value) in (str, bool, float, type(None)) for value in fields.values())
    assert GateConfig.from_fields(fields | {"hidden_size": 5}) == gate


def test_an_unknown_gate_field_is_refused() -> None:
    with pytest.raises(ValueError, match="gate_postion"):
        GateConfig.from_fields({"gate_postion": "G1"})


@pytest.mark.parametrize(
    ("gate", "heads", "width"),
    [
        (GateConfig(position="G1"), 6, 1),
        (GateConfig(position="G4", granularity="elementwise"), 6, 32),
        (GateConfig(position="G2"), 2, 1),
        (GateConfig(position="G3", granularity="elementwise"), 2, 32),
        (GateConfig(position="G5", granularity="elementwise", packing="separate"), 1, 96),
        (GateConfig(position="G1", granularity="elementwise", sharing="shared"), 6, 32),
    ],
)
def test_sizes_follow_position_and_granularity(gate: GateConfig, heads: int, width: int) -> None:
    assert gate.num_gate_heads(SHAPE) == heads
    assert gate.gate_width(SHAPE) == width
    assert gate.num_gate_rows(SHAPE) == heads * width
    packed_rows = heads * width if gate.is_packed else 0
    assert gate.num_query_rows(SHAPE) == 6 * 32 + packed_rows


@pytest.mark.parametrize("field", ["hidden_size", "num_heads", "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_a_shape_of_wrong_sizes_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(SHAPE, **{field: value})


def test_heads_must_divide_into_groups() -> None:
    with pytest.raises(ValueError, match=r"num_heads=6 .* num_kv_heads=4"):
        dataclasses.replace(SHAPE, num_kv_heads=4)
