import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from loadtest.scrape import Scraper


class MetricsServer(ThreadingHTTPServer):
    """Answers /metrics with whatever ``answer`` is at the time."""

    answer = (200, "")
    num_asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, MetricsServer)
        server.num_asked += 1
        status, text = server.answer
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: object = "-", size: object = "-") -> None:
        del code, size  # nothing on the console


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with MetricsServer(("127.0.0.1", 0), Handler) as running:
        running.daemon_threads = True
        thread = Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def page(*, running: int, generated: int, rows: float, batches: int) -> str:
    return f"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {running}
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{engine="0"}} {generated}
# TYPE policy_batch_rows histogram
policy_batch_rows_bucket{{policy="reach",le="+Inf"}} {batches}
policy_batch_rows_count{{policy="reach"}} {batches}
policy_batch_rows_sum{{policy="reach"}} {rows}
# TYPE process_open_fds gauge
process_open_fds 12
"""


def lines_of(path: Path) -> list[dict[str, float]]:
    return [json.loads(line)["metrics"] for line in path.read_text().splitlines()]


def test_gauges_rates_and_means_are_written_down(server: MetricsServer, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    scraper = Scraper(server.url, path)
    server.answer = (200, page(running=2, generated=1000, rows=10, batches=10))
    scraper.sample()
    server.answer = (200, page(running=4, generated=3000, rows=40, batches=20))
    scraper.sample()
    first, second = lines_of(path)
    assert first == {"vllm:num_requests_running": 2}
    assert set(second) == {"vllm:num_requests_running", "vllm:generation_tokens_per_s", "policy_batch_rows_mean"}
    assert second["policy_batch_rows_mean"] == 3.0  # 30 more rows in 10 more batches
    assert second["vllm:generation_tokens_per_s"] > 0
    assert scraper.summary()["vllm:num_requests_running"] == {"mean": 3.0, "max": 4.0}


def test_a_server_that_began_anew_has_no_negative_rates(server: MetricsServer, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    scraper = Scraper(server.url, path)
    server.answer = (200, page(running=1, generated=1000, rows=10, batches=10))
    scraper.sample()
    server.answer = (200, page(running=1, generated=5, rows=1, batches=1))
    scraper.sample()
    assert lines_of(path)[1] == {"vllm:num_requests_running": 1, "vllm:generation_tokens_per_s": 0.0}


def test_a_server_without_metrics_is_asked_once(server: MetricsServer, tmp_path: Path) -> None:
    scraper = Scraper(server.url, tmp_path / "metrics.jsonl")
    server.answer = (404, "no such page")
    scraper.sample()
    scraper.sample()
    assert server.num_asked == 1
    assert not scraper.is_there
    assert scraper.summary() == {}


def test_a_page_that_is_something_else_is_no_error(server: MetricsServer, tmp_path: Path) -> None:
    scraper = Scraper(server.url, tmp_path / "metrics.jsonl")
    server.answer = (200, "<html>{ welcome </html>")
    scraper.sample()
    assert scraper.summary() == {}
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_dead_server_is_no_error(server: MetricsServer, tmp_path: Path) -> None:
    url = server.url
    server.shutdown()
    server.server_close()
    scraper = Scraper(url, tmp_path / "metrics.jsonl")
    scraper.sample()
    assert scraper.is_there
    assert scraper.summary() == {}
