"""One streamed request: what is timed, what is counted, and what each fault is called."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fake_llm_server import fake_llm_server

from loadtest.errors import DeadServerError, UsageError
from loadtest.llm_client import Ask, LlmClient
from loadtest.settings import LlmSettings
from loadtest.targets import check_llm

MESSAGES = [{"role": "user", "content": "hello there"}]


def client_of(url: str, *, timeout_s: float = 10, **fields: Any) -> LlmClient:
    return LlmClient(LlmSettings(url=url, model="fake", **fields), timeout_s=timeout_s)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_stream_is_timed_chunk_by_chunk(endpoint: Any) -> None:
    with fake_llm_server() as server:
        server.chunk_s = 0.02
        client = client_of(server.url, endpoint=endpoint)
        record = client.send(Ask(MESSAGES if endpoint == "chat" else "hello there", 5))
        assert (record.error, record.status, record.kind) == (None, 200, endpoint)
        assert client.last_text == " 0 1 2 3 4"
        assert (record.output_tokens, record.tokens_from) == (5, "usage")
        assert record.input_tokens is not None
        assert len(record.itl_ms) == 4
        assert record.ttft_ms is not None
        assert record.latency_ms is not None
        assert record.ttft_ms >= 20  # the server waits so long before a chunk
        assert record.latency_ms >= 100
        assert record.latency_ms == pytest.approx(record.ttft_ms + sum(record.itl_ms))
        assert record.service_ms == record.latency_ms
        sent = server.requests[0]
        assert (sent["stream"], sent["max_tokens"], sent["ignore_eos"]) == (True, 5, True)
        assert sent["stream_options"] == {"include_usage": True}


def test_what_was_late_counts_from_when_it_was_meant_to_be_sent() -> None:
    with fake_llm_server() as server:
        record = client_of(server.url).send(Ask(MESSAGES, 3), intended_s=time.time() - 1.5)
        assert record.latency_ms is not None
        assert record.ttft_ms is not None
        assert record.service_ms is not None
        assert record.ttft_ms >= 1500
        assert record.latency_ms - record.service_ms == pytest.approx(1e3 * (record.sent_s - record.intended_s))


def test_without_usage_chunks_are_counted_and_it_is_said() -> None:
    with fake_llm_server() as server:
        server.usage = False
        record = client_of(server.url).send(Ask(MESSAGES, 4))
        assert (record.output_tokens, record.tokens_from, record.input_tokens) == (4, "chunks", None)


@pytest.mark.parametrize(
    ("mode", "error", "message"),
    [
        ("json", "not_streamed", "answered in one piece although a stream was asked for"),
        ("html", "empty_stream", "a proxy's page"),
        ("error_event", "stream_error", "out of memory"),
        ("not_json", "bad_answer", "an event is not JSON: {half"),
        ("cut", "cut_off", "in the middle of its answer"),
        ("no_done", "cut_off", "without [DONE]"),
        ("empty", "empty_stream", "no chunk with choices came"),
        ("drop", "cut_off", "without an answer"),
        ("not_http", "bad_answer", "not HTTP"),
        ("silent", "timeout", "no whole answer within 0.3 s"),
        ("429", "http_429", "told to answer 429"),
        ("503", "http_503", "told to answer 503"),
    ],
)
def test_each_fault_has_its_name_and_the_next_request_goes_on(mode: str, error: str, message: str) -> None:
    with fake_llm_server() as server:
        server.mode = mode
        client = client_of(server.url, timeout_s=0.3 if mode == "silent" else 10)
        record = client.send(Ask(MESSAGES, 3))
        assert record.error == error
        assert message in record.message
        assert record.latency_ms is None
        assert record.service_ms is not None
        server.mode = "stream"
        assert client.send(Ask(MESSAGES, 3)).error is None


def test_the_target_is_found_and_asked() -> None:
    with fake_llm_server() as server:
        target = check_llm(LlmSettings(url=server.url), timeout_s=10)
        assert target.settings.model == "fake"
        assert target.words.tokens_per_word == pytest.approx(1.0)
        with pytest.raises(UsageError, match="model='nope': not served there; there are: fake, other"):
            check_llm(LlmSettings(url=server.url, model="nope"), timeout_s=10)


@pytest.mark.parametrize(
    ("mode", "error", "message"),
    [
        ("json", UsageError, "no streaming support"),
        ("400", UsageError, r"refuses a request \(http_400\): told to answer 400"),
        ("503", DeadServerError, r"a first request failed \(http_503\)"),
        ("drop", DeadServerError, r"a first request failed \(cut_off\)"),
    ],
)
def test_a_target_that_does_not_stream_is_refused(mode: str, error: type[Exception], message: str) -> None:
    with fake_llm_server() as server:
        server.mode = mode
        with pytest.raises(error, match=message):
            check_llm(LlmSettings(url=server.url), timeout_s=10)


def test_a_key_is_sent_or_asked_for() -> None:
    with fake_llm_server() as server:
        server.api_key = "sesame"
        with pytest.raises(DeadServerError, match="give it with --api-key"):
            check_llm(LlmSettings(url=server.url), timeout_s=10)
        assert check_llm(LlmSettings(url=server.url, api_key="sesame"), timeout_s=10).settings.model == "fake"
