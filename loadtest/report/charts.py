"""The report's charts, as plotly's figures. Colours work on light and dark paper alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from loadtest.records import RequestRecord
from loadtest.summary import Stage

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#3b82d6", "#e07b39", "#2f9e6e", "#d64545", "#8a929a"
_QUANTILES = np.concatenate((np.linspace(0, 0.99, 100), np.linspace(0.9901, 1, 100)))
_MOST_INTERVALS = 60
_REQUESTS_OF_AN_INTERVAL = 12
_SHORTEST_MS = 0.01  # where the logarithmic axis begins; chunks that were read together are 0 apart
_SHORTEST_INTERVAL_S = 0.25

Array = NDArray[np.float64]


def latency_over_time(records: Sequence[RequestRecord], began_s: float) -> go.Figure:
    """p50 and p99 of the latency, and of the TTFT if there is one, by when requests were meant to be sent."""
    good = [record for record in records if record.latency_ms is not None and record.error is None]
    figure = _figure("seconds since the start", "ms", "tozero")
    kinds = [("latency", _BLUE, [record.latency_ms or 0.0 for record in good], good)]
    streamed = [record for record in good if record.ttft_ms is not None]
    if streamed:
        kinds.append(("TTFT", _ORANGE, [record.ttft_ms or 0.0 for record in streamed], streamed))
    for name, color, values, of in kinds:
        times = np.array([record.intended_s for record in of]) - began_s
        middles, groups = _by_interval(times, np.array(values))
        for quantile, dash in ((50, "solid"), (99, "dot")):
            points = [float(np.percentile(group, quantile)) if len(group) else None for group in groups]
            figure.add_scatter(
                x=middles,
                y=points,
                name=f"{name} p{quantile}",
                mode="lines",
                connectgaps=True,
                line={"color": color, "dash": dash, "width": 2},
            )
    _shade_warmup(figure, records, began_s)
    return figure


def rate_over_time(records: Sequence[RequestRecord], began_s: float) -> go.Figure:
    """Requests a second that ended well, and that failed, by when they ended."""
    figure = _figure("seconds since the start", "requests/s", "tozero")
    ends = np.array([record.ended_s for record in records]) - began_s
    failed = np.array([record.error is not None for record in records], bool)
    if not len(ends):
        return figure
    edges = _edges(ends)
    for name, color, chosen in (("answered", _GREEN, ~failed), ("failed", _RED, failed)):
        if chosen.any():
            counts, _ = np.histogram(ends[chosen], edges)
            figure.add_bar(x=_middles(edges), y=counts / np.diff(edges), name=name, marker_color=color)
    figure.update_layout(barmode="stack", bargap=0.05)
    _shade_warmup(figure, records, began_s)
    return figure


def distribution(records: Sequence[RequestRecord]) -> go.Figure:
    """How many of all were at most so slow: cumulative distributions."""
    good = [record for record in records if record.error is None and not record.warmup]
    figure = _figure("ms", "share of requests", "tozero")
    for name, color, values in (
        ("latency", _BLUE, [record.latency_ms for record in good]),
        ("TTFT", _ORANGE, [record.ttft_ms for record in good]),
        ("TPOT", _GREY, [record.tpot_ms for record in good]),
        ("inter-token latency", _GREEN, [value for record in good for value in record.itl_ms]),
    ):
        known = np.array([value for value in values if value is not None])
        if len(known):
            at = np.maximum(np.quantile(known, _QUANTILES), _SHORTEST_MS)
            figure.add_scatter(x=at, y=_QUANTILES, name=name, mode="lines", line={"color": color, "width": 2})
    figure.update_xaxes(type="log")
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02])
    return figure


def sweep(stages: Sequence[Stage], best: float | None) -> go.Figure:
    """Latency against throughput, one point a load."""
    figure = _figure("requests/s", "ms", "tozero")
    ordered = sorted((stage for stage in stages if stage.figures.latency_ms is not None), key=lambda stage: stage.load)
    for name, color in (("p50", _BLUE), ("p99", _ORANGE)):
        figure.add_scatter(
            x=[stage.figures.requests_per_s for stage in ordered],
            y=[getattr(stage.figures.latency_ms, name) for stage in ordered],
            text=[f"load {stage.load:g}, {'holds' if stage.holds else 'does not hold'}" for stage in ordered],
            name=f"latency {name}",
            mode="lines+markers",
            line={"color": color, "width": 2},
            marker={"size": 9, "symbol": ["circle" if stage.holds else "x-thin-open" for stage in ordered]},
        )
    for stage in ordered:
        if stage.load == best and stage.figures.latency_ms is not None:
            figure.add_scatter(
                x=[stage.figures.requests_per_s],
                y=[stage.figures.latency_ms.p99],
                name="best that holds",
                mode="markers",
                marker={"size": 18, "color": "rgba(0,0,0,0)", "line": {"color": _GREEN, "width": 3}},
            )
    return figure


def server_metrics(path: Path, began_s: float) -> list[tuple[str, go.Figure]]:
    """One chart for each metric that the server showed and that was not always zero."""
    if not path.exists():
        return []
    series: dict[str, tuple[list[float], list[float]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        content: dict[str, Any] = json.loads(line)
        for name, value in content["metrics"].items():
            times, values = series.setdefault(name, ([], []))
            times.append(content["time_s"] - began_s)
            values.append(value)
    charts: list[tuple[str, go.Figure]] = []
    for name, (times, values) in sorted(series.items()):
        if any(values):
            figure = _figure("seconds since the start", "", "tozero")
            figure.add_scatter(x=times, y=values, name=name, mode="lines", line={"color": _BLUE, "width": 2})
            figure.update_layout(showlegend=False, height=220)
            charts.append((name, figure))
    return charts


def distributions_beside(sides: Sequence[tuple[str, Array]]) -> go.Figure:
    """The cumulative distributions of the same figure in several runs."""
    figure = _figure("ms", "share of requests", "tozero")
    for (name, values), color in zip(sides, (_BLUE, _ORANGE), strict=False):
        at = np.maximum(np.quantile(values, _QUANTILES), _SHORTEST_MS)
        figure.add_scatter(x=at, y=_QUANTILES, name=name, mode="lines", line={"color": color, "width": 2})
    figure.update_xaxes(type="log")
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02])
    return figure


def as_html(figure: go.Figure) -> str:
    """A figure as a part of a page that has plotly's script."""
    return str(
        figure.to_html(
            full_html=False,
            include_plotlyjs=False,
            config={"displaylogo": False, "responsive": True, "displayModeBar": False},
        )
    )


def _figure(x: str, y: str, rangemode: str) -> go.Figure:
    figure = go.Figure()
    axis = {"gridcolor": "rgba(128,128,128,0.22)", "zerolinecolor": "rgba(128,128,128,0.35)", "automargin": True}
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#7c858d", "family": "system-ui, sans-serif", "size": 12},
        margin={"l": 48, "r": 8, "t": 8, "b": 40},
        height=300,
        hovermode="x unified",
        hoverlabel={"bgcolor": "#23282d", "font": {"color": "#e8eaec"}},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        xaxis={"title": {"text": x}, **axis},
        yaxis={"title": {"text": y}, "rangemode": rangemode, **axis},
    )
    return figure


def _shade_warmup(figure: go.Figure, records: Sequence[RequestRecord], began_s: float) -> None:
    if any(record.warmup for record in records):
        end = max(record.intended_s for record in records if record.warmup) - began_s
        figure.add_vrect(x0=0, x1=end, fillcolor="rgba(128,128,128,0.15)", line_width=0, annotation_text="warm-up")


def _edges(times: Array) -> Array:
    last = max(float(times.max()), _SHORTEST_INTERVAL_S)
    number = min(max(len(times) // _REQUESTS_OF_AN_INTERVAL, 4), _MOST_INTERVALS)
    interval = max(last / number, _SHORTEST_INTERVAL_S)
    return np.arange(0, last + interval, interval, dtype=np.float64)


def _middles(edges: Array) -> Array:
    return (edges[:-1] + edges[1:]) / 2


def _by_interval(times: Array, values: Array) -> tuple[Array, list[Array]]:
    if not len(times):
        return np.array([]), []
    edges = _edges(times)
    order = np.argsort(times)
    places = np.searchsorted(times[order], edges)
    return _middles(edges), np.split(values[order], places[1:-1])
