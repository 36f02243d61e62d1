"""What a load test is: how much load, what is sent, where to. Frozen; every wrong value fails when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from loadtest.errors import UsageError

Mode = Literal["closed", "open"]
Arrival = Literal["constant", "poisson"]
Shape = Literal["steady", "ramp", "steps"]
Protocol = Literal["json", "binary", "websocket"]
Endpoint = Literal["chat", "completions"]
Distribution = Literal["fixed", "uniform", "normal", "lognormal"]


def checked_url(url: str) -> str:
    """The URL without a trailing slash.

    Raises:
        UsageError: It is none of a server.
    """
    if not url:
        raise UsageError("url: missing; give the server's address, such as http://127.0.0.1:8000")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"url={url!r}: not an address of a server; write it like http://127.0.0.1:8000")
    return url.rstrip("/")


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raises UsageError unless the value is among the known."""
    if value not in known:
        raise UsageError(f"{name}={value!r}: unknown; choose one of {', '.join(known)}")


def at_least(name: str, value: float, least: float) -> None:
    """Raises UsageError unless the value is finite and at least so large."""
    if not math.isfinite(value) or value < least:
        raise UsageError(f"{name}={value}: has to be at least {least:g}")


def above_0(name: str, value: float) -> None:
    """Raises UsageError unless the value is finite and above 0."""
    if not math.isfinite(value) or value <= 0:
        raise UsageError(f"{name}={value}: has to be above 0")


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """How much load, for how long.

    Args:
        mode: ``closed``: that many users, each asks again when it is answered. ``open``: requests are sent at their
            times whatever the server does.
        users: Users of a closed loop, all processes together.
        rate_per_s: Requests a second of an open loop, all processes together.
        arrival: Even spaces between requests of an open loop, or exponentially distributed ones.
        shape: ``steady``; ``ramp``: users or rate grow linearly from ``start`` to the full number over the run;
            ``steps``: in ``num_steps`` equal steps.
        start: Users or rate at the start of a ramp or of steps.
        num_steps: Steps.
        duration_s: How long requests are sent, without the warm-up.
        warmup_s: How long before that they are sent and left out of the figures.
        num_requests: Stop after that many measured requests even if there is time left; None for no such limit.
        timeout_s: When a request counts as failed.
        max_in_flight: Requests of an open loop that may be under way in one process; further ones are recorded as
            failed with ``not_sent``.
        seed: Of arrivals, prompts and observations.
    """

    mode: Mode = "closed"
    users: int = 8
    rate_per_s: float = 10.0
    arrival: Arrival = "poisson"
    shape: Shape = "steady"
    start: float = 1.0
    num_steps: int = 5
    duration_s: float = 30.0
    warmup_s: float = 5.0
    num_requests: int | None = None
    timeout_s: float = 120.0
    max_in_flight: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("mode", self.mode, ("closed", "open"))
        one_of("arrival", self.arrival, ("constant", "poisson"))
        one_of("shape", self.shape, ("steady", "ramp", "steps"))
        for name in ("users", "num_steps", "max_in_flight"):
            at_least(name, getattr(self, name), 1)
        if self.num_requests is not None:
            at_least("num_requests", self.num_requests, 1)
        at_least("seed", self.seed, 0)
        for name in ("rate_per_s", "start", "duration_s", "timeout_s"):
            above_0(name, getattr(self, name))
        at_least("warmup_s", self.warmup_s, 0)

    @property
    def most_users(self) -> int:
        """Users that a closed loop ever has at once; a ramp may fall."""
        return self.users if self.shape == "steady" else max(self.users, math.ceil(self.start))

    @property
    def full(self) -> float:
        """Users or requests a second that the shape ends with."""
        return float(self.users) if self.mode == "closed" else self.rate_per_s


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How a number of tokens is distributed.

    Args:
        mean: Mean, in tokens.
        distribution: ``fixed``; ``uniform`` within mean (1 - spread) to mean (1 + spread); ``normal`` and ``lognormal``
            with a standard deviation of mean times spread. Drawn values are at least 1.
        spread: Relative width.
    """

    mean: int
    distribution: Distribution = "fixed"
    spread: float = 0.0

    def __post_init__(self) -> None:
        at_least("mean", self.mean, 1)
        one_of("distribution", self.distribution, ("fixed", "uniform", "normal", "lognormal"))
        at_least("spread", self.spread, 0)
        if self.distribution == "uniform" and self.spread > 1:
            raise UsageError(f"spread={self.spread}: a uniform distribution takes 0 to 1")


@dataclass(frozen=True, kw_only=True)
class LlmSettings:
    """What is asked of a language model.

    Args:
        url: The server, such as ``http://127.0.0.1:8000`` (a trailing ``/v1`` is taken off).
        model: Its name; None for the first of ``/v1/models``.
        endpoint: ``/v1/chat/completions`` or ``/v1/completions``, both streamed.
        input_tokens: Lengths of synthetic prompts.
        output_tokens: Lengths asked for, as ``max_tokens``.
        ignore_eos: Ask the server to go on to ``max_tokens``; a field that vLLM knows, not OpenAI's.
        prefix_tokens: Tokens at the head of each prompt that prompts share.
        num_prefixes: How many such heads there are.
        turns: Turns of a conversation; each sends what was said before. Chat only.
        prompts: A JSONL of the user's: each line a ``prompt`` or ``messages``, and ``max_tokens`` if wanted.
        temperature: Sampling temperature.
        api_key: Sent as a bearer token; None for none.
        headers: Further headers.
    """

    url: str
    model: str | None = None
    endpoint: Endpoint = "chat"
    input_tokens: Lengths = Lengths(mean=128)
    output_tokens: Lengths = Lengths(mean=64)
    ignore_eos: bool = True
    prefix_tokens: int = 0
    num_prefixes: int = 1
    turns: int = 1
    prompts: Path | None = None
    temperature: float = 0.0
    api_key: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", checked_url(self.url).removesuffix("/v1"))
        one_of("endpoint", self.endpoint, ("chat", "completions"))
        at_least("prefix_tokens", self.prefix_tokens, 0)
        at_least("num_prefixes", self.num_prefixes, 1)
        at_least("turns", self.turns, 1)
        at_least("temperature", self.temperature, 0)
        if self.turns > 1 and self.endpoint != "chat":
            raise UsageError(f"turns={self.turns}: only the chat endpoint has turns; ask with --endpoint chat")


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """What is asked of a policy server.

    Args:
        url: The server, such as ``http://127.0.0.1:8100``.
        policy: Its name; None for the only one, or the first.
        protocol: ``json`` (POST .../act), ``binary`` (the Open Inference Protocol's binary tensors) or ``websocket``
            (openpi's).
        control_hz: Each user of a closed loop acts at that rate and counts answers that come after the period as
            missed deadlines; None asks again at once.
        rows: Observations in one request.
        deterministic: The best action, or a drawn one.
        observations: A JSONL of the user's, each line one observation; None for drawn ones within the policy's bounds.
        api_key: Sent as a bearer token; None for none.
        headers: Further headers.
    """

    url: str
    policy: str | None = None
    protocol: Protocol = "json"
    control_hz: float | None = None
    rows: int = 1
    deterministic: bool = True
    observations: Path | None = None
    api_key: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", checked_url(self.url))
        one_of("protocol", self.protocol, ("json", "binary", "websocket"))
        at_least("rows", self.rows, 1)
        if self.control_hz is not None:
            above_0("control_hz", self.control_hz)
        if self.protocol == "websocket" and self.rows > 1:
            raise UsageError(
                f"rows={self.rows}: openpi's WebSocket takes one observation a message; use json or binary"
            )
