"""One run of an engine for a batch of requests: joined, run in parts that it takes, and again alone where it raises.

Runs on the engine's thread, or on the event loop's where that is cheaper; knows neither.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from policy_server.engines.base import Array, Engine, EngineError
from policy_server.errors import EngineFailedError, PolicyServerError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RowsDone:
    """A request's share of a batch.

    Attributes:
        outputs: The engine's outputs, each [n, ...] with the n rows of the request.
        queued_s: How long it waited for the engine.
        inference_s: How long its batch ran.
        batch_rows: Rows of the whole batch.
    """

    outputs: dict[str, Array]
    queued_s: float
    inference_s: float
    batch_rows: int


OnDone = Callable[[RowsDone | PolicyServerError], None]


@dataclass(slots=True)
class Request:
    """A request that waits for the engine.

    Attributes:
        inputs: Every input of the engine, each [rows, ...].
        rows: Its rows.
        deadline: When it is too late to begin, by ``time.monotonic()``.
        arrived: When it came.
        on_done: Gets the rows, or the error.
    """

    inputs: Mapping[str, Array]
    rows: int
    deadline: float
    arrived: float
    on_done: OnDone


@dataclass(slots=True)
class Outcome:
    """What a run gave: outputs for the whole batch, or an answer for each request when that failed."""

    outputs: dict[str, Array] | None
    single: list[dict[str, Array] | PolicyServerError]
    inference_s: float


def run_batch(engine: Engine, batch: Sequence[Request], *, limit: int, required: Sequence[str]) -> Outcome:
    """Runs the requests together; each alone if that raises, so that a bad one fails none but itself. Never raises.

    Args:
        engine: What runs.
        batch: The requests, at least one.
        limit: Rows of one call of the engine; a larger request takes several.
        required: Outputs that there have to be.
    """
    started = time.perf_counter()
    try:
        outputs = _run(engine, batch, limit, required)
        return Outcome(outputs, [], time.perf_counter() - started)
    except Exception as error:  # whatever the engine raises, the loop has to hear of it
        if len(batch) == 1:
            return Outcome(None, [_failed(error)], time.perf_counter() - started)
    single: list[dict[str, Array] | PolicyServerError] = []
    for request in batch:  # one request's row may be what it stumbles over; the others get their actions
        try:
            single.append(_run(engine, [request], limit, required))
        except Exception as error:
            single.append(_failed(error))
    return Outcome(None, single, time.perf_counter() - started)


def _run(engine: Engine, batch: Sequence[Request], limit: int, required: Sequence[str]) -> dict[str, Array]:
    if len(batch) == 1:
        inputs, rows = batch[0].inputs, batch[0].rows
    else:
        rows = sum(request.rows for request in batch)
        inputs = {name: np.concatenate([request.inputs[name] for request in batch]) for name in batch[0].inputs}
    if rows <= limit:
        outputs = engine.run(inputs)
    else:
        parts = [
            engine.run({name: values[first : first + limit] for name, values in inputs.items()})
            for first in range(0, rows, limit)
        ]
        outputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for name in required:
        if name not in outputs:
            raise EngineError(f"the model gave no output {name}")
    for name, values in outputs.items():
        if values.shape[:1] != (rows,):
            raise EngineError(f"the model's output {name} has the shape {values.shape} for {rows} rows")
    return outputs


def _failed(error: Exception) -> PolicyServerError:
    if not isinstance(error, EngineError):
        logger.error("the engine failed", exc_info=error)
    return EngineFailedError(f"the engine could not run this observation: {error}")
