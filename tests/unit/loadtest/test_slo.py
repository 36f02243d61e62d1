"""SLOs: as they are written, what they say of figures, and which requests are good."""

from __future__ import annotations

import pytest
from load_records import act_record, act_records, chat_record

from loadtest.errors import UsageError
from loadtest.figures import compute_figures
from loadtest.slo import NAMES, parse_slos, request_limits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p99_ttft_ms", "write NAME=VALUE"),
        ("p99_ttft=5", "did you mean p99_ttft_ms"),
        ("nonsense=5", r"there are \{mean,p50,p90,p99,max\}_"),
        ("p99_ttft_ms=", "'' has to be a number above 0"),
        ("p99_ttft_ms=-1", "has to be a number above 0"),
        ("p99_ttft_ms=nan", "has to be a number above 0"),
        ("p99_ttft_ms=0", "has to be a number above 0"),
        ("max_error_rate=1.5", "a share from 0 to 1"),
        ("gpu.p99_ttft_ms=5", "write llm.p99_ttft_ms or policy.p99_ttft_ms"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_slos([text])


def test_the_same_one_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="given twice"):
        parse_slos(["p99_ttft_ms=5", "p99_ttft_ms=6"])


def test_every_name_is_read_and_checked() -> None:
    figures = compute_figures([chat_record(0, [1.0, 2.0])], limits={"ttft_ms": 5.0}, control=True)
    for slo in parse_slos([f"{name}=0.5" for name in NAMES]):
        result = slo.check(figures)
        assert result.value is not None
        assert result.holds == (result.value >= 0.5 if slo.name.startswith("min_") else result.value <= 0.5)


def test_what_could_not_be_measured_does_not_hold() -> None:
    figures = compute_figures([act_record(0, 5, error="timeout")])
    results = [slo.check(figures) for slo in parse_slos(["p99_latency_ms=1e9", "max_error_rate=1"])]
    assert [(result.value is None, result.holds) for result in results] == [(True, False), (False, True)]


def test_limits_are_inclusive() -> None:
    figures = compute_figures(act_records(10))
    assert figures.latency_ms is not None
    (slo,) = parse_slos([f"max_latency_ms={figures.latency_ms.max!r}"])
    assert slo.check(figures).holds


def test_goodput_counts_by_the_strictest_limit_of_a_single_request() -> None:
    slos = parse_slos(["p99_ttft_ms=500", "p50_ttft_ms=200", "p99_e2el_ms=900", "p99_itl_ms=5", "max_error_rate=0.1"])
    assert request_limits(slos) == {"ttft_ms": 200, "latency_ms": 900}


def test_a_mixed_run_counts_each_server_by_its_own() -> None:
    slos = parse_slos(["llm.p99_ttft_ms=500", "policy.p99_latency_ms=20"])
    assert request_limits(slos, "llm") == {"ttft_ms": 500}
    assert request_limits(slos, "policy") == {"latency_ms": 20}
    assert slos[0].check(compute_figures([])).name == "llm.p99_ttft_ms"
