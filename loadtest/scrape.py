"""The server's own metrics during a run: what it says of its queue, its batches and its cache."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from loadtest.http_connection import HttpConnection, RequestFailedError

SERVER_METRICS_FILE = "server_metrics.jsonl"
_TIMEOUT_S = 2.0
_SHARES = ("vllm:kv_cache_usage_perc",)

GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "policy_queue_rows",
    "policy_open_websockets",
)
"""Shown as they are."""
COUNTERS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "policy_requests_total",
    "policy_requests_shed_total",
)
"""Shown as their rise a second."""
MEANS = ("policy_batch_rows", "policy_request_duration_seconds")
"""Histograms, shown as the mean of what came since the last look."""


class Scraper:
    """Looks at a server's ``/metrics`` and writes down what changes.

    Args:
        url: The server.
        path: JSON lines to append to: ``{"time_s": ..., "metrics": {name: value}}``.
        headers: Sent along, such as an API key.
    """

    def __init__(self, url: str, path: Path, *, headers: tuple[tuple[str, str], ...] = ()) -> None:
        self._connection = HttpConnection(url, timeout_s=_TIMEOUT_S, headers=headers)
        self._path = path
        self._last: dict[str, float] = {}
        self._last_time = 0.0
        self._seen: dict[str, list[float]] = defaultdict(list)
        self.is_there = True
        """False once the server has answered that it has no such page."""

    def sample(self) -> None:
        """Looks once. A server without metrics, or that is down, is no error."""
        if not self.is_there:
            return
        pieces: list[bytes] = []
        try:
            status = self._connection.request("GET", "/metrics", b"", lambda piece, _: pieces.append(piece))
        except RequestFailedError:
            return
        if status != 200:
            self.is_there = status not in (401, 403, 404)  # others may pass
            return
        now = time.time()
        try:
            totals = _totals(b"".join(pieces).decode(errors="replace"))
        except ValueError:  # some other page
            self.is_there = False
            return
        metrics = self._derive(totals, now)
        self._last, self._last_time = totals, now
        if metrics:
            for name, value in metrics.items():
                self._seen[name].append(value)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"time_s": round(now, 3), "metrics": metrics}) + "\n")

    def summary(self) -> dict[str, Any]:
        """Mean and largest value of each metric."""
        return {
            name: {"mean": float(np.mean(values)), "max": float(np.max(values))} for name, values in self._seen.items()
        }

    def _derive(self, totals: dict[str, float], now: float) -> dict[str, float]:
        metrics = {name: totals[name] for name in GAUGES if name in totals}
        passed_s = now - self._last_time
        if not self._last or passed_s <= 0:
            return metrics
        for name in COUNTERS:
            if name in totals:
                rise = totals[name] - self._last.get(name, 0.0)
                metrics[name.removesuffix("_total") + "_per_s"] = max(rise, 0.0) / passed_s
        for name in MEANS:
            number = totals.get(f"{name}_count", 0.0) - self._last.get(f"{name}_count", 0.0)
            if number > 0:
                metrics[f"{name}_mean"] = (totals[f"{name}_sum"] - self._last.get(f"{name}_sum", 0.0)) / number
        return metrics


def _totals(text: str) -> dict[str, float]:
    """Values by sample name, added up over labels, shares as their largest; of durations only the whole request's."""
    found: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        if family.name.startswith(("vllm", "policy")):
            for sample in family.samples:
                if sample.labels.get("stage", "total") != "total":
                    continue
                if sample.name in _SHARES:
                    found[sample.name] = max(found[sample.name], sample.value)
                else:
                    found[sample.name] += sample.value
    return dict(found)
