"""Writes ``report.html``: everything in one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from loadtest.figures import Figures, Stats
from loadtest.record_file import write_whole
from loadtest.records import RequestRecord
from loadtest.report import charts
from loadtest.scrape import SERVER_METRICS_FILE
from loadtest.summary import Summary

REPORT_FILE = "report.html"
_SHOWN_ELSEWHERE = ("slos", "command", "output")


DEFINITIONS = {
    "latency": "From the intended send time to the last chunk of the answer, or to the whole answer. In open loop, "
    "requests are meant to be sent at their times even if the server stalls; in closed loop the intended time is the "
    "true one.",
    "service time": "The same from the time at which the request was truly sent.",
    "TTFT": "Time to first token: from the intended send time to the first chunk with choices.",
    "ITL": "Inter-token latency: from each chunk to the one before, over all answers.",
    "TPOT": "Time per output token: (latency - TTFT) / (output tokens - 1), one value an answer.",
    "requests/s, tokens/s": "Of successful requests, over the time from the first measured request to the end of the "
    "last. The warm-up is left out.",
    "goodput": "Successful requests a second that hold every SLO on TTFT, TPOT and latency, each for itself.",
    "missed deadlines": "Requests that were answered later than the control period, or not at all.",
    "ceiling": "Requests a second that this generator reaches against a server that does nothing.",
}
"""What the figures mean; those of language models are the ones of ``vllm bench serve``."""


def environment() -> Environment:
    """The templates; every text is escaped."""
    return Environment(loader=PackageLoader("loadtest.report"), autoescape=select_autoescape(default=True))


def plotly_script() -> Markup:
    """Plotly's own script, to be put into a page."""
    return Markup(get_plotlyjs())  # noqa: S704  # the library's file, nobody's input


def chart_html(figure: Any) -> Markup:
    """A chart for a page."""
    return Markup(charts.as_html(figure))  # noqa: S704  # plotly escapes what it draws


def write_report(folder: Path, summary: Summary, records: Sequence[RequestRecord]) -> Path:
    """Writes the page.

    Args:
        folder: The output folder; the server's metrics are read from it.
        summary: What was found.
        records: Every request.

    Returns:
        The page's path.
    """
    began_s = min((record.intended_s for record in records), default=0.0)
    page = (
        environment()
        .get_template("report.html.jinja")
        .render(
            summary=summary,
            plotly=plotly_script(),
            groups=_groups(summary),
            sections=_sections(summary, records, began_s),
            sweep=chart_html(charts.sweep(summary.stages, summary.best_load)) if summary.stages else None,
            server=[
                (name, chart_html(figure))
                for name, figure in charts.server_metrics(folder / SERVER_METRICS_FILE, began_s)
            ],
            failures=_failures(records),
            settings=_settings(
                {name: value for name, value in summary.settings.items() if name not in _SHOWN_ELSEWHERE}
            ),
            definitions=DEFINITIONS,
        )
    )
    path = folder / REPORT_FILE
    write_whole(path, page)
    return path


def _groups(summary: Summary) -> list[tuple[str, list[tuple[str, str]], list[tuple[str, Stats]]]]:
    """Key figures and distributions, a group a server."""
    parts = summary.parts or {"": summary.figures}
    return [(name, _key_figures(part, name or summary.kind), _distributions(part)) for name, part in parts.items()]


def _key_figures(figures: Figures, kind: str) -> list[tuple[str, str]]:
    shown = [
        ("requests/s", f"{figures.requests_per_s:,.4g}"),
        ("requests", f"{figures.num_requests:,}"),
        ("failed", f"{figures.num_failed:,}"),
    ]
    if figures.rows_per_s > figures.requests_per_s * 1.01:
        shown.insert(1, ("observations/s", f"{figures.rows_per_s:,.4g}"))
    if kind == "llm":
        shown[1:1] = [
            ("output tokens/s", f"{figures.output_tokens_per_s:,.4g}"),
            ("input tokens/s", f"{figures.input_tokens_per_s:,.4g}"),
        ]
    if figures.goodput_per_s is not None:
        shown.append(("goodput, requests/s", f"{figures.goodput_per_s:,.4g}"))
    if figures.missed_deadline_rate is not None:
        shown.append(("missed deadlines", f"{100 * figures.missed_deadline_rate:.3g} %"))
    return [*shown, ("measured", f"{figures.duration_s:.1f} s")]


def _distributions(figures: Figures) -> list[tuple[str, Stats]]:
    named = (
        ("TTFT", figures.ttft_ms),
        ("ITL", figures.itl_ms),
        ("TPOT", figures.tpot_ms),
        ("latency", figures.latency_ms),
        ("service time", figures.service_ms),
    )
    return [(name, stats) for name, stats in named if stats is not None]


def _sections(summary: Summary, records: Sequence[RequestRecord], began_s: float) -> list[tuple[str, Markup]]:
    if summary.kind == "mixed":
        parts = [
            ("language model", [record for record in records if record.kind != "act"]),
            ("policy", [record for record in records if record.kind == "act"]),
        ]
    else:
        parts = [("", list(records))]
    sections: list[tuple[str, Markup]] = []
    for name, of in parts:
        of_what = f", {name}" if name else ""
        sections += [
            (f"Latency over time{of_what}", chart_html(charts.latency_over_time(of, began_s))),
            (f"Throughput over time{of_what}", chart_html(charts.rate_over_time(of, began_s))),
            (f"Distribution{of_what}", chart_html(charts.distribution(of))),
        ]
    return sections


def _failures(records: Sequence[RequestRecord]) -> list[tuple[str, int, str]]:
    """Kinds of failure: how often, and what the first one said."""
    found: dict[str, tuple[int, str]] = {}
    for record in records:
        if record.error is not None and not record.warmup:
            number, example = found.get(record.error, (0, record.message))
            found[record.error] = (number + 1, example)
    return sorted(((kind, number, example) for kind, (number, example) in found.items()), key=lambda row: -row[1])


def _settings(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            rows += _settings(value, f"{prefix}{name}.")
        elif value not in (None, [], ""):
            rows.append((f"{prefix}{name}", str(value)))
    return rows
