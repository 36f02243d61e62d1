"""Counters that several workers write and one scrape adds up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from policy_server.batcher import BatchRecord
from policy_server.metrics import TIME_BUCKETS_S, Metrics


def record(rows: int, *, late: int = 0, refused: int = 0, queued_s: float = 0.001) -> BatchRecord:
    return BatchRecord(
        rows=rows,
        queued_s=[queued_s] * rows,
        inference_s=0.002 if rows else 0.0,
        queue_rows=3,
        num_late=late,
        num_refused=refused,
    )


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found[(sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items())))] = sample.value
    return found


def test_counts_are_those_of_what_happened(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    meters = metrics.meters("tiny", 2)
    for rows in (1, 3, 64):
        meters.observe_batch(record(rows))
    meters.observe_batch(record(0, late=2, refused=1))
    for total_s in (0.0005, 0.003, 0.003, 20.0):
        metrics.observe_request("tiny", 2, 200, total_s, "http")
    metrics.observe_request("tiny", 2, 503, 0.1, "grpc")
    metrics.fold()
    found = samples(metrics)
    labels = ("policy=tiny", "version=2")
    total = ("policy_request_duration_seconds_count", "policy=tiny", "stage=total", "version=2")
    assert found[total] == 4
    assert found["policy_request_duration_seconds_count", "policy=tiny", "stage=queue", "version=2"] == 68
    assert found["policy_request_duration_seconds_count", "policy=tiny", "stage=inference", "version=2"] == 3
    assert abs(found["policy_request_duration_seconds_sum", "policy=tiny", "stage=total", "version=2"] - 20.0065) < 1e-9
    assert found["policy_batch_rows_sum", *labels] == 68
    assert found["policy_batch_rows_bucket", "le=1", *labels] == 1
    assert found["policy_batch_rows_bucket", "le=4", *labels] == 2
    assert found["policy_batch_rows_bucket", "le=+Inf", *labels] == 3
    assert found["policy_requests_total", "policy=tiny", "protocol=http", "status=200", "version=2"] == 4
    assert found["policy_requests_total", "policy=tiny", "protocol=grpc", "status=503", "version=2"] == 1
    assert found["policy_requests_shed_total", "policy=tiny", "reason=deadline", "version=2"] == 2
    assert found["policy_requests_shed_total", "policy=tiny", "reason=queue_full", "version=2"] == 1
    assert found["policy_queue_rows", *labels] == 3


def test_workers_are_added_and_a_restarted_one_goes_on(tmp_path: Path) -> None:
    for slot, rows in ((0, 2), (1, 3), (1, 5)):  # slot 1 was killed and came again
        metrics = Metrics(tmp_path, slot)
        metrics.meters("tiny", 1).observe_batch(record(rows))
        metrics.observe_request("tiny", 1, 200, 0.01, "websocket")
        metrics.fold()
    found = samples(Metrics(tmp_path, 7))
    assert found["policy_batch_rows_sum", "policy=tiny", "version=1"] == 10
    assert found["policy_requests_total", "policy=tiny", "protocol=websocket", "status=200", "version=1"] == 3


def test_names_that_nobody_loaded_are_counted_together(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    for index in range(1000):
        metrics.observe_request(f"guess-{index}", 0, 404, 0.0, "http")
    metrics.fold()
    assert len(list(tmp_path.iterdir())) == 1
    assert samples(metrics)["policy_requests_total", "policy=", "protocol=http", "status=404", "version=0"] == 1000


def test_files_that_are_not_counters_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "0.tiny@1.counters").write_bytes(b"short")
    assert "hello" not in Metrics(tmp_path, 1).render().decode()


def test_the_page_gets_the_same_counts() -> None:
    metrics = Metrics()
    metrics.meters("tiny", 1).observe_batch(record(4, queued_s=0.0015))
    metrics.observe_request("tiny", 1, 200, 0.004, "http")
    metrics.fold()
    snapshot = metrics.snapshot()
    (policy,) = snapshot["policies"]
    counts = np.asarray(policy["latency"]["total"]["counts"])
    place = int(np.flatnonzero(counts)[0])
    assert counts.sum() == 1
    assert TIME_BUCKETS_S[place - 1] < 0.004 <= TIME_BUCKETS_S[place]
    assert sum(policy["batch_rows"]["counts"]) == 1
    assert policy["requests"] == {"http 200": 1}
