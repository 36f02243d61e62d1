"""An engine for tests: does what it is told, and records what it was asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import numpy as np

from policy_server.engines.base import Array, EngineError, TensorInfo


class FakeEngine:
    """Answers ``action = function(first input)``; slow, faulty or blocked on demand.

    Args:
        inputs: The graph's inputs; one ``observation`` of size 1 if not given.
        outputs: The graph's outputs; one ``action`` like the first input if not given.
        function: From the inputs to the outputs; ``action = 2 * first input`` if not given. It may raise.
        delay_s: How long each run takes.
        max_batch: Rows of the largest run.
    """

    def __init__(
        self,
        *,
        inputs: tuple[TensorInfo, ...] | None = None,
        outputs: tuple[TensorInfo, ...] | None = None,
        function: Callable[[Mapping[str, Array]], dict[str, Array]] | None = None,
        delay_s: float = 0.0,
        max_batch: int = 64,
    ) -> None:
        self.inputs = inputs or (TensorInfo(name="observation", dtype="float32", shape=(1,), dynamic_batch=True),)
        first = self.inputs[0]
        self.outputs = outputs or (TensorInfo(name="action", dtype=first.dtype, shape=first.shape, dynamic_batch=True),)
        self.max_batch = max_batch
        self.batches: list[int] = []
        """Rows of each run, in order."""
        self.closed = False
        self.free = threading.Event()
        """Cleared, it holds runs until it is set again."""
        self.free.set()
        self.entered = threading.Semaphore(0)
        """Released at the beginning of every run."""
        self._function: Callable[[Mapping[str, Array]], dict[str, Array]] = function or self._double
        self._delay_s = delay_s
        self._stopped = False

    def run(self, inputs: Mapping[str, Array], /) -> dict[str, Array]:
        """See ``Engine``."""
        if self.closed:
            raise EngineError("the engine is closed")
        rows = len(next(iter(inputs.values())))
        if not 1 <= rows <= self.max_batch:
            raise EngineError(f"a batch of {rows} rows, from 1 to {self.max_batch} are allowed")
        self.batches.append(rows)
        self.entered.release()
        self.free.wait()
        if self._delay_s:
            time.sleep(self._delay_s)
        if self._stopped:
            raise EngineError("stopped")
        return self._function(inputs)

    def _double(self, given: Mapping[str, Array]) -> dict[str, Array]:
        return {"action": np.asarray(given[self.inputs[0].name] * 2)}

    def stop_run(self) -> None:
        """See ``Engine``."""
        self._stopped = True
        self.free.set()

    def close(self) -> None:
        """See ``Engine``."""
        self.closed = True
        self.free.set()
