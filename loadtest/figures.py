"""The figures of a run, computed from its records as ``vllm bench serve`` computes its own.

Successful requests alone count for durations, tokens and rates; ITL is pooled over all of them, TPOT is one value a
request with at least two tokens; rates are over the time from the first measured request to the end of the last.
Percentiles are numpy's (linear interpolation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel, Field

from loadtest.records import RequestRecord


class Stats(BaseModel):
    """A distribution in a few numbers."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    num: int = Field(description="How many values it is of.")

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Stats | None:
        """Of these values; None of no values."""
        if not len(values):
            return None
        array = np.asarray(values, np.float64)
        p50, p90, p99 = (float(value) for value in np.percentile(array, (50, 90, 99)))
        return cls(mean=float(array.mean()), p50=p50, p90=p90, p99=p99, max=float(array.max()), num=len(array))


class Figures(BaseModel):
    """What a run, or a stage of one, showed. The warm-up is left out."""

    duration_s: float = Field(description="From the first measured request to the end of the last, seconds.")
    num_requests: int = Field(description="Requests that were meant to be sent.")
    num_ok: int = Field(description="Requests that were answered as they should be.")
    num_failed: int = Field(description="The others.")
    failures: dict[str, int] = Field(description="The others by kind, such as timeout, connection, http_503.")
    error_rate: float | None = Field(description="Failed requests, of all; 0 to 1; null without a request.")
    requests_per_s: float = Field(description="Successful requests a second.")
    rows_per_s: float = Field(description="Successful observations a second; requests, for language models.")
    input_tokens: int = Field(description="Tokens of the prompts of successful requests.")
    output_tokens: int = Field(description="Tokens of their answers.")
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    num_counted_by_chunks: int = Field(
        description="Successful requests whose server told no usage, so that each chunk was counted as a token."
    )
    goodput_per_s: float | None = Field(
        description="Successful requests a second that hold every SLO on TTFT, TPOT or latency, each for itself; null "
        "without such an SLO."
    )
    missed_deadline_rate: float | None = Field(
        description="Requests answered later than the control period or not at all, of all; null without a period."
    )
    ttft_ms: Stats | None = Field(description="Time to the first chunk, from the intended send time.")
    itl_ms: Stats | None = Field(description="Time between two chunks, over all requests.")
    tpot_ms: Stats | None = Field(description="(latency - TTFT) / (output tokens - 1), one a request.")
    latency_ms: Stats | None = Field(description="Time to the last chunk or the whole answer, from the intended time.")
    service_ms: Stats | None = Field(description="The same from the time at which it was truly sent.")


def compute_figures(
    records: Sequence[RequestRecord], *, limits: Mapping[str, float] | None = None, control: bool = False
) -> Figures:
    """The figures of these records; those of the warm-up are left out.

    Args:
        records: In any order.
        limits: For goodput: the largest ``ttft_ms``, ``tpot_ms`` and ``latency_ms`` of a good request.
        control: Whether the clients had a control period, so that deadlines could be missed.
    """
    measured = [record for record in records if not record.warmup]
    good = [record for record in measured if record.error is None]
    begun = min((record.intended_s for record in measured), default=0.0)
    duration_s = max((record.ended_s for record in measured), default=0.0) - begun
    num_input = sum(record.input_tokens or 0 for record in good)
    num_output = sum(record.output_tokens or 0 for record in good)
    missed = sum(record.deadline_missed or record.error is not None for record in measured)

    def rate(number: float) -> float:
        return number / duration_s if duration_s > 0 else 0.0

    return Figures(
        duration_s=duration_s,
        num_requests=len(measured),
        num_ok=len(good),
        num_failed=len(measured) - len(good),
        failures=dict(Counter(record.error for record in measured if record.error is not None).most_common()),
        error_rate=(len(measured) - len(good)) / len(measured) if measured else None,
        requests_per_s=rate(len(good)),
        rows_per_s=rate(sum(record.rows for record in good)),
        input_tokens=num_input,
        output_tokens=num_output,
        input_tokens_per_s=rate(num_input),
        output_tokens_per_s=rate(num_output),
        total_tokens_per_s=rate(num_input + num_output),
        num_counted_by_chunks=sum(record.tokens_from == "chunks" for record in good),
        goodput_per_s=rate(sum(_is_good(record, limits) for record in good)) if limits else None,
        missed_deadline_rate=missed / len(measured) if control and measured else None,
        ttft_ms=Stats.of([record.ttft_ms for record in good if record.ttft_ms is not None]),
        itl_ms=Stats.of([value for record in good for value in record.itl_ms]),
        tpot_ms=Stats.of([record.tpot_ms for record in good if record.tpot_ms is not None]),
        latency_ms=Stats.of([record.latency_ms for record in good if record.latency_ms is not None]),
        service_ms=Stats.of([record.service_ms for record in good if record.service_ms is not None]),
    )


def _is_good(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    return all((getattr(record, name) or 0.0) <= limit for name, limit in limits.items())
