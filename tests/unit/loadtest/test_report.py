"""The page: everything in one file, nothing of a server's words taken for its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from load_records import act_record, act_records, chat_record, summary_of

from loadtest.figures import compute_figures
from loadtest.records import RequestRecord
from loadtest.report import write_report
from loadtest.slo import parse_slos
from loadtest.summary import GeneratorFigures, Stage

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>"


def page_of(folder: Path, records: list[RequestRecord], **fields: object) -> str:
    return write_report(folder, summary_of(records, **fields), records).read_text()


def without_plotly(page: str) -> str:
    """The page's own text, without the library's script."""
    return re.sub(r"<script>/\*\*.*?</script>", "", page, count=1, flags=re.DOTALL)


def test_it_needs_no_other_host(tmp_path: Path) -> None:
    own = without_plotly(page_of(tmp_path, act_records(300)))
    assert len(own) < 1_000_000
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=[\"']?(https?:)?//", own)


def test_what_a_server_says_is_text(tmp_path: Path) -> None:
    records = [*act_records(20), act_record(0.1, 5, error="http_500", message=HOSTILE)]
    own = without_plotly(page_of(tmp_path, records, target=HOSTILE, command=HOSTILE, notes=[HOSTILE]))
    assert HOSTILE not in own
    assert "&lt;script&gt;alert" in own


def test_the_verdict_and_the_warnings_are_there(tmp_path: Path) -> None:
    records = act_records(200)
    slos = [slo.check(compute_figures(records)) for slo in parse_slos(["p99_latency_ms=1", "max_error_rate=0"])]
    page = page_of(tmp_path, records, slos=slos, stopped_early="the server was killed", notes=["near the ceiling"])
    for text in ("Not every SLO holds", "does not hold", "the server was killed", "near the ceiling", "p99_latency_ms"):
        assert text in page
    slos = [slo.check(compute_figures(records)) for slo in parse_slos(["p99_latency_ms=1000"])]
    assert "Every SLO holds" in page_of(tmp_path, records, slos=slos)


def test_language_models_have_their_figures(tmp_path: Path) -> None:
    records = [chat_record(index * 0.1, [50.0, 60.0, 75.0]) for index in range(50)]
    page = page_of(tmp_path, records)
    for text in ("output tokens/s", "TTFT", "ITL", "TPOT", "inter-token latency"):
        assert text in page


def test_a_sweep_shows_its_loads(tmp_path: Path) -> None:
    stages = [
        Stage(load=load, holds=load <= 20, figures=compute_figures(act_records(100, mean_ms=load)))
        for load in (10, 20, 40)
    ]
    page = page_of(tmp_path, act_records(100), stages=stages, best_load=20.0)
    assert "Throughput against latency" in page
    assert "The highest load that holds every SLO" in page
    assert "No load that was tried holds" in page_of(tmp_path, act_records(100), stages=stages[2:], best_load=None)


def test_the_servers_metrics_are_drawn_unless_they_are_nothing(tmp_path: Path) -> None:
    lines = [f'{{"time_s": {1.8e9 + index}, "metrics": {{"queue": {index}, "idle": 0}}}}' for index in range(5)]
    (tmp_path / "server_metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = without_plotly(page_of(tmp_path, act_records(20)))
    assert "<h2>queue</h2>" in page
    assert "<h2>idle</h2>" not in page


@pytest.mark.parametrize(
    "records",
    [
        [],
        [act_record(0, 5)],
        [act_record(0, 5, error="timeout")],
        [act_record(0, 5, warmup=True)],
        act_records(10, rate_per_s=1e9),
    ],
    ids=["none", "one", "failed", "warm-up", "at once"],
)
def test_few_records_make_a_page_too(tmp_path: Path, records: list[RequestRecord]) -> None:
    assert "<title>" in page_of(tmp_path, records)


def test_the_generator_says_how_near_it_came(tmp_path: Path) -> None:
    generator = GeneratorFigures(num_processes=2, ceiling_per_s=1000.0, share=0.85, num_not_sent=3, send_lag_ms=None)
    assert generator.is_limiting
    page = page_of(tmp_path, act_records(20), generator=generator)
    assert "85 %" in page


def test_a_large_run_stays_a_small_page(tmp_path: Path) -> None:
    page = without_plotly(page_of(tmp_path, act_records(200_000, rate_per_s=10_000.0)))
    assert len(page) < 1_000_000
