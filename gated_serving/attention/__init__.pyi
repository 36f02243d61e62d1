from .accounting import (
    num_attention_flops as num_attention_flops,
    num_gate_flops as num_gate_flops,
    num_gate_parameters as num_gate_parameters,
)
from .config import (
    Activation as Activation,
    AttentionShape as AttentionShape,
    GateConfig as GateConfig,
    GateInput as GateInput,
    Granularity as Granularity,
    Operation as Operation,
    Packing as Packing,
    Position as Position,
    Sharing as Sharing,
)
from .gate import (
    apply_gate as apply_gate,
    gate_scores as gate_scores,
)
from .initialization import (
    init_gate_rows as init_gate_rows,
    init_packed_rows as init_packed_rows,
)
from .packing import (
    join_rows as join_rows,
    repack_rows as repack_rows,
    split_projection as split_projection,
    split_projection_by_block as split_projection_by_block,
    split_rows as split_rows,
)
from .reference import (
    reference_gate as reference_gate,
    reference_split as reference_split,
)

__all__ = [
    "Activation",
    "AttentionShape",
    "GateConfig",
    "GateInput",
    "Granularity",
    "Operation",
    "Packing",
    "Position",
    "Sharing",
    "apply_gate",
    "gate_scores",
    "init_gate_rows",
    "init_packed_rows",
    "join_rows",
    "num_attention_flops",
    "num_gate_flops",
    "num_gate_parameters",
    "reference_gate",
    "reference_split",
    "repack_rows",
    "split_projection",
    "split_projection_by_block",
    "split_rows",
]
