"""One request as it was sent and answered: what every figure is computed from.

Times are seconds since the epoch; durations are milliseconds. A duration named ``service_ms`` counts from when the
request was truly sent, every other from when it was meant to be sent: in open loop these differ as soon as the
generator or the server falls behind, in closed loop they are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["chat", "completions", "act"]
TokenCount = Literal["usage", "chunks", "none"]


@dataclass(slots=True)
class RequestRecord:
    """One request.

    Attributes:
        kind: What was asked.
        intended_s: When it was meant to be sent.
        sent_s: When it was sent.
        latency_ms: From ``intended_s`` to the last chunk with choices, or to the whole answer; None when it failed.
        service_ms: The same from ``sent_s``.
        ttft_ms: From ``intended_s`` to the first chunk with choices; None when nothing was streamed.
        itl_ms: From each chunk with choices to the one before, in order; one fewer than the chunks.
        input_tokens: Tokens of the prompt; None when unknown.
        output_tokens: Tokens of the answer; None when unknown.
        tokens_from: Whether the server's usage says so, or chunks were counted.
        rows: Observations in the request; 1 for language models.
        status: The HTTP status; 0 when there was none.
        error: The kind of failure, such as ``timeout``, ``connection``, ``http_503``, ``bad_answer``, ``cut_off``,
            ``not_sent``; None when it succeeded.
        message: What the server or the client said about it; empty when it succeeded.
        deadline_missed: Whether the answer came later than the client's control period; False without one.
        warmup: Whether it belongs to the warm-up, which the figures leave out.
        stage: Index of the sweep's stage; 0 otherwise.
        worker: Which generator process sent it.
        user: Which of its users; -1 in open loop.
        turn: Which turn of a conversation, from 0.
        sent_bytes: Bytes of the request's body.
        received_bytes: Bytes of the answer's body.
    """

    kind: Kind
    intended_s: float
    sent_s: float
    latency_ms: float | None = None
    service_ms: float | None = None
    ttft_ms: float | None = None
    itl_ms: list[float] = field(default_factory=list[float])
    input_tokens: int | None = None
    output_tokens: int | None = None
    tokens_from: TokenCount = "none"
    rows: int = 1
    status: int = 0
    error: str | None = None
    message: str = ""
    deadline_missed: bool = False
    warmup: bool = False
    stage: int = 0
    worker: int = 0
    user: int = -1
    turn: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def ended_s(self) -> float:
        """When the last of the answer came, or when it failed if that is known; else when it was sent."""
        return self.sent_s + (self.service_ms or 0.0) / 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first: (latency - TTFT) / (output tokens - 1); None without a second one."""
        if self.latency_ms is None or self.ttft_ms is None or not self.output_tokens or self.output_tokens < 2:
            return None
        return (self.latency_ms - self.ttft_ms) / (self.output_tokens - 1)
