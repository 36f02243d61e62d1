"""Where the gate's rows lie inside ``q_proj``, and lossless moves between the packings.

Legend: N query heads, K key/value heads, D head dim, W gate width, R gate rows (gate heads x W), H hidden size.

Nothing here is arithmetic: rows are only reordered, so a round trip returns every bit. The functions act on dimension
0 of a weight ``[rows, H]``, of a bias ``[rows]`` or of LoRA's B matrix ``[rows, rank]``; ``split_projection`` acts on
the last dimension of an activation.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from gated_serving.attention.config import AttentionShape, GateConfig, Packing


def split_rows(packed: Tensor, gate: GateConfig, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Takes a packed ``q_proj`` tensor apart.

    Args:
        packed: ``[N*D + R, ...]`` in the order of ``gate.packing``, which must not be ``separate``.
        gate: The gate.
        shape: The layer's sizes.

    Returns:
        The queries ``[N*D, ...]`` and the gate's rows ``[R, ...]``, both in head order.

    Raises:
        ValueError: The packing is ``separate``, or the number of rows is not what gate and shape ask for.
    """
    blocks, query_rows, gate_rows = _block_layout(gate, shape)
    rest = packed.shape[1:]
    expected = gate.num_query_rows(shape)
    if packed.shape[0] != expected:
        raise ValueError(
            f"q_proj has {packed.shape[0]} rows, expected {expected}: {shape.num_query_rows} queries and "
            f"{gate.num_gate_rows(shape)} gates of a {gate.granularity} gate at {gate.position}"
        )
    by_block = packed.reshape(blocks, query_rows + gate_rows, *rest)
    queries, gates = by_block[:, :query_rows], by_block[:, query_rows:]
    return queries.reshape(blocks * query_rows, *rest), gates.reshape(blocks * gate_rows, *rest)


def join_rows(queries: Tensor, gates: Tensor, gate: GateConfig, shape: AttentionShape) -> Tensor:
    """Puts queries ``[N*D, ...]`` and gate rows ``[R, ...]``, both in head order, into ``gate.packing``.

    Returns:
        ``[N*D + R, ...]``, the inverse of ``split_rows``.

    Raises:
        ValueError: The packing is ``separate``, or a number of rows is wrong.
    """
    blocks, query_rows, gate_rows = _block_layout(gate, shape)
    for name, tensor, expected in (
        ("queries", queries, blocks * query_rows),
        ("gates", gates, blocks * gate_rows),
    ):
        if tensor.shape[0] != expected:
            raise ValueError(f"{name} have {tensor.shape[0]} rows, expected {expected}")
    rest = queries.shape[1:]
    joined = queries.new_empty((blocks, query_rows + gate_rows, *rest))
    joined[:, :query_rows] = queries.reshape(blocks, query_rows, *rest)
    joined[:, query_rows:] = gates.reshape(blocks, gate_rows, *rest)
    return joined.reshape(blocks * (query_rows + gate_rows), *rest)


def repack_rows(packed: Tensor, gate: GateConfig, shape: AttentionShape, target: Packing) -> Tensor:
    """Moves a packed tensor from ``gate.packing`` to another packed order.

    Raises:
        ValueError: ``target`` does not fit the gate, is ``separate`` (use ``split_rows``), or the rows do not match.
    """
    queries, gates = split_rows(packed, gate, shape)
    return join_rows(queries, gates, dataclasses.replace(gate, packing=target), shape)


def split_projection(projected: Tensor, gate: GateConfig, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Takes the result of a packed ``q_proj`` apart.

    Args:
        projected: ``[..., N*D + R]``.
        gate: The gate, packed.
        shape: The layer's sizes; under tensor parallelism those of this rank.

    Returns:
        Queries ``[..., N, D]`` and gate logits ``[..., gate heads, W]``. Views where the layout allows.
    """
    queries, gates = split_projection_by_block(projected, gate, shape)
    return queries.flatten(-3, -2), gates.flatten(-3, -2)


def split_projection_by_block(projected: Tensor, gate: GateConfig, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """As ``split_projection``, with the heads still by block, so that both results are views and nothing is copied.

    Compiled, a merged head dimension would cost a division for every element, which keeps the loops from being
    vectorised; over blocks, heads and channels the addresses are plain.

    Returns:
        Queries ``[..., blocks, N / blocks, D]`` and gate logits ``[..., blocks, gate heads / blocks, W]``; a block is a
        key/value group or a query head, as ``gate.packing`` says.
    """
    blocks, query_rows, gate_rows = _block_layout(gate, shape)
    lead = projected.shape[:-1]
    by_block = projected.view(*lead, blocks, query_rows + gate_rows)
    queries, gates = by_block[..., :query_rows], by_block[..., query_rows:]
    width = gate.gate_width(shape)
    return (
        queries.view(*lead, blocks, query_rows // shape.head_dim, shape.head_dim),
        gates.view(*lead, blocks, gate_rows // width, width),
    )


def _block_layout(gate: GateConfig, shape: AttentionShape) -> tuple[int, int, int]:
    """Number of blocks in ``q_proj``, and the query rows and gate rows of each."""
    if gate.packing is Packing.KV_GROUP:
        blocks = shape.num_kv_heads
    elif gate.packing is Packing.PER_HEAD:
        blocks = shape.num_heads
    else:
        raise ValueError("gate_packing='separate': q_proj holds no gate rows to split or join")
    return blocks, shape.num_query_rows // blocks, gate.num_gate_rows(shape) // blocks
