"""What a run has to hold: ``--slo p99_ttft_ms=500``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from loadtest.errors import UsageError
from loadtest.figures import Figures

Part = Literal["llm", "policy"]

_STATISTICS = ("mean", "p50", "p90", "p99", "max")
_DURATIONS = {"ttft": "ttft_ms", "itl": "itl_ms", "tpot": "tpot_ms", "latency": "latency_ms", "e2el": "latency_ms"}
_AT_LEAST = {
    "min_requests_per_s": "requests_per_s",
    "min_output_tokens_per_s": "output_tokens_per_s",
    "min_goodput_per_s": "goodput_per_s",
}
_SHARES = {"max_error_rate": "error_rate", "max_missed_deadline_rate": "missed_deadline_rate"}

NAMES = (
    *(f"{statistic}_{name}_ms" for name in _DURATIONS for statistic in _STATISTICS),
    *_AT_LEAST,
    *_SHARES,
)
"""Every name that an SLO can have."""


class SloResult(BaseModel):
    """Whether one SLO holds."""

    name: str = Field(description="Such as p99_ttft_ms.")
    limit: float = Field(description="What was asked for, in the name's unit.")
    value: float | None = Field(description="What was measured; null when nothing succeeded.")
    holds: bool = Field(description="Whether the value is within the limit; false without a value.")


class Slo(BaseModel):
    """One thing that has to hold.

    Attributes:
        name: One of ``NAMES``.
        limit: The largest value, or the smallest for a name that begins with ``min_``.
        part: Of a mixed run: which server it is about, ``llm`` or ``policy``.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    limit: float
    part: Part | None = None

    @property
    def full_name(self) -> str:
        """As it was written."""
        return self.name if self.part is None else f"{self.part}.{self.name}"

    def check(self, figures: Figures) -> SloResult:
        """Whether it holds for these figures, of its part for a mixed run."""
        value = self.value_of(figures)
        holds = value is not None and (value >= self.limit if self.name in _AT_LEAST else value <= self.limit)
        return SloResult(name=self.full_name, limit=self.limit, value=value, holds=holds)

    def value_of(self, figures: Figures) -> float | None:
        """The figure that it is about; None when it cannot be computed."""
        single = _AT_LEAST.get(self.name) or _SHARES.get(self.name)
        if single is not None:
            value: float | None = getattr(figures, single)
            return value
        statistic, name, _ = self.name.split("_")
        stats = getattr(figures, _DURATIONS[name])
        return None if stats is None else float(getattr(stats, statistic))

    @property
    def request_limit(self) -> tuple[str, float] | None:
        """For goodput: the field of one request's durations and its limit; None if it is not about single requests."""
        name = self.name.split("_")[1] if self.name.endswith("_ms") else ""
        return (_DURATIONS[name], self.limit) if name in ("ttft", "tpot", "latency", "e2el") else None


def parse_slos(texts: Iterable[str]) -> tuple[Slo, ...]:
    """SLOs as they are written on the command line.

    Raises:
        UsageError: One is not NAME=VALUE, or has an unknown name or a value that makes no sense.
    """
    slos: list[Slo] = []
    for text in texts:
        full_name, separator, value = text.partition("=")
        part, dot, name = full_name.rpartition(".")
        if not separator:
            raise UsageError(f"slo={text!r}: write NAME=VALUE, such as p99_latency_ms=50")
        if dot and part not in ("llm", "policy"):
            raise UsageError(
                f"slo={text!r}: {part!r} is none of a mixed run's servers; write llm.{name} or policy.{name}"
            )
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise UsageError(f"slo={text!r}: there is no {name!r}; {hint}there are {_listed()}")
        slo = Slo(name=name, limit=_limit_of(name, value, text), part=cast("Part", part) if dot else None)
        if slo.full_name in {other.full_name for other in slos}:
            raise UsageError(f"slo={text!r}: {slo.full_name} is given twice; leave one out")
        slos.append(slo)
    return tuple(slos)


def _limit_of(name: str, value: str, text: str) -> float:
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    is_share = name in _SHARES
    if not math.isfinite(limit) or limit < 0 or (limit == 0 and not is_share) or (is_share and limit > 1):
        wanted = "a share from 0 to 1" if is_share else "a number above 0"
        raise UsageError(f"slo={text!r}: {value!r} has to be {wanted}")
    return limit


def _listed() -> str:
    durations = f"{{{','.join(_STATISTICS)}}}_{{{','.join(_DURATIONS)}}}_ms"
    return ", ".join((durations, *_AT_LEAST, *_SHARES))


def request_limits(slos: Sequence[Slo], part: str | None = None) -> dict[str, float]:
    """The smallest limit of each duration of a single request; what goodput counts by.

    Args:
        slos: All of a run.
        part: Of a mixed run: whose count; those of the other server are left out.
    """
    limits: dict[str, float] = {}
    for slo in slos:
        if slo.part == part and (limit := slo.request_limit) is not None:
            limits[limit[0]] = min(limit[1], limits.get(limit[0], math.inf))
    return limits
