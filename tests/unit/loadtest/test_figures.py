"""The figures, by hand and against vLLM's own."""

from __future__ import annotations

import numpy as np
import pytest
from load_records import act_record, chat_record

from loadtest.figures import Stats, compute_figures


def test_figures_are_those_of_the_definitions() -> None:
    records = [
        chat_record(0.0, [100.0, 120.0, 150.0], input_tokens=8),
        chat_record(0.5, [200.0, 210.0], input_tokens=12),
        chat_record(1.0, [50.0], input_tokens=5),
        chat_record(0.0, [9e9], warmup=True),
        act_record(1.0, 1.0, error="http_503"),
    ]
    records[-1].latency_ms, records[-1].service_ms = None, 1000.0
    figures = compute_figures(records, limits={"ttft_ms": 150.0, "tpot_ms": 30.0})
    assert figures.duration_s == pytest.approx(2.0)
    assert (figures.num_requests, figures.num_ok, figures.num_failed) == (4, 3, 1)
    assert figures.failures == {"http_503": 1}
    assert figures.error_rate == pytest.approx(0.25)
    assert figures.requests_per_s == pytest.approx(1.5)
    assert (figures.input_tokens, figures.output_tokens) == (25, 6)
    assert figures.output_tokens_per_s == pytest.approx(3.0)
    assert figures.total_tokens_per_s == pytest.approx(15.5)
    assert figures.ttft_ms is not None
    assert figures.ttft_ms.mean == pytest.approx(350 / 3)
    assert figures.ttft_ms.p50 == 100
    assert figures.ttft_ms.max == 200
    assert figures.itl_ms is not None
    assert (figures.itl_ms.num, figures.itl_ms.mean) == (3, pytest.approx(20.0))
    assert figures.tpot_ms is not None  # an answer of one token has none
    assert (figures.tpot_ms.num, figures.tpot_ms.mean) == (2, pytest.approx((25 + 10) / 2))
    assert figures.goodput_per_s == pytest.approx(1.0)  # the first, and the one without a second token
    assert figures.missed_deadline_rate is None


def test_missed_deadlines_count_failures_too() -> None:
    records = [act_record(0, 5), act_record(0, 30, deadline_missed=True), act_record(0, 5, error="timeout")]
    assert compute_figures(records, control=True).missed_deadline_rate == pytest.approx(2 / 3)


def test_rows_are_observations() -> None:
    records = [act_record(0, 500, rows=8), act_record(0, 1000, rows=8)]
    figures = compute_figures(records)
    assert figures.requests_per_s == pytest.approx(2)
    assert figures.rows_per_s == pytest.approx(16)


def test_nothing_measured_is_no_division_by_zero() -> None:
    for records in ([], [act_record(0, 5, warmup=True)]):
        figures = compute_figures(records)
        assert (figures.num_requests, figures.requests_per_s, figures.latency_ms) == (0, 0, None)


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=1001)
    stats = Stats.of(values)
    assert stats is not None
    assert stats.p99 == np.percentile(values, 99)
    assert stats.p90 == np.percentile(values, 90)


def test_the_figures_agree_with_vllms() -> None:
    """The same answers, given to the function behind ``vllm bench serve``."""
    serve = pytest.importorskip("vllm.benchmarks.serve", reason="vllm is not installed")
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput

    generator = np.random.default_rng(3)
    records, outputs = [], []
    for index in range(60):
        chunks = np.cumsum(generator.exponential(20.0, generator.integers(1, 40))).tolist()
        record = chat_record(index * 0.1, chunks, input_tokens=int(generator.integers(5, 200)))
        records.append(record)
        outputs.append(
            RequestFuncOutput(
                success=True,
                latency=chunks[-1] / 1e3,
                output_tokens=len(chunks),
                ttft=chunks[0] / 1e3,
                itl=[value / 1e3 for value in record.itl_ms],
                prompt_len=record.input_tokens,
                start_time=index * 0.1,
            )
        )
    limits = {"ttft_ms": 25.0, "tpot_ms": 20.0, "latency_ms": 400.0}
    ours = compute_figures(records, limits=limits)
    theirs, _ = serve.calculate_metrics(
        [], outputs, ours.duration_s, None, [50.0, 90.0, 99.0], {"ttft": 25.0, "tpot": 20.0, "e2el": 400.0}
    )
    assert ours.requests_per_s == pytest.approx(theirs.request_throughput)
    assert ours.goodput_per_s == pytest.approx(theirs.request_goodput)
    assert ours.output_tokens_per_s == pytest.approx(theirs.output_throughput)
    assert ours.total_tokens_per_s == pytest.approx(theirs.total_token_throughput)
    for stats, name in (
        (ours.ttft_ms, "ttft"),
        (ours.tpot_ms, "tpot"),
        (ours.itl_ms, "itl"),
        (ours.latency_ms, "e2el"),
    ):
        assert stats is not None
        assert stats.mean == pytest.approx(getattr(theirs, f"mean_{name}_ms"))
        expected = dict(getattr(theirs, f"percentiles_{name}_ms"))
        assert (stats.p50, stats.p90, stats.p99) == pytest.approx((expected[50.0], expected[90.0], expected[99.0]))
