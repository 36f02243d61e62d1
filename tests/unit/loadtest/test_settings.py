"""Wrong values are refused where they are given, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.errors import UsageError
from loadtest.options import parse_address, parse_headers, parse_lengths
from loadtest.plan import Plan, SweepSettings
from loadtest.settings import Lengths, LlmSettings, LoadSettings, PolicySettings
from loadtest.slo import parse_slos

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "ajar"}, "mode='ajar': unknown; choose one of closed, open"),
        ({"arrival": "bursty"}, "arrival='bursty'"),
        ({"shape": "sine"}, "shape='sine'"),
        ({"users": 0}, "users=0: has to be at least 1"),
        ({"rate_per_s": float("nan")}, "rate_per_s=nan"),
        ({"duration_s": 0}, "duration_s=0: has to be above 0"),
        ({"warmup_s": -1}, "warmup_s=-1"),
        ({"num_requests": 0}, "num_requests=0"),
        ({"timeout_s": float("inf")}, "timeout_s=inf"),
    ],
)
def test_wrong_loads(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LoadSettings(**fields)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "url: missing"),
        ("127.0.0.1:8000", "not an address of a server"),
        ("ftp://host", "not an address of a server"),
        ("http://", "not an address of a server"),
        ("http://host:99999", "not an address of a server"),
    ],
)
@pytest.mark.parametrize("settings", [LlmSettings, PolicySettings])
def test_wrong_addresses(settings: Any, url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings(url=url)


def test_an_address_is_tidied() -> None:
    assert LlmSettings(url=f"{URL}/v1/").url == URL
    assert PolicySettings(url=f"{URL}/").url == URL


def test_wrong_targets() -> None:
    with pytest.raises(UsageError, match="turns=2: only the chat endpoint"):
        LlmSettings(url=URL, endpoint="completions", turns=2)
    with pytest.raises(UsageError, match="rows=2: openpi's WebSocket takes one"):
        PolicySettings(url=URL, protocol="websocket", rows=2)
    with pytest.raises(UsageError, match="control_hz=0"):
        PolicySettings(url=URL, control_hz=0)


def test_wrong_plans() -> None:
    llm, policy, closed = LlmSettings(url=URL), PolicySettings(url=URL), LoadSettings()
    with pytest.raises(UsageError, match="url: missing"):
        Plan()
    with pytest.raises(UsageError, match="needs an SLO"):
        Plan(llm=llm, llm_load=closed, sweep=SweepSettings())
    with pytest.raises(UsageError, match="a mixed run has two"):
        Plan(llm=llm, llm_load=closed, policy=policy, policy_load=closed, sweep=SweepSettings())
    with pytest.raises(UsageError, match=r"write llm\.p99_ttft_ms or policy\.p99_ttft_ms"):
        Plan(llm=llm, llm_load=closed, policy=policy, policy_load=closed, slos=parse_slos(["p99_ttft_ms=1"]))
    with pytest.raises(UsageError, match="write p99_ttft_ms"):
        Plan(llm=llm, llm_load=closed, slos=parse_slos(["llm.p99_ttft_ms=1"]))
    with pytest.raises(UsageError, match="processes=9: more than users=8"):
        Plan(llm=llm, llm_load=closed, processes=9)
    with pytest.raises(UsageError, match="conversations need users"):
        Plan(llm=LlmSettings(url=URL, turns=2), llm_load=LoadSettings(mode="open"))
    with pytest.raises(UsageError, match="control_hz: is for users"):
        Plan(policy=PolicySettings(url=URL, control_hz=50), policy_load=LoadSettings(mode="open"))


def test_a_plan_travels_and_shows_no_keys() -> None:
    plan = Plan(
        llm=LlmSettings(url=URL, api_key="sesame", headers=(("X-Key", "sesame"),), prompts=Path("prompts.jsonl")),
        llm_load=LoadSettings(mode="open", rate_per_s=3),
        slos=parse_slos(["p99_ttft_ms=5"]),
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert "sesame" not in str(plan.shown())
    assert plan.shown()["llm"]["headers"] == [["X-Key", "***"]]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("128", Lengths(mean=128)),
        ("128:fixed", Lengths(mean=128)),
        ("64:normal", Lengths(mean=64, distribution="normal", spread=0.3)),
        ("64:uniform:0.5", Lengths(mean=64, distribution="uniform", spread=0.5)),
    ],
)
def test_lengths_are_read(text: str, lengths: Lengths) -> None:
    assert parse_lengths("input_tokens", text) == lengths


@pytest.mark.parametrize(
    "text", ["", "0", "many", "5:normal:x", "5:normal:1:1", "5:zipf", "5:uniform:2", "5:normal:-1"]
)
def test_wrong_lengths(text: str) -> None:
    with pytest.raises(UsageError, match="input_tokens="):
        parse_lengths("input_tokens", text)


def test_headers_and_addresses() -> None:
    assert parse_headers(["X-A: 1", "B:two: three"]) == (("X-A", "1"), ("B", "two: three"))
    for text in ("novalue", ": x", "a b: c", "X: a\r\nY: b"):
        with pytest.raises(UsageError, match="header="):
            parse_headers([text])
    assert parse_address("10.0.0.5:5557") == ("10.0.0.5", 5557)
    for text in ("host", ":5", "host:0", "host:x", "host:70000"):
        with pytest.raises(UsageError, match="write HOST:PORT"):
            parse_address(text)
