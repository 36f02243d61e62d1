"""What a conversion to a lower precision says of itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import onnx

from policy_server.manifest import Precision


@dataclass(frozen=True)
class KeptLayer:
    """A linear layer that stays in fp32, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class PrecisionReport:
    """How a graph was converted and what it lost.

    Attributes:
        precision: What was asked for.
        method: How converted layers are stored and multiplied, in words.
        num_layers: Linear layers of the graph.
        num_converted: Those in the lower precision.
        kept: Those that stay in fp32.
        channel_scales: Scales there are (int8: one an output channel and block of 256 input features, else 0).
        smallest_scale: The smallest of them; 0 where there are none.
        largest_scale: The largest of them.
        fp32_weight_bytes: Bytes of all constants before.
        weight_bytes: Bytes of all constants after.
        error: Largest difference from the fp32 graph over the observations, in units of ``unit``.
        error_all_converted: The same when no sensitive layer is kept.
        tolerance: What ``error`` may be.
        num_observations: How many observations that is.
        unit: What an error of 1 is.
    """

    precision: Precision
    method: str
    num_layers: int
    num_converted: int
    kept: tuple[KeptLayer, ...]
    channel_scales: int
    smallest_scale: float
    largest_scale: float
    fp32_weight_bytes: int
    weight_bytes: int
    error: float
    error_all_converted: float
    tolerance: float
    num_observations: int
    unit: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"precision": str(self.precision)}

    def lines(self) -> list[str]:
        """For people, a sentence a line."""
        before, after = self.fp32_weight_bytes / 1e6, self.weight_bytes / 1e6
        lines = [
            f"{self.num_converted} of {self.num_layers} linear layers in {self.precision}: {self.method}",
            f"weights {before:.2f} MB -> {after:.2f} MB",
            f"largest error against fp32 {self.error:.3g} of {self.unit} on {self.num_observations} observations "
            f"(tolerance {self.tolerance:g}; {self.error_all_converted:.3g} with no sensitive layer kept)",
        ]
        if self.channel_scales:
            lines.append(f"{self.channel_scales} scales, {self.smallest_scale:.3g} to {self.largest_scale:.3g}")
        reasons: dict[str, list[str]] = {}
        for layer in self.kept:
            reasons.setdefault(layer.reason, []).append(layer.name)
        for reason, names in reasons.items():
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            lines.append(f"in fp32: {shown} ({reason})")
        return lines


@dataclass(frozen=True)
class PrecisionResult:
    """The converted graph and what is to be said of it."""

    model: onnx.ModelProto
    report: PrecisionReport
