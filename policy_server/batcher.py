"""Gathers requests into batches for one engine: queue, deadlines, shedding. Knows no HTTP.

What gathers while the engine is busy is the next batch. Everything but the engine's run happens on the event loop's
thread, without a task or a future a request: a request is one entry in a queue, and its answer one call.

Legend: B batch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from policy_server.batch_run import OnDone, Outcome, Request, RowsDone, run_batch
from policy_server.engines.base import Array, Engine
from policy_server.errors import (
    DeadlineExceededError,
    EngineFailedError,
    NonFiniteActionError,
    NotReadyError,
    PolicyServerError,
    QueueFullError,
)
from policy_server.settings import BatchingSettings

logger = logging.getLogger(__name__)

_PACE_WEIGHT = 0.2  # of the newest batch in the moving average of rows a second
_LONGEST_RETRY_S = 60.0


@dataclass(slots=True)
class BatchRecord:
    """What one run of the engine was, for the metrics.

    Attributes:
        rows: Rows that ran.
        queued_s: How long each of its requests waited, seconds.
        inference_s: How long the engine ran, seconds; 0 when it did not.
        queue_rows: Rows that wait behind it.
        num_late: Requests that were shed since the record before, as their deadline had passed.
        num_refused: Requests that were refused since the record before, as the queue was full.
    """

    rows: int
    queued_s: list[float]
    inference_s: float
    queue_rows: int
    num_late: int
    num_refused: int


class Batcher:
    """One engine and the queue before it. Made and used on one event loop.

    Args:
        engine: What runs; the batcher closes it.
        settings: Sizes, delays and deadlines.
        observe: Called once a batch, on the loop.
        run_inline: Run the engine on the event loop's own thread. Right when a full batch takes less than handing it
            to a thread and back; the loop stands still meanwhile.
        required: Outputs whose values have to be finite; the first is the action.
        bound: Brings actions within their bounds, or raises ValueError when they cannot be; called with finite ones.
    """

    def __init__(
        self,
        engine: Engine,
        settings: BatchingSettings,
        *,
        observe: Callable[[BatchRecord], None],
        run_inline: bool = False,
        required: Sequence[str] = ("action",),
        bound: Callable[[Array], Array] | None = None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._limit = min(engine.max_batch, settings.max_batch)
        self._observe = observe
        self._inline = run_inline
        self._required = tuple(required)
        self._bound = bound
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Request] = deque()
        self._queued_rows = 0
        self._busy = False
        self._start_scheduled = False
        self._delay: asyncio.TimerHandle | None = None
        self._closed = False
        self._rows_per_s = 0.0
        self._num_late = 0
        self._num_refused = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._work: queue.SimpleQueue[list[Request] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if not run_inline:
            self._thread = threading.Thread(target=self._serve_thread, name="policy-engine", daemon=True)
            self._thread.start()

    @property
    def queued_rows(self) -> int:
        """Rows that wait; those that run are not counted."""
        return self._queued_rows

    @property
    def runs_inline(self) -> bool:
        """Whether the engine runs on the event loop's thread."""
        return self._inline

    def submit(self, inputs: Mapping[str, Array], rows: int, *, deadline: float | None, on_done: OnDone) -> None:
        """Queues a request. Called on the loop's thread; ``on_done`` is called there once, later.

        Args:
            inputs: Every input of the engine, each [rows, ...].
            rows: Rows of the request; more than a batch takes are run in several batches.
            deadline: When it is too late to begin, by ``time.monotonic()``; None for the settings' own.
            on_done: Gets the rows, or the error.

        Raises:
            QueueFullError: As many rows as allowed are waiting.
            NotReadyError: The batcher is closed.
        """
        if self._closed:
            raise NotReadyError("the policy was just taken out of service; try again", retry_after_s=1.0)
        if self._queued_rows and self._queued_rows + rows > self._settings.max_queue:
            self._num_refused += 1
            raise QueueFullError(
                f"{self._queued_rows} rows wait already, {self._settings.max_queue} are allowed; try again later",
                retry_after_s=self._seconds_to_clear(),
            )
        now = time.monotonic()
        if deadline is None:
            deadline_ms = self._settings.deadline_ms
            deadline = math.inf if deadline_ms is None else now + deadline_ms / 1e3
        self._queue.append(Request(inputs, rows, deadline, now, on_done))
        self._queued_rows += rows
        if not self._busy:
            self._idle.clear()
            self._schedule_start()

    async def infer(self, inputs: Mapping[str, Array], rows: int, *, deadline: float | None = None) -> RowsDone:
        """``submit`` for callers who can wait.

        Raises:
            PolicyServerError: As ``submit``, or what became of the request.
        """
        future: asyncio.Future[RowsDone] = self._loop.create_future()

        def settle(result: RowsDone | PolicyServerError) -> None:
            if future.done():  # the caller was cancelled
                return
            if isinstance(result, PolicyServerError):
                future.set_exception(result)
            else:
                future.set_result(result)

        self.submit(inputs, rows, deadline=deadline, on_done=settle)
        return await future

    async def drain(self) -> None:
        """Waits until nothing waits and nothing runs."""
        await self._idle.wait()

    async def close(self) -> None:
        """Fails what still waits, lets the run under way finish, and closes the engine."""
        if self._closed:
            return
        self._closed = True
        self._cancel_delay()
        waiting, self._queue = self._queue, deque()
        self._queued_rows = 0
        for request in waiting:
            self._answer(request, NotReadyError("the policy was just taken out of service; try again", retry_after_s=1))
        if not self._busy:
            self._idle.set()
        await self._idle.wait()
        if self._thread is not None:
            self._work.put(None)
            await asyncio.to_thread(self._thread.join)
        self._engine.close()

    # On the loop's thread.

    def _schedule_start(self) -> None:
        # call_soon and not at once: what else the loop has read in this turn shall come along.
        if not self._start_scheduled:
            self._start_scheduled = True
            self._loop.call_soon(self._start)

    def _start(self) -> None:
        self._start_scheduled = False
        if self._busy or self._closed:
            return
        if self._waits_for_more():
            return
        self._cancel_delay()
        batch = self._take_batch()
        if not batch:
            self._idle.set()
            return
        self._busy = True
        if self._inline:
            self._finish(batch, self._run(batch))
        else:
            self._work.put(batch)

    def _waits_for_more(self) -> bool:
        delay_s = self._settings.max_delay_ms / 1e3
        if not delay_s or not self._queue or self._queued_rows >= self._settings.max_batch:
            return False
        end = self._queue[0].arrived + delay_s
        for request in self._queue:  # waiting shall make none late: half of its time at most
            end = min(end, (request.arrived + request.deadline) / 2)
        left_s = end - time.monotonic()
        if left_s <= 0:
            return False
        self._cancel_delay()
        self._delay = self._loop.call_later(left_s, self._delay_over)
        return True

    def _delay_over(self) -> None:
        self._delay = None
        self._schedule_start()

    def _cancel_delay(self) -> None:
        if self._delay is not None:
            self._delay.cancel()
            self._delay = None

    def _take_batch(self) -> list[Request]:
        """First come, first served; the late are answered here, before they cost compute."""
        batch: list[Request] = []
        rows, now, waiting = 0, time.monotonic(), self._queue
        while waiting:
            request = waiting[0]
            late = request.deadline <= now
            if not late and rows and rows + request.rows > self._settings.max_batch:
                break
            waiting.popleft()
            self._queued_rows -= request.rows
            if late:
                self._num_late += 1
                waited_ms = 1e3 * (now - request.arrived)
                self._answer(request, DeadlineExceededError(f"it waited {waited_ms:.0f} ms, past its deadline"))
            else:
                batch.append(request)
                rows += request.rows
        if not batch and self._num_late:
            self._record([], 0.0, now)
        return batch

    def _finish(self, batch: list[Request], outcome: Outcome) -> None:
        started = time.monotonic() - outcome.inference_s
        self._busy = False
        if self._queue:  # before the answers, so that the engine does not wait for them
            self._start() if not self._inline else self._schedule_start()
        self._answer_all(batch, outcome, started)
        self._record(batch, outcome.inference_s, started)
        if not self._busy and not self._queue:
            self._idle.set()

    def _answer_all(self, batch: list[Request], outcome: Outcome, started: float) -> None:
        rows, first = sum(request.rows for request in batch), 0
        # The whole batch is looked at once; each request's own share only where there is a fault in it.
        sound = outcome.outputs is not None and self._fault(outcome.outputs) is None
        for index, request in enumerate(batch):
            last = first + request.rows
            result: dict[str, Array] | PolicyServerError
            if outcome.outputs is None:
                result = outcome.single[index]
            else:
                result = {name: values[first:last] for name, values in outcome.outputs.items()}
            first = last
            if not sound and not isinstance(result, PolicyServerError):
                result = self._fault(result) or result
            if isinstance(result, PolicyServerError):
                self._answer(request, result)
            else:
                queued_s = max(started - request.arrived, 0.0)
                self._answer(request, RowsDone(result, queued_s, outcome.inference_s, rows))

    def _fault(self, outputs: dict[str, Array]) -> PolicyServerError | None:
        """Why these outputs must not be sent; if they may be, the action in them is within its bounds afterwards."""
        for name in self._required:
            if not _is_finite(outputs[name]):
                return NonFiniteActionError(
                    "the policy's action for this observation is not finite; the observation is outside of what the "
                    "policy was trained on, or the policy is broken"
                )
        if self._bound is not None:
            action = self._required[0]
            try:
                outputs[action] = self._bound(outputs[action])
            except ValueError as error:
                return EngineFailedError(f"the policy's action is none that its manifest allows: {error}")
        return None

    def _answer(self, request: Request, result: RowsDone | PolicyServerError) -> None:
        try:
            request.on_done(result)
        except Exception:  # one client's fault must not keep the others from their answers
            logger.exception("an answer could not be delivered")

    def _record(self, batch: list[Request], inference_s: float, started: float) -> None:
        rows = sum(request.rows for request in batch)
        if inference_s > 0:
            pace = rows / inference_s
            self._rows_per_s = (
                pace if not self._rows_per_s else self._rows_per_s + _PACE_WEIGHT * (pace - self._rows_per_s)
            )
        late, self._num_late = self._num_late, 0
        refused, self._num_refused = self._num_refused, 0
        record = BatchRecord(
            rows=rows,
            queued_s=[max(started - request.arrived, 0.0) for request in batch],
            inference_s=inference_s,
            queue_rows=self._queued_rows,
            num_late=late,
            num_refused=refused,
        )
        try:
            self._observe(record)
        except Exception:  # what counts batches must not end serving
            logger.exception("a batch could not be counted")

    def _seconds_to_clear(self) -> float:
        if not self._rows_per_s:
            return 1.0
        return min(max(self._queued_rows / self._rows_per_s, 0.01), _LONGEST_RETRY_S)

    # On the engine's thread, or inline.

    def _run(self, batch: list[Request]) -> Outcome:
        return run_batch(self._engine, batch, limit=self._limit, required=self._required)

    def _serve_thread(self) -> None:
        while (batch := self._work.get()) is not None:
            outcome = self._run(batch)
            self._loop.call_soon_threadsafe(self._finish, batch, outcome)


def _is_finite(values: Array) -> bool:
    return values.dtype.kind in "iub" or bool(np.isfinite(values).all())
