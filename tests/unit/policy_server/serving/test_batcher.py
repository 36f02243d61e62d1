"""The batcher against a fake engine: what runs together, what is shed, and whose faults stay whose."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import pytest

from policy_server.batcher import Batcher, BatchRecord, RowsDone
from policy_server.engines.base import EngineError
from policy_server.engines.fake import FakeEngine
from policy_server.errors import (
    DeadlineExceededError,
    EngineFailedError,
    NonFiniteActionError,
    NotReadyError,
    PolicyServerError,
    QueueFullError,
)
from policy_server.settings import BatchingSettings

INLINE = pytest.mark.parametrize("inline", [False, True], ids=["thread", "inline"])


def rows(*values: float) -> dict[str, np.ndarray]:
    return {"observation": np.asarray(values, np.float32).reshape(-1, 1)}


def run(
    test: Callable[[Batcher], Awaitable[None]],
    engine: FakeEngine,
    *,
    inline: bool = False,
    records: list[BatchRecord] | None = None,
    observe: Callable[[BatchRecord], None] | None = None,
    required: tuple[str, ...] = ("action",),
    bound: Callable[[np.ndarray], np.ndarray] | None = None,
    **settings: Any,
) -> None:
    async def main() -> None:
        seen = observe or (records.append if records is not None else lambda _: None)
        batcher = Batcher(
            engine, BatchingSettings(**settings), observe=seen, run_inline=inline, required=required, bound=bound
        )
        try:
            await asyncio.wait_for(test(batcher), 60)
        finally:
            engine.free.set()
            await asyncio.wait_for(batcher.close(), 60)

    asyncio.run(main())


async def until_entered(engine: FakeEngine) -> None:
    assert await asyncio.to_thread(engine.entered.acquire, timeout=30)


@INLINE
def test_each_request_gets_its_own_rows(inline: bool) -> None:
    async def test(batcher: Batcher) -> None:
        done = await asyncio.gather(*(batcher.infer(rows(*range(i, i + i % 3 + 1)), i % 3 + 1) for i in range(50)))
        for index, result in enumerate(done):
            expected = 2.0 * np.arange(index, index + index % 3 + 1)[:, None]
            np.testing.assert_array_equal(result.outputs["action"], expected)

    run(test, FakeEngine(), inline=inline)


@INLINE
def test_what_the_loop_reads_in_one_turn_runs_together(inline: bool) -> None:
    engine = FakeEngine()

    async def test(batcher: Batcher) -> None:
        await asyncio.gather(*(batcher.infer(rows(i), 1) for i in range(10)))

    run(test, engine, inline=inline)
    assert engine.batches == [10]


def test_what_gathers_while_the_engine_is_busy_is_the_next_batch() -> None:
    engine = FakeEngine(max_batch=64)
    engine.free.clear()

    async def test(batcher: Batcher) -> None:
        first = asyncio.create_task(batcher.infer(rows(0), 1))
        await until_entered(engine)
        others = [asyncio.create_task(batcher.infer(rows(i), 1)) for i in range(100)]
        await asyncio.sleep(0)
        engine.free.set()
        await asyncio.gather(first, *others)

    run(test, engine, max_batch=64)
    assert engine.batches == [1, 64, 36]


@INLINE
def test_a_request_larger_than_a_batch_is_run_in_parts(inline: bool) -> None:
    engine = FakeEngine(max_batch=4)

    async def test(batcher: Batcher) -> None:
        done = await batcher.infer(rows(*range(10)), 10)
        np.testing.assert_array_equal(done.outputs["action"][:, 0], 2.0 * np.arange(10))

    run(test, engine, inline=inline, max_batch=4)
    assert engine.batches == [4, 4, 2]


def test_requests_are_not_overtaken() -> None:
    engine = FakeEngine(max_batch=4)
    order: list[int] = []

    async def test(batcher: Batcher) -> None:
        async def one(index: int, size: int) -> None:
            await batcher.infer(rows(*[index] * size), size)
            order.append(index)

        await asyncio.gather(*(one(index, size) for index, size in enumerate([3, 3, 1, 4, 1, 1, 2])))

    run(test, engine, max_batch=4)
    assert order == sorted(order)
    assert engine.batches == [3, 4, 4, 4]


def test_an_idle_engine_waits_only_when_asked_and_not_for_a_full_batch() -> None:
    engine = FakeEngine(max_batch=4)

    async def test(batcher: Batcher) -> None:
        first = asyncio.create_task(batcher.infer(rows(0), 1))
        await asyncio.sleep(0.05)
        assert engine.batches == []
        started = time.monotonic()
        await asyncio.gather(first, *(batcher.infer(rows(i), 1) for i in range(3)))
        assert time.monotonic() - started < 5

    run(test, engine, max_batch=4, max_delay_ms=10_000)
    assert engine.batches == [4]


def test_the_delay_ends_by_itself() -> None:
    engine = FakeEngine()

    async def test(batcher: Batcher) -> None:
        await batcher.infer(rows(1), 1)

    run(test, engine, max_delay_ms=20)
    assert engine.batches == [1]


@INLINE
def test_the_delay_does_not_make_a_request_late(inline: bool) -> None:
    engine = FakeEngine()

    async def test(batcher: Batcher) -> None:
        patient = asyncio.create_task(batcher.infer(rows(1), 1, deadline=time.monotonic() + 60))
        await asyncio.sleep(0)
        hurried = await batcher.infer(rows(2), 1, deadline=time.monotonic() + 1)
        assert hurried.outputs["action"][0, 0] == 4
        assert (await patient).batch_rows == 2

    run(test, engine, inline=inline, max_delay_ms=10_000)
    assert engine.batches == [2]


def test_late_requests_cost_no_compute() -> None:
    engine = FakeEngine()
    engine.free.clear()
    records: list[BatchRecord] = []

    async def test(batcher: Batcher) -> None:
        first = asyncio.create_task(batcher.infer(rows(0), 1))
        await until_entered(engine)
        late = asyncio.create_task(batcher.infer(rows(1), 1, deadline=time.monotonic() + 0.01))
        in_time = asyncio.create_task(batcher.infer(rows(2), 1))
        await asyncio.sleep(0.05)
        engine.free.set()
        with pytest.raises(DeadlineExceededError, match="past its deadline"):
            await late
        assert (await in_time).outputs["action"][0, 0] == 4
        await first

    run(test, engine, records=records)
    assert engine.batches == [1, 1]
    assert sum(record.num_late for record in records) == 1


def test_the_settings_deadline_holds_for_requests_without_one() -> None:
    engine = FakeEngine()
    engine.free.clear()

    async def test(batcher: Batcher) -> None:
        first = asyncio.create_task(batcher.infer(rows(0), 1))
        await until_entered(engine)
        late = asyncio.create_task(batcher.infer(rows(1), 1))
        await asyncio.sleep(0.06)
        engine.free.set()
        with pytest.raises(DeadlineExceededError):
            await late
        await first

    run(test, engine, deadline_ms=30)


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    engine = FakeEngine()
    engine.free.clear()

    async def test(batcher: Batcher) -> None:
        running = asyncio.create_task(batcher.infer(rows(0), 1))
        await until_entered(engine)
        waiting = [asyncio.create_task(batcher.infer(rows(i), 1)) for i in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="5 rows wait already, 5 are allowed") as refused:
            await batcher.infer(rows(9), 1)
        assert refused.value.retry_after_s is not None
        assert refused.value.retry_after_s > 0
        engine.free.set()
        await asyncio.gather(running, *waiting)

    records: list[BatchRecord] = []
    run(test, engine, max_queue=5, records=records)
    assert sum(record.num_refused for record in records) == 1


def test_a_request_larger_than_the_queue_is_taken_when_nothing_waits() -> None:
    async def test(batcher: Batcher) -> None:
        assert len((await batcher.infer(rows(*range(20)), 20)).outputs["action"]) == 20

    run(test, FakeEngine(), max_queue=5)


@INLINE
def test_an_observation_that_the_engine_raises_on_fails_alone(inline: bool) -> None:
    def function(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if (given["observation"] == 13).any():
            raise EngineError("13 is out of range")
        return {"action": given["observation"] * 2}

    async def test(batcher: Batcher) -> None:
        done = await asyncio.gather(*(batcher.infer(rows(i), 1) for i in range(10, 16)), return_exceptions=True)
        for value, result in zip(range(10, 16), done, strict=True):
            if value == 13:
                assert isinstance(result, EngineFailedError)
                assert "13 is out of range" in result.message
            else:
                assert isinstance(result, RowsDone)
                assert result.outputs["action"][0, 0] == 2 * value

    run(test, FakeEngine(function=function), inline=inline)


@INLINE
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_action_is_an_error_of_its_own_request(inline: bool, bad: float) -> None:
    def function(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"action": np.where(given["observation"] == 1, np.float32(bad), given["observation"])}

    async def test(batcher: Batcher) -> None:
        done = await asyncio.gather(*(batcher.infer(rows(i), 1) for i in range(3)), return_exceptions=True)
        assert isinstance(done[1], NonFiniteActionError)
        assert [result.outputs["action"][0, 0] for result in (done[0], done[2]) if isinstance(result, RowsDone)] == [
            0,
            2,
        ]

    run(test, FakeEngine(function=function), inline=inline)


@INLINE
def test_an_exception_of_any_kind_reaches_its_request(inline: bool, caplog: pytest.LogCaptureFixture) -> None:
    def function(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        raise ZeroDivisionError(f"{len(given['observation'])} rows")

    async def test(batcher: Batcher) -> None:
        for _ in range(2):  # the engine's thread lives on
            with pytest.raises(EngineFailedError, match="3 rows"):
                await batcher.infer(rows(1, 2, 3), 3)

    run(test, FakeEngine(function=function), inline=inline)
    assert "the engine failed" in caplog.text


@INLINE
def test_a_nan_in_any_required_output_is_an_error_of_its_own_request(inline: bool) -> None:
    def function(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        logits = np.where(given["observation"] == 1, np.float32("nan"), given["observation"])
        return {"action": np.zeros(len(logits), np.int64), "logits": logits}

    async def test(batcher: Batcher) -> None:
        done = await asyncio.gather(*(batcher.infer(rows(i), 1) for i in range(3)), return_exceptions=True)
        assert [type(result) for result in done] == [RowsDone, NonFiniteActionError, RowsDone]

    run(test, FakeEngine(function=function), inline=inline, required=("action", "logits"))


@INLINE
def test_an_action_that_cannot_be_bounded_is_an_error_of_its_own_request(inline: bool) -> None:
    def bound(actions: np.ndarray) -> np.ndarray:
        if (actions == 13).any():
            raise ValueError("13 is no choice")
        return np.minimum(actions, 20)

    async def test(batcher: Batcher) -> None:
        values = (10, 13, 30)
        done = await asyncio.gather(*(batcher.infer(rows(i), 1) for i in values), return_exceptions=True)
        assert isinstance(done[1], EngineFailedError)
        assert "13 is no choice" in done[1].message
        assert [result.outputs["action"].item() for result in (done[0], done[2]) if isinstance(result, RowsDone)] == [
            10,
            20,
        ]

    run(test, FakeEngine(function=lambda given: {"action": given["observation"]}), inline=inline, bound=bound)


@INLINE
def test_an_engine_without_the_required_output_is_found_out(inline: bool) -> None:
    async def test(batcher: Batcher) -> None:
        with pytest.raises(EngineFailedError, match="no output action"):
            await batcher.infer(rows(1), 1)

    run(test, FakeEngine(function=lambda given: {"other": given["observation"]}), inline=inline)


@INLINE
def test_what_counts_batches_cannot_end_serving(inline: bool, caplog: pytest.LogCaptureFixture) -> None:
    def observe(_: BatchRecord) -> None:
        raise OSError("the disk is full")

    async def test(batcher: Batcher) -> None:
        for value in range(3):
            assert (await batcher.infer(rows(value), 1)).outputs["action"][0, 0] == 2 * value
        await batcher.drain()

    run(test, FakeEngine(), inline=inline, observe=observe)
    assert "could not be counted" in caplog.text


def test_a_client_that_asks_again_from_its_answer_does_not_hold_up_the_others() -> None:
    """Fairness: first come, first served, however eager one client is."""
    engine = FakeEngine(max_batch=1)
    order: list[str] = []

    async def test(batcher: Batcher) -> None:
        def eager(_: object) -> None:
            order.append("eager")
            if order.count("eager") < 50:
                batcher.submit(rows(0), 1, deadline=None, on_done=eager)

        batcher.submit(rows(0), 1, deadline=None, on_done=eager)
        for _ in range(3):
            batcher.submit(rows(1), 1, deadline=None, on_done=lambda _: order.append("patient"))
        await batcher.drain()

    run(test, engine, max_batch=1)
    assert order[:5] == ["eager", "patient", "patient", "patient", "eager"]
    assert order.count("eager") == 50


def test_an_engine_that_gives_other_rows_is_found_out() -> None:
    async def test(batcher: Batcher) -> None:
        with pytest.raises(EngineFailedError, match="shape"):
            await batcher.infer(rows(1, 2), 2)

    run(test, FakeEngine(function=lambda given: {"action": given["observation"][:1]}))


def test_a_client_that_gave_up_does_not_harm_the_others() -> None:
    engine = FakeEngine()
    engine.free.clear()

    async def test(batcher: Batcher) -> None:
        first = asyncio.create_task(batcher.infer(rows(0), 1))
        await until_entered(engine)
        gone = asyncio.create_task(batcher.infer(rows(1), 1))
        stays = asyncio.create_task(batcher.infer(rows(2), 1))
        await asyncio.sleep(0)
        gone.cancel()
        engine.free.set()
        assert (await stays).outputs["action"][0, 0] == 4
        await first

    run(test, engine)


def test_an_answer_that_raises_does_not_keep_the_others_from_theirs() -> None:
    got: list[object] = []

    async def test(batcher: Batcher) -> None:
        def broken(_: object) -> None:
            raise RuntimeError("the client's fault")

        batcher.submit(rows(1), 1, deadline=None, on_done=broken)
        batcher.submit(rows(2), 1, deadline=None, on_done=got.append)
        await batcher.drain()

    run(test, FakeEngine())
    assert isinstance(got[0], RowsDone)


def test_closing_fails_what_waits_and_finishes_what_runs() -> None:
    engine = FakeEngine()
    engine.free.clear()

    async def test(batcher: Batcher) -> None:
        running = asyncio.create_task(batcher.infer(rows(1), 1))
        await until_entered(engine)
        waiting = asyncio.create_task(batcher.infer(rows(2), 1))
        await asyncio.sleep(0)
        closing = asyncio.create_task(batcher.close())
        with pytest.raises(NotReadyError):
            await waiting
        engine.free.set()
        assert (await running).outputs["action"][0, 0] == 2
        await closing
        assert engine.closed
        with pytest.raises(NotReadyError):
            await batcher.infer(rows(3), 1)

    run(test, engine)


def test_draining_answers_everything_first() -> None:
    engine = FakeEngine(delay_s=0.01, max_batch=2)
    got: list[object] = []

    async def test(batcher: Batcher) -> None:
        for value in range(7):
            batcher.submit(rows(value), 1, deadline=None, on_done=got.append)
        await batcher.drain()
        assert len(got) == 7
        assert all(isinstance(result, RowsDone) for result in got)

    run(test, engine, max_batch=2)


def test_the_engine_has_one_caller_at_a_time_and_never_the_loop() -> None:
    callers: set[int] = set()
    inside = 0

    def function(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        nonlocal inside
        inside += 1
        assert inside == 1
        callers.add(threading.get_ident())
        inside -= 1
        return {"action": given["observation"]}

    async def test(batcher: Batcher) -> None:
        await asyncio.gather(*(batcher.infer(rows(i), 1) for i in range(30)))
        assert threading.get_ident() not in callers

    run(test, FakeEngine(function=function), max_batch=2)
    assert len(callers) == 1


@INLINE
@pytest.mark.parametrize("seed", range(5))
def test_random_loads_agree_with_the_reference(inline: bool, seed: int) -> None:
    """Every request is answered exactly once: with its own rows, or with the error that its values ask for."""
    chosen = random.Random(seed)
    settings: dict[str, Any] = {
        "max_batch": chosen.randint(1, 9),
        "max_delay_ms": chosen.choice([0, 1]),
        "max_queue": 10_000,
    }
    records: list[BatchRecord] = []

    def function(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if (given["observation"] % 17 == 5).any():
            raise EngineError("cannot")
        return {"action": np.where(given["observation"] % 23 == 7, np.nan, given["observation"] * 2).astype(np.float32)}

    async def test(batcher: Batcher) -> None:
        async def one(first: int) -> None:
            size = chosen.randint(1, 12)
            values = np.arange(first, first + size, dtype=np.float32)
            await asyncio.sleep(chosen.random() * 0.02)
            result: RowsDone | PolicyServerError
            try:
                result = await batcher.infer({"observation": values[:, None]}, size)
            except PolicyServerError as error:
                result = error
            if (values % 17 == 5).any():
                assert isinstance(result, EngineFailedError)
            elif (values % 23 == 7).any():
                assert isinstance(result, NonFiniteActionError)
            else:
                assert isinstance(result, RowsDone)
                np.testing.assert_array_equal(result.outputs["action"][:, 0], values * 2)

        await asyncio.gather(*(one(20 * index) for index in range(120)))

    run(
        test,
        FakeEngine(function=function, delay_s=0.0005, max_batch=settings["max_batch"]),
        inline=inline,
        records=records,
        **settings,
    )
    assert sum(len(record.queued_s) for record in records) == 120
