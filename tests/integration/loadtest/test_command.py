"""``gated-serving loadtest`` as it is typed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_llm_server import FakeLlmServer, fake_llm_server
from served_policies import RunningPolicyServer, running_policy_server, write_policy

from loadtest.record_file import read_records
from loadtest.summary import Summary, read_summary

ROOT = Path(__file__).parents[3]
QUICK = ("--duration", "1", "--warmup", "0.3", "--no-ceiling")


def start(*words: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gated_serving", "loadtest", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run(*words: str) -> tuple[int, str, str]:
    process = start(*words)
    out, told = process.communicate(timeout=150)
    return process.returncode, out, told


@pytest.fixture
def llm() -> Iterator[FakeLlmServer]:
    with fake_llm_server() as server:
        server.chunk_s = 0.005
        yield server


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPolicyServer]:
    folder = tmp_path_factory.mktemp("policies")
    write_policy(folder / "repository")
    with running_policy_server(folder / "repository", folder / "log") as running:
        yield running


def load(url: str, output: Path, kind: str, *words: str) -> tuple[int, Summary]:
    code, out, told = run(kind, url, "--output", str(output), *words)
    assert (output / "summary.json").exists(), out + told
    assert "Traceback" not in told
    return code, read_summary(output)


def test_a_language_model_is_loaded(llm: FakeLlmServer, tmp_path: Path) -> None:
    words = (*QUICK, "--users", "3", "--output-tokens", "8", "--slo", "p99_ttft_ms=5000", "--slo", "max_error_rate=0")
    code, summary = load(llm.url, tmp_path, "llm", *words)
    figures = summary.figures
    assert code == 0
    assert (figures.num_failed, summary.stopped_early) == (0, None)
    assert figures.output_tokens == 8 * figures.num_ok
    assert figures.ttft_ms is not None
    assert figures.itl_ms is not None
    assert figures.ttft_ms.p50 >= 5
    assert figures.itl_ms.num == 7 * figures.num_ok
    assert [slo.holds for slo in summary.slos] == [True, True]
    records = read_records(tmp_path)
    assert sum(not record.warmup for record in records) == figures.num_requests
    assert {record.user for record in records} == {0, 1, 2}
    assert "Every SLO holds" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("protocol", ["json", "binary", "websocket"])
def test_a_policy_is_loaded_at_a_control_rate(policies: RunningPolicyServer, tmp_path: Path, protocol: str) -> None:
    words = (
        *QUICK,
        "--users",
        "4",
        "--control-hz",
        "20",
        "--protocol",
        protocol,
        "--slo",
        "max_missed_deadline_rate=1",
    )
    code, summary = load(policies.address, tmp_path, "policy", *words)
    assert code == 0
    assert 60 <= summary.figures.num_ok <= 84  # 4 users, 20 a second
    assert summary.figures.missed_deadline_rate is not None
    assert "policy_batch_rows_mean" in summary.server


def test_a_limit_that_does_not_hold_is_exit_code_3(policies: RunningPolicyServer, tmp_path: Path) -> None:
    code, summary = load(policies.address, tmp_path, "policy", *QUICK, "--slo", "p50_latency_ms=0.0001")
    assert (code, summary.slos[0].holds) == (3, False)
    assert "Not every SLO holds" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_stall_of_two_seconds_shows_in_the_99th_percentile(llm: FakeLlmServer, tmp_path: Path) -> None:
    """A closed loop would ask nothing meanwhile and show next to nothing of it."""
    llm.num_chunks = 2
    words = ("--rate", "50", "--arrival", "constant", "--duration", "20", "--warmup", "0", "--no-ceiling")
    process = start("llm", llm.url, "--output", str(tmp_path), *words)
    while not llm.requests or len(llm.requests) < 100:
        time.sleep(0.05)
    llm.stall(True)
    time.sleep(2.0)
    llm.stall(False)
    process.communicate(timeout=60)
    figures = read_summary(tmp_path).figures
    assert figures.num_ok == 1000
    assert figures.latency_ms is not None
    assert figures.latency_ms.max >= 1900
    assert figures.latency_ms.p99 >= 1700  # a tenth of all requests waited up to 2 s
    assert figures.latency_ms.p50 < 500


def test_a_server_that_is_killed_ends_in_a_report_of_failures(tmp_path: Path) -> None:
    write_policy(tmp_path / "repository")
    with running_policy_server(tmp_path / "repository", tmp_path / "log") as server:
        output = tmp_path / "out"
        process = start("policy", server.address, "--output", str(output), "--duration", "600", "--no-ceiling")
        while not (output / "records.jsonl").exists() or (output / "records.jsonl").stat().st_size < 10_000:
            time.sleep(0.05)
            assert process.poll() is None, process.communicate()
        server.process.kill()
        out, told = process.communicate(timeout=90)
    assert process.returncode == 1, out + told
    summary = read_summary(output)
    assert summary.stopped_early is not None
    assert "none succeeded" in summary.stopped_early
    assert summary.figures.failures["connection"] > 0
    assert "connection" in out
    assert "Ended before its time" in (output / "report.html").read_text()


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [(signal.SIGINT, 130, "stopped by Ctrl-C"), (signal.SIGTERM, 143, "stopped by SIGTERM")],
)
def test_a_stop_ends_a_run_with_its_report(
    llm: FakeLlmServer, tmp_path: Path, number: signal.Signals, code: int, reason: str
) -> None:
    process = start("llm", llm.url, "--output", str(tmp_path), "--duration", "600", "--warmup", "0", "--no-ceiling")
    while len(llm.requests) < 10:
        time.sleep(0.05)
    process.send_signal(number)
    out, told = process.communicate(timeout=60)
    assert process.returncode == code, out + told
    summary = read_summary(tmp_path)
    assert summary.stopped_early == reason
    assert summary.figures.num_failed == 0  # what was in flight has finished
    assert "Traceback" not in told


def test_a_run_that_is_killed_leaves_its_records(llm: FakeLlmServer, tmp_path: Path) -> None:
    process = start("llm", llm.url, "--output", str(tmp_path), "--duration", "600", "--no-ceiling")
    file = tmp_path / "records.jsonl"
    while not file.exists() or not file.stat().st_size:
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children()
    assert workers
    process.kill()
    process.communicate(timeout=30)
    psutil.wait_procs(workers, timeout=20)
    assert not any(worker.is_running() for worker in workers)
    assert read_records(tmp_path)
    assert not (tmp_path / "summary.json").exists()


def test_several_processes_share_the_load(llm: FakeLlmServer, tmp_path: Path) -> None:
    words = (
        "--processes",
        "2",
        "--users",
        "4",
        "--requests",
        "41",
        "--warmup",
        "0",
        "--duration",
        "60",
        "--no-ceiling",
    )
    code, summary = load(llm.url, tmp_path, "llm", *words, "--output-tokens", "4")
    assert (code, summary.figures.num_ok) == (0, 41)
    records = read_records(tmp_path)
    assert {record.worker for record in records} == {0, 1}
    assert {record.user for record in records} == {0, 1, 2, 3}


def test_a_worker_joins_from_elsewhere(llm: FakeLlmServer, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = ("--bind", address, "--expect-workers", "1", "--users", "4", "--output", str(tmp_path), *QUICK)
    leader = start("llm", llm.url, *words)
    deadline = time.monotonic() + 60
    code = 2
    while code == 2 and time.monotonic() < deadline:  # until the leader listens
        code, _, _ = run("worker", address)
    out, told = leader.communicate(timeout=60)
    assert (leader.returncode, code) == (0, 0), out + told
    assert {record.worker for record in read_records(tmp_path)} == {0, 1}


def test_a_sweep_finds_the_highest_load_and_stops(llm: FakeLlmServer, tmp_path: Path) -> None:
    """With 4 chunks of 25 ms each user asks 10 times a second, so that any number holds up to the limit."""
    llm.num_chunks, llm.chunk_s = 4, 0.025
    words = ("--users", "1", "--sweep", "--sweep-limit", "4", "--duration", "1", "--warmup", "0", "--no-ceiling")
    code, summary = load(llm.url, tmp_path, "llm", *words, "--slo", "p50_latency_ms=2000")
    assert (code, summary.best_load) == (0, 4.0)
    assert [(stage.load, stage.holds) for stage in summary.stages] == [(1.0, True), (2.0, True), (4.0, True)]
    assert "Throughput against latency" in (tmp_path / "report.html").read_text()


def test_a_sweep_in_which_nothing_holds_says_so(llm: FakeLlmServer, tmp_path: Path) -> None:
    words = ("--users", "2", "--sweep", "--duration", "0.5", "--warmup", "0", "--no-ceiling")
    code, summary = load(llm.url, tmp_path, "llm", *words, "--slo", "p50_latency_ms=0.001")
    assert (code, summary.best_load) == (3, None)


def test_both_servers_at_once(llm: FakeLlmServer, policies: RunningPolicyServer, tmp_path: Path) -> None:
    slos = ("--slo", "llm.p99_ttft_ms=5000", "--slo", "policy.p99_latency_ms=5000")
    loads = ("--llm-users", "2", "--policy-rate", "50")
    code, out, told = run("mixed", llm.url, policies.address, "--output", str(tmp_path), *QUICK, *loads, *slos)
    assert code == 0, out + told
    summary = read_summary(tmp_path)
    assert summary.parts["llm"].output_tokens > 0
    assert 20 <= summary.parts["policy"].num_ok <= 90
    assert [slo.name for slo in summary.slos] == ["llm.p99_ttft_ms", "policy.p99_latency_ms"]


def test_conversations_say_what_was_said_before(llm: FakeLlmServer, tmp_path: Path) -> None:
    words = (*QUICK, "--turns", "3", "--users", "1", "--output-tokens", "2", "--input-tokens", "12")
    code, _ = load(llm.url, tmp_path, "llm", *words)
    assert code == 0
    lengths = {len(request["messages"]) for request in llm.requests}
    assert lengths == {1, 3, 5}
    assert {record.turn for record in read_records(tmp_path)} == {0, 1, 2}


def test_the_generators_ceiling_is_measured_and_warned_of(policies: RunningPolicyServer, tmp_path: Path) -> None:
    code, summary = load(policies.address, tmp_path, "policy", "--duration", "1", "--warmup", "0", "--users", "2")
    assert code == 0
    assert summary.generator.ceiling_per_s is not None
    assert summary.generator.ceiling_per_s > summary.figures.requests_per_s
    assert summary.generator.share == pytest.approx(
        summary.figures.num_requests / summary.figures.duration_s / summary.generator.ceiling_per_s
    )


def test_locusts_own_page_is_there_when_wanted(llm: FakeLlmServer, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ("--web", str(port), "--duration", "60", "--warmup", "0", "--no-ceiling", "--output", str(tmp_path))
    process = start("llm", llm.url, *words)
    try:
        deadline = time.monotonic() + 40
        found: dict[str, Any] = {}
        while not found.get("stats") or found["stats"][-1]["num_requests"] == 0:
            assert time.monotonic() < deadline
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats/requests", timeout=5) as answer:
                    found = json.load(answer)
            except OSError:
                time.sleep(0.1)
        assert found["state"] in ("running", "spawning")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_two_runs_are_compared(llm: FakeLlmServer, tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    load(llm.url, before, "llm", *QUICK, "--output-tokens", "4")
    llm.chunk_s = 0.02
    load(llm.url, after, "llm", *QUICK, "--output-tokens", "4")
    code, out, _ = run("compare", str(before), str(after), "--fail-on-regression")
    assert code == 3
    assert re.search(r"mean ITL, ms .* worse", out)
    assert (after / "comparison.html").exists()
    code, _, told = run("compare", str(before), str(tmp_path / "none"))
    assert code == 2
    assert "cannot be read" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("llm",), "url: missing; give the server's address"),
        (("policy", "127.0.0.1:8100"), "url='127.0.0.1:8100': not an address of a server"),
        (("llm", "{llm}", "--slo", "p99_tttf_ms=5"), "did you mean p99_ttft_ms"),
        (("llm", "{llm}", "--users", "0"), "users=0: has to be at least 1"),
        (("llm", "{llm}", "--model", "nope"), "model='nope': not served there; there are: fake, other"),
        (("llm", "{llm}", "--endpoint", "embeddings"), "endpoint='embeddings': unknown"),
        (("llm", "{llm}", "--prompts", "/nonexistent"), "prompts='/nonexistent': cannot be read"),
        (("llm", "{llm}", "--sweep"), "sweep: needs an SLO"),
        (("llm", "{llm}", "--records", "xml"), "records='xml': unknown"),
        (("llm", "{policy}"), "is not an OpenAI-compatible server"),
        (("policy", "{llm}"), "is not a policy server"),
        (("policy", "{policy}", "--policy", "nope"), "policy='nope': not live there; there are: tiny"),
        (("policy", "http://127.0.0.1:9"), "no answer (127.0.0.1:9: Connection refused)"),
        (("mixed", "{llm}"), "url: missing"),
        (("worker", "127.0.0.1:9"), "Connection refused"),
        (("worker", "nowhere"), "write HOST:PORT"),
    ],
)
def test_bad_usage_is_told_with_exit_code_2(
    llm: FakeLlmServer, policies: RunningPolicyServer, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    filled = [word.format(llm=llm.url, policy=policies.address) for word in words]
    if words[0] != "worker":
        filled += ["--output", str(tmp_path / "out")]
    code, out, told = run(*filled)
    assert code == 2, out + told
    assert message in told.replace("\n", " ")
    assert "Traceback" not in told
    assert not (tmp_path / "out" / "summary.json").exists()


def test_a_server_that_does_not_stream_is_refused(llm: FakeLlmServer, tmp_path: Path) -> None:
    llm.mode = "json"
    code, _, told = run("llm", llm.url, "--output", str(tmp_path / "out"))
    assert (code, "no streaming support" in told) == (2, True)


def test_an_output_folder_with_other_files_is_left_alone(llm: FakeLlmServer, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    code, _, told = run("llm", llm.url, "--output", str(tmp_path))
    assert (code, "holds other files (thesis.tex)" in told) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("kind", ["llm", "policy", "mixed"])
def test_plain_locustfiles_work_with_locust_alone(
    llm: FakeLlmServer, policies: RunningPolicyServer, tmp_path: Path, kind: str
) -> None:
    llm.num_chunks = 3
    hosts = ["--llm-host", llm.url, "--policy-host", policies.address]
    hosts = {"llm": ["--host", llm.url], "policy": ["--host", policies.address], "mixed": hosts}[kind]
    file = ROOT / "loadtest" / f"locustfile_{kind}.py"
    command = [sys.executable, "-m", "locust", "-f", str(file), "--headless", "-u", "5", "-r", "5", "-t", "3s"]
    done = subprocess.run(
        [*command, *hosts, "--json"], capture_output=True, text=True, cwd=tmp_path, timeout=90, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {(row["method"], row["name"]): row for row in json.loads(done.stdout)}
    expected = {
        "llm": {("chat", "answer"), ("chat", "first token"), ("chat", "inter-token")},
        "policy": {("act", "answer")},
    }
    expected["mixed"] = expected["llm"] | expected["policy"]
    assert set(rows) == expected[kind]
    assert all(row["num_requests"] > 0 and row["num_failures"] == 0 for row in rows.values())


def test_a_locustfile_without_its_server_ends_with_what_is_wrong(tmp_path: Path) -> None:
    file = ROOT / "loadtest" / "locustfile_policy.py"
    command = [sys.executable, "-m", "locust", "-f", str(file), "--headless", "-u", "1", "-t", "20s"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--host", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
        env=environment,
    )
    assert done.returncode == 2
    assert "no answer (127.0.0.1:9: Connection refused)" in done.stderr + done.stdout
