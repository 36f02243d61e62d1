import dataclasses

import pytest
import torch

from gated_serving.attention import (
    AttentionShape,
    GateConfig,
    join_rows,
    reference_split,
    repack_rows,
    split_projection,
    split_projection_by_block,
    split_rows,
)

SHAPES = [
    AttentionShape(hidden_size=24, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
    for heads, kv_heads, dim in [(4, 2, 8), (6, 1, 5), (3, 3, 7), (8, 4, 1), (1, 1, 3)]
]
PACKED_GATES = [
    GateConfig(position=position, granularity=granularity, packing=packing)
    for position in ("G1", "G2", "G3", "G4")
    for granularity in ("headwise", "elementwise")
    for packing in ("kv_group", "per_head")
    if packing == "kv_group" or position in ("G1", "G4")
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gate", PACKED_GATES)
def test_split_finds_the_rows_that_a_walk_over_the_blocks_finds(gate: GateConfig, shape: AttentionShape) -> None:
    packed = torch.arange(gate.num_query_rows(shape) * 3).view(-1, 3)
    for found, expected in zip(split_rows(packed, gate, shape), reference_split(packed, gate, shape), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gate", PACKED_GATES)
@pytest.mark.parametrize("trailing", [(), (24,)])
def test_join_returns_every_bit(gate: GateConfig, shape: AttentionShape, trailing: tuple[int, ...]) -> None:
    packed = torch.randn(gate.num_query_rows(shape), *trailing).to(torch.bfloat16)
    queries, gates = split_rows(packed, gate, shape)
    assert queries.shape[0] == shape.num_query_rows
    assert gates.shape[0] == gate.num_gate_rows(shape)
    assert torch.equal(join_rows(queries, gates, gate, shape), packed)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_repacking_there_and_back_returns_every_bit(granularity: str, shape: AttentionShape) -> None:
    gate = GateConfig(granularity=granularity)
    packed = torch.randn(gate.num_query_rows(shape), 4)
    moved = repack_rows(packed, gate, shape, "per_head")
    back = repack_rows(moved, dataclasses.replace(gate, packing="per_head"), shape, "kv_group")
    assert torch.equal(back, packed)


def test_packings_differ_when_heads_share_keys_and_agree_when_they_do_not() -> None:
    grouped, alone = SHAPES[0], SHAPES[2]
    gate = GateConfig()
    for shape, same in ((grouped, False), (alone, True)):
        packed = torch.arange(gate.num_query_rows(shape))
        assert torch.equal(repack_rows(packed, gate, shape, "per_head"), packed) is same


def test_the_released_layout_row_by_row() -> None:
    """Four heads of two channels in two groups, headwise: per group two queries of two rows, then their two gates."""
    shape = AttentionShape(hidden_size=4, num_heads=4, num_kv_heads=2, head_dim=2)
    queries, gates = split_rows(torch.arange(12), GateConfig(), shape)
    assert queries.tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    assert gates.tolist() == [4, 5, 10, 11]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gate", PACKED_GATES)
def test_splitting_the_projection_is_projecting_with_the_split_rows(gate: GateConfig, shape: AttentionShape) -> None:
    torch.manual_seed(0)
    weight = torch.randn(gate.num_query_rows(shape), shape.hidden_size, dtype=torch.float64)
    hidden = torch.randn(2, 3, shape.hidden_size, dtype=torch.float64)
    queries, logits = split_projection(hidden @ weight.T, gate, shape)
    query_rows, gate_rows = reference_split(weight, gate, shape)
    assert queries.shape == (2, 3, shape.num_heads, shape.head_dim)
    assert logits.shape == (2, 3, gate.num_gate_heads(shape), gate.gate_width(shape))
    torch.testing.assert_close(queries.flatten(2), hidden @ query_rows.T)
    torch.testing.assert_close(logits.flatten(2), hidden @ gate_rows.T)
    for by_block, by_head in zip(
        split_projection_by_block(hidden @ weight.T, gate, shape), (queries, logits), strict=True
    ):
        assert by_block.ndim == by_head.ndim + 1
        assert torch.equal(by_block.flatten(2, 3), by_head)


def test_a_wrong_number_of_rows_is_named() -> None:
    with pytest.raises(ValueError, match=r"q_proj has 32 rows, expected 36: 32 queries and 4 gates"):
        split_rows(torch.zeros(32, 24), GateConfig(), SHAPES[0])
    with pytest.raises(ValueError, match=r"gates have 3 rows, expected 4"):
        join_rows(torch.zeros(32, 24), torch.zeros(3, 24), GateConfig(), SHAPES[0])


def test_a_separate_gate_has_no_packed_rows() -> None:
    with pytest.raises(ValueError, match="separate"):
        split_rows(torch.zeros(32, 24), GateConfig(packing="separate"), SHAPES[0])
