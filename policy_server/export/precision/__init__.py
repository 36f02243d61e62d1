"""Fewer bits a weight: which layers can bear it, and what it costs in accuracy."""

from policy_server.export.precision.conversion import convert
from policy_server.export.precision.half_compute import to_half_compute
from policy_server.export.precision.report import KeptLayer, PrecisionReport, PrecisionResult

__all__ = ["KeptLayer", "PrecisionReport", "PrecisionResult", "convert", "to_half_compute"]
