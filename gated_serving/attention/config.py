"""What a gate is: one frozen, validated description, and the sizes that follow from it.

Source: "Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free"
(arXiv 2505.06708), section 2.2, Tables 1 and 4. A gate is ``Y' = Y * act(X W)`` with X the layer's normalised hidden
state and Y the tensor at one of five positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

FIELD_PREFIX = "gate_"


class Position(StrEnum):
    """Where the gate acts (Figure 1 of the paper)."""

    G1 = "G1"
    """On the output of scaled dot-product attention, one gate head a query head."""
    G2 = "G2"
    """On the projected values, one gate head a key/value head."""
    G3 = "G3"
    """On the projected keys, before their norm and rotation; one gate head a key/value head."""
    G4 = "G4"
    """On the projected queries, before their norm and rotation; one gate head a query head."""
    G5 = "G5"
    """On the output projection's result, over the whole hidden size."""


class Granularity(StrEnum):
    """How many gate values a head has."""

    HEADWISE = "headwise"
    """One a head."""
    ELEMENTWISE = "elementwise"
    """One a channel of the head."""


class Sharing(StrEnum):
    """Whether heads have gates of their own."""

    PER_HEAD = "per_head"
    SHARED = "shared"
    """The heads' scores are averaged and every head uses the mean (so the projection keeps its size, as in Table 1)."""


class Operation(StrEnum):
    """How the score meets the gated tensor."""

    MULTIPLY = "multiply"
    ADD = "add"


class Activation(StrEnum):
    """What turns a gate logit into a score."""

    SIGMOID = "sigmoid"
    SILU = "silu"
    SOFTPLUS = "softplus"
    NON_SPARSE_SIGMOID = "non_sparse_sigmoid"
    """``0.5 + 0.5 * sigmoid``: never below one half (Table 4)."""


class GateInput(StrEnum):
    """What the gate logits are made from."""

    HIDDEN_STATES = "hidden_states"
    CONSTANT = "constant"
    """A learned parameter, the same for every token (the paper's input-independent gate)."""


class Packing(StrEnum):
    """Where the gate's rows lie in a checkpoint."""

    KV_GROUP = "kv_group"
    """In ``q_proj``: for each key/value group its queries, then its gates (the released checkpoints)."""
    PER_HEAD = "per_head"
    """In ``q_proj``: for each query head its query, then its gate (Qwen3-Next)."""
    SEPARATE = "separate"
    """In a projection of its own, ``g_proj``, or for a constant gate in the parameter ``g_const.weight``."""


_QUERY_POSITIONS = (Position.G1, Position.G4)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The sizes of one attention layer.

    Args:
        hidden_size: Channels of the residual stream.
        num_heads: Query heads; a multiple of ``num_kv_heads``.
        num_kv_heads: Key/value heads.
        head_dim: Channels of a head.

    Raises:
        ValueError: A size is below one, or the heads do not divide into groups.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name}={value!r}: must be a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                "each key/value head serves the same number of query heads"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_query_rows(self) -> int:
        """Output rows of the query projection without any gate."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """One gate variant.

    Strings are accepted for every enumerated field and turned into its enum.

    Args:
        position: Which tensor is gated.
        granularity: One value a head or one a channel. At G5 there are no heads, so it is elementwise.
        sharing: Per head, or one mean score for all heads.
        operation: Multiply (the paper's best) or add.
        activation: From logit to score.
        input: The hidden state, or a learned constant.
        packing: Where the rows lie on disk. ``per_head`` needs a gate head a query head (G1, G4); G5 and constant
            gates are always ``separate``.
        bias: Whether a separate gate projection has a bias of its own. Packed rows share ``q_proj``'s.
        top_k_share: Keep this share of a token's gate values, the largest ones, and zero the rest; (0, 1]. None keeps
            all.
        init_scale: Standard deviation of the gate rows at initialisation, as a multiple of the model's
            ``initializer_range``; practitioners use 0.1 to 0.5. Zero is allowed and starts from equal gates.
        init_bias: Initial value of the gate's bias, or of a constant gate (the paper starts the latter at 0).

    Raises:
        ValueError: A field has an unknown value, or two fields exclude each other; the message names them.
    """

    position: Position = Position.G1
    granularity: Granularity = Granularity.HEADWISE
    sharing: Sharing = Sharing.PER_HEAD
    operation: Operation = Operation.MULTIPLY
    activation: Activation = Activation.SIGMOID
    input: GateInput = GateInput.HIDDEN_STATES
    packing: Packing = Packing.KV_GROUP
    bias: bool = False
    top_k_share: float | None = None
    init_scale: float = 1.0
    init_bias: float = 0.0

    def __post_init__(self) -> None:
        for name, kind in _ENUM_FIELDS.items():
            object.__setattr__(self, name, _parse(kind, name, getattr(self, name)))
        self._check_numbers()
        self._check_combination()

    def _check_numbers(self) -> None:
        share = self.top_k_share
        if not isinstance(self.bias, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  # values come from JSON
            raise ValueError(f"gate_bias={self.bias!r}: must be true or false")
        if share is not None and not (_is_number(share) and 0 < share <= 1):
            raise ValueError(f"gate_top_k_share={share!r}: must be above 0 and at most 1, or null to keep every value")
        if not (_is_number(self.init_scale) and 0 <= self.init_scale < math.inf):
            raise ValueError(f"gate_init_scale={self.init_scale!r}: must be a finite number of at least 0")
        if not (_is_number(self.init_bias) and math.isfinite(self.init_bias)):
            raise ValueError(f"gate_init_bias={self.init_bias!r}: must be a finite number")

    def _check_combination(self) -> None:
        if self.position is Position.G5:
            if self.granularity is not Granularity.ELEMENTWISE:
                raise ValueError(
                    "gate_granularity='headwise' at gate_position='G5': the output projection's result has "
                    "no heads; use 'elementwise'"
                )
            if self.sharing is not Sharing.PER_HEAD:
                raise ValueError(
                    "gate_sharing='shared' at gate_position='G5': the output projection's result has no "
                    "heads to share a gate; use 'per_head'"
                )
        if self.packing is not Packing.SEPARATE:
            if self.input is GateInput.CONSTANT:
                raise ValueError(
                    f"gate_packing='{self.packing}' with gate_input='constant': a constant gate has no "
                    "projection rows to pack; use 'separate'"
                )
            if self.position is Position.G5:
                raise ValueError(
                    f"gate_packing='{self.packing}' at gate_position='G5': the gate has no query heads to "
                    "be packed with; use 'separate'"
                )
            if self.bias:
                raise ValueError(
                    f"gate_bias=true with gate_packing='{self.packing}': packed rows share q_proj's bias; "
                    "set attention_bias, or use 'separate'"
                )
        if self.packing is Packing.PER_HEAD and self.position not in _QUERY_POSITIONS:
            raise ValueError(
                f"gate_packing='per_head' at gate_position='{self.position}': the gate has a head for each "
                "key/value head, not for each query head; use 'kv_group' or 'separate'"
            )
        if self.input is GateInput.CONSTANT and self.bias:
            raise ValueError(
                "gate_bias=true with gate_input='constant': a constant gate is its own bias; leave it false"
            )

    @property
    def is_packed(self) -> bool:
        """Whether the gate's rows lie inside ``q_proj``."""
        return self.packing is not Packing.SEPARATE

    def num_gate_heads(self, shape: AttentionShape) -> int:
        """Gate heads of a layer: query heads (G1, G4), key/value heads (G2, G3), or 1 (G5)."""
        if self.position is Position.G5:
            return 1
        return shape.num_heads if self.position in _QUERY_POSITIONS else shape.num_kv_heads

    def gate_width(self, shape: AttentionShape) -> int:
        """Gate values a gate head: 1 headwise, ``head_dim`` elementwise, ``hidden_size`` at G5."""
        if self.position is Position.G5:
            return shape.hidden_size
        return 1 if self.granularity is Granularity.HEADWISE else shape.head_dim

    def num_gate_rows(self, shape: AttentionShape) -> int:
        """Gate logits a token and layer, which is also the number of rows of the gate's projection."""
        return self.num_gate_heads(shape) * self.gate_width(shape)

    def num_query_rows(self, shape: AttentionShape) -> int:
        """Rows of ``q_proj`` on disk: the queries, and the gate's rows where they are packed."""
        return shape.num_query_rows + (self.num_gate_rows(shape) if self.is_packed else 0)

    def to_fields(self) -> dict[str, Any]:
        """The flat ``gate_*`` fields that a model's config.json holds."""
        return {
            FIELD_PREFIX + field.name: str(value) if isinstance(value := getattr(self, field.name), StrEnum) else value
            for field in fields(self)
        }

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> GateConfig:
        """Reads the ``gate_*`` fields of a model config; absent ones take their defaults.

        Raises:
            ValueError: An unknown ``gate_*`` field, or a value that ``GateConfig`` refuses.
        """
        names = {field.name for field in fields(cls)}
        found = {
            name.removeprefix(FIELD_PREFIX): value
            for name, value in values.items()
            if isinstance(name, str) and name.startswith(FIELD_PREFIX)  # pyright: ignore[reportUnnecessaryIsInstance]
        }
        if unknown := sorted(set(found) - names):
            known = ", ".join(sorted(FIELD_PREFIX + name for name in names))
            raise ValueError(f"{FIELD_PREFIX}{unknown[0]}: unknown gate field; known fields: {known}")
        return cls(**found)


_ENUM_FIELDS: dict[str, type[StrEnum]] = {
    "position": Position,
    "granularity": Granularity,
    "sharing": Sharing,
    "operation": Operation,
    "activation": Activation,
    "input": GateInput,
    "packing": Packing,
}


def _parse(kind: type[StrEnum], name: str, value: object) -> StrEnum:
    try:
        return kind(value)  # pyright: ignore[reportArgumentType]  # StrEnum refuses whatever is not one of its values
    except ValueError:
        choices = ", ".join(repr(str(member)) for member in kind)
        raise ValueError(f"{FIELD_PREFIX}{name}={value!r}: must be one of {choices}") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
