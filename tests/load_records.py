"""Records of requests that were never sent, for the tests of figures, reports and comparisons."""

from __future__ import annotations

import numpy as np

from loadtest.figures import compute_figures
from loadtest.plan import Plan
from loadtest.records import RequestRecord
from loadtest.settings import LlmSettings, LoadSettings, PolicySettings
from loadtest.summary import GeneratorFigures, Summary

BEGAN_S = 1_800_000_000.0


def chat_record(start_s: float, chunk_ms: list[float], *, input_tokens: int = 10, **fields: object) -> RequestRecord:
    """A streamed answer whose chunks came at these times after the request."""
    return RequestRecord(
        "chat",
        BEGAN_S + start_s,
        BEGAN_S + start_s,
        latency_ms=chunk_ms[-1],
        service_ms=chunk_ms[-1],
        ttft_ms=chunk_ms[0],
        itl_ms=[float(value) for value in np.diff(chunk_ms)],
        input_tokens=input_tokens,
        output_tokens=len(chunk_ms),
        tokens_from="usage",
        status=200,
        **fields,  # pyright: ignore
    )


def act_record(start_s: float, latency_ms: float, **fields: object) -> RequestRecord:
    """An action."""
    return RequestRecord(
        "act",
        BEGAN_S + start_s,
        BEGAN_S + start_s,
        latency_ms=latency_ms,
        service_ms=latency_ms,
        status=200,
        **fields,  # pyright: ignore
    )


def act_records(number: int, *, mean_ms: float = 5.0, seed: int = 0, rate_per_s: float = 100.0) -> list[RequestRecord]:
    """A run of so many actions with gamma-distributed latencies."""
    generator = np.random.default_rng(seed)
    latencies = generator.gamma(4.0, mean_ms / 4.0, number)
    return [act_record(index / rate_per_s, float(latency)) for index, latency in enumerate(latencies)]


def summary_of(records: list[RequestRecord], **fields: object) -> Summary:
    """The summary of a run with these records."""
    if records and records[0].kind == "act":
        plan = Plan(policy=PolicySettings(url="http://127.0.0.1:1"), policy_load=LoadSettings())
    else:
        plan = Plan(llm=LlmSettings(url="http://127.0.0.1:1"), llm_load=LoadSettings())
    content: dict[str, object] = {
        "kind": plan.kind,
        "target": "http://127.0.0.1:1",
        "started_at": "2027-01-15T08:00:00+00:00",
        "command": "gated-serving loadtest",
        "settings": plan.shown(),
        "figures": compute_figures(records),
        "generator": GeneratorFigures(
            num_processes=1, ceiling_per_s=None, share=None, num_not_sent=0, send_lag_ms=None
        ),
    }
    return Summary(**(content | fields))  # pyright: ignore
