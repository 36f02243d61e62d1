import itertools

import pytest
import torch

from gated_serving.attention import AttentionShape, GateConfig, Granularity, Packing, Position, Sharing, split_rows
from vllm_gated.projections import RankShare, crosses_heads, gives_all_heads

SHAPES = [(4, 1), (4, 2), (4, 4), (8, 2), (16, 8)]


def shape_of(heads: int, kv_heads: int) -> AttentionShape:
    return AttentionShape(hidden_size=16, num_heads=heads, num_kv_heads=kv_heads, head_dim=3)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize(
    ("packing", "position"),
    [(Packing.KV_GROUP, position) for position in (Position.G1, Position.G2, Position.G3, Position.G4)]
    + [(Packing.PER_HEAD, Position.G1), (Packing.PER_HEAD, Position.G4)],
)
@pytest.mark.parametrize("granularity", list(Granularity))
def test_each_rank_holds_its_own_heads_and_their_gates(packing, position, granularity, heads, kv_heads, num_ranks):
    shape = shape_of(heads, kv_heads)
    gate = GateConfig(packing=packing, position=position, granularity=granularity)
    packed = torch.arange(gate.num_query_rows(shape))
    queries, gates = split_rows(packed, gate, shape)
    queries = queries.view(heads, -1)
    gates = gates.view(gate.num_gate_heads(shape), -1)
    for rank in range(num_ranks):
        share = RankShare(shape=shape, rank=rank, num_ranks=num_ranks)
        rows = share.packed_rows(gate)
        local_queries, local_gates = split_rows(rows, gate, share.local_shape)
        first = rank * heads // num_ranks
        expected_heads = range(first, first + heads // num_ranks)
        assert torch.equal(local_queries.view(-1, 3), queries[list(expected_heads)])
        if position in (Position.G2, Position.G3):
            gate_heads = sorted({head * kv_heads // heads for head in expected_heads})
        else:
            gate_heads = list(expected_heads)
        assert torch.equal(local_gates.view(len(gate_heads), -1), gates[gate_heads])
        assert list(range(gate.num_gate_heads(shape)))[share.gate_head_slice(gate)] == gate_heads


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_slice_the_rows_on_disk_unless_they_divide_a_group(heads, kv_heads, num_ranks):
    shape = shape_of(heads, kv_heads)
    for packing, rank in itertools.product((Packing.KV_GROUP, Packing.PER_HEAD), range(num_ranks)):
        gate = GateConfig(packing=packing)
        share = RankShare(shape=shape, rank=rank, num_ranks=num_ranks)
        rows = share.packed_rows(gate)
        is_slice = torch.equal(rows, torch.arange(rows[0].item(), rows[0].item() + len(rows)))
        assert is_slice or (packing is Packing.KV_GROUP and share.kv_replicas > 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "num_ranks", "message"),
    [(4, 2, 3, "num_attention_heads=4"), (12, 6, 4, "num_key_value_heads=6")],
)
def test_heads_that_cannot_be_divided_are_refused(heads, kv_heads, num_ranks, message):
    with pytest.raises(ValueError, match=message):
        RankShare(shape=shape_of(heads, kv_heads), rank=0, num_ranks=num_ranks)


def test_gates_that_need_every_heads_logits():
    assert crosses_heads(GateConfig(sharing=Sharing.SHARED))
    assert crosses_heads(GateConfig(top_k_share=0.3))
    assert not crosses_heads(GateConfig())

    two_ranks = RankShare(shape=shape_of(4, 1), rank=0, num_ranks=2)
    assert gives_all_heads(GateConfig(position=Position.G2, packing=Packing.SEPARATE), two_ranks)
    assert gives_all_heads(
        GateConfig(position=Position.G5, granularity=Granularity.ELEMENTWISE, packing=Packing.SEPARATE), two_ranks
    )
    assert not gives_all_heads(GateConfig(packing=Packing.SEPARATE), two_ranks)
