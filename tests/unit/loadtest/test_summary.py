import json
import math
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

import loadtest.summary
from loadtest.errors import UsageError
from loadtest.figures import Stats, compute_figures
from loadtest.records import RequestRecord
from loadtest.summary import GeneratorFigures, Summary, read_summary, schema


def chat(at_s: float, ttft_ms: float, itl_ms: list[float], *, num_input: int = 5, **fields: object) -> RequestRecord:
    total = ttft_ms + sum(itl_ms)
    known: dict[str, object] = {
        "kind": "chat",
        "intended_s": at_s,
        "sent_s": at_s,
        "ttft_ms": ttft_ms,
        "itl_ms": itl_ms,
        "latency_ms": total,
        "service_ms": total,
        "input_tokens": num_input,
        "output_tokens": len(itl_ms) + 1,
        "tokens_from": "usage",
    }
    return RequestRecord(**(known | fields))  # pyright: ignore[reportArgumentType]


def summary_of(records: list[RequestRecord]) -> Summary:
    return Summary(
        kind="llm",
        target="http://127.0.0.1:8000",
        started_at="2026-01-01T00:00:00Z",
        command="loadtest",
        settings={"seed": 0},
        figures=compute_figures(records),
        generator=GeneratorFigures(num_processes=1, ceiling_per_s=None, share=None, num_not_sent=0, send_lag_ms=None),
    )


def test_rates_are_over_the_time_from_the_first_send_to_the_last_end() -> None:
    figures = compute_figures([chat(100.0, 500.0, [250.0, 250.0]), chat(103.0, 500.0, [500.0])])
    assert figures.duration_s == pytest.approx(4.0)
    assert figures.requests_per_s == pytest.approx(0.5)
    assert (figures.input_tokens, figures.output_tokens) == (10, 5)
    assert figures.total_tokens_per_s == pytest.approx(15 / 4)


def test_the_warmup_counts_nowhere() -> None:
    measured = [chat(10.0, 20.0, [1.0])]
    early = [chat(0.0, 9e3, [9e3], warmup=True), chat(0.0, 1.0, [], warmup=True, error="timeout")]
    assert compute_figures(early + measured) == compute_figures(measured)


def test_failures_count_as_requests_and_not_as_durations() -> None:
    slow = chat(1.0, 9e3, [9e3], error="cut_off")
    figures = compute_figures([chat(0.0, 20.0, [2.0]), slow, chat(1.0, 1.0, [], error="timeout"), slow])
    assert (figures.num_requests, figures.num_ok, figures.num_failed) == (4, 1, 3)
    assert figures.failures == {"cut_off": 2, "timeout": 1}
    assert figures.error_rate == pytest.approx(0.75)
    assert figures.ttft_ms == Stats(mean=20.0, p50=20.0, p90=20.0, p99=20.0, max=20.0, num=1)
    assert figures.output_tokens == 2


def test_itl_is_pooled_and_tpot_is_one_a_request() -> None:
    figures = compute_figures([chat(0.0, 10.0, [1.0, 1.0, 1.0]), chat(0.0, 10.0, [9.0]), chat(0.0, 10.0, [])])
    assert figures.itl_ms is not None
    assert figures.tpot_ms is not None
    assert (figures.itl_ms.mean, figures.itl_ms.num) == (3.0, 4)
    assert (figures.tpot_ms.mean, figures.tpot_ms.num) == (5.0, 2)


def test_without_a_success_there_are_no_durations() -> None:
    figures = compute_figures([chat(0.0, 1.0, [], error="connection")])
    assert (figures.ttft_ms, figures.itl_ms, figures.tpot_ms, figures.latency_ms) == (None, None, None, None)
    assert figures.requests_per_s == 0.0


def test_percentiles_are_numpy_s() -> None:
    values = np.random.default_rng(0).exponential(size=997)
    stats = Stats.of(values)
    assert stats is not None
    assert stats.p99 == pytest.approx(float(np.percentile(values, 99)))
    assert (stats.max, stats.num) == (float(values.max()), 997)


def test_deadlines_are_missed_by_late_and_by_failed_answers() -> None:
    records = [
        RequestRecord(kind="act", intended_s=0.0, sent_s=0.0, latency_ms=1.0, service_ms=1.0),
        RequestRecord(kind="act", intended_s=0.0, sent_s=0.0, latency_ms=9.0, service_ms=9.0, deadline_missed=True),
        RequestRecord(kind="act", intended_s=0.0, sent_s=0.0, error="timeout"),
        RequestRecord(kind="act", intended_s=0.0, sent_s=0.0, latency_ms=1.0, service_ms=1.0),
    ]
    assert compute_figures(records, control=True).missed_deadline_rate == 0.5
    assert compute_figures(records).missed_deadline_rate is None


@pytest.mark.parametrize("seed", range(5))
def test_figures_are_those_of_vllm_bench_serve(seed: int) -> None:
    serve = pytest.importorskip("vllm.benchmarks.serve", reason="compares with vllm, which is not installed")
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput

    draw = np.random.default_rng(seed)
    records: list[RequestRecord] = []
    for index in range(60):
        # Multiples of 1/8 ms, the limits among them, so that both sides also agree on a request that is on its limit.
        itl_ms = (draw.integers(0, 160, draw.integers(0, 12)) / 8).tolist()
        error = "http_503" if draw.random() < 0.2 else None
        ttft_ms = float(draw.integers(8, 800)) / 8
        num_input = int(draw.integers(1, 50))
        records.append(chat(100.0 + index / 8, ttft_ms, itl_ms, num_input=num_input, error=error))
    limits = {"ttft_ms": 60.3, "tpot_ms": 10.3, "latency_ms": 150.3}
    figures = compute_figures(records, limits=limits)
    outputs = [
        RequestFuncOutput(
            success=record.error is None,
            latency=(record.latency_ms or 0.0) / 1e3,
            ttft=(record.ttft_ms or 0.0) / 1e3,
            itl=[value / 1e3 for value in record.itl_ms],
            prompt_len=record.input_tokens or 0,
            output_tokens=record.output_tokens or 0,
            start_time=record.sent_s,
        )
        for record in records
    ]
    goodput = {"ttft": limits["ttft_ms"], "tpot": limits["tpot_ms"], "e2el": limits["latency_ms"]}
    theirs, _ = serve.calculate_metrics([], outputs, figures.duration_s, None, [50, 90, 99], goodput)

    assert (figures.num_ok, figures.num_failed) == (theirs.completed, theirs.failed)
    assert (figures.input_tokens, figures.output_tokens) == (theirs.total_input, theirs.total_output)
    assert figures.requests_per_s == pytest.approx(theirs.request_throughput)
    assert figures.goodput_per_s == pytest.approx(theirs.request_goodput)
    assert 0 < theirs.request_goodput < theirs.request_throughput
    assert figures.output_tokens_per_s == pytest.approx(theirs.output_throughput)
    assert figures.total_tokens_per_s == pytest.approx(theirs.total_token_throughput)
    for name, theirs_name in (("ttft", "ttft"), ("itl", "itl"), ("tpot", "tpot"), ("latency", "e2el")):
        stats = getattr(figures, f"{name}_ms")
        assert stats.mean == pytest.approx(getattr(theirs, f"mean_{theirs_name}_ms"))
        ours = [stats.p50, stats.p90, stats.p99]
        assert ours == pytest.approx([value for _, value in getattr(theirs, f"percentiles_{theirs_name}_ms")])


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    summary = summary_of([chat(0.0, 20.0, [1.0])])
    (tmp_path / "summary.json").write_text(summary.model_dump_json(indent=2))
    assert read_summary(tmp_path) == summary


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot be read"), ("{", "is not JSON"), ('{"kind": "llm"}', "not a summary")]
)
def test_what_is_no_summary_is_said_so(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    with pytest.raises(UsageError, match=said):
        read_summary(tmp_path)


def test_a_summary_of_another_version_is_refused(tmp_path: Path) -> None:
    content = json.loads(summary_of([]).model_dump_json()) | {"schema_version": 2}
    (tmp_path / "summary.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="schema_version"):
        read_summary(tmp_path)
    with pytest.raises(ValidationError):
        Summary.model_validate(content)


@pytest.mark.parametrize(("share", "limiting"), [(None, False), (0.79, False), (0.8, True), (1.1, True)])
def test_a_generator_near_its_ceiling_is_limiting(share: float | None, limiting: bool) -> None:
    generator = GeneratorFigures(num_processes=1, ceiling_per_s=10.0, share=share, num_not_sent=0, send_lag_ms=None)
    assert generator.is_limiting is limiting


def test_the_schema_beside_the_module_is_the_model_s() -> None:
    path = Path(loadtest.summary.__file__).with_name("summary.schema.json")
    assert path.read_text() == schema(), "python -m loadtest.summary > loadtest/summary.schema.json"


def test_no_request_at_all_makes_figures_that_are_numbers() -> None:
    figures = compute_figures([])
    assert math.isfinite(figures.duration_s)
    assert figures.num_requests == 0
