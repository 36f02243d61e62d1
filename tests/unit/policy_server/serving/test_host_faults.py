"""Faults of one policy, one worker or one moment: they stay with it, and what failed is taken back."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from served_policies import make_model, write_policy

import policy_server.loading
from policy_server.errors import LoadFailedError, PolicyNotFoundError
from policy_server.host import PolicyHost
from policy_server.metrics import Metrics
from policy_server.runtime import RuntimeFolder
from policy_server.settings import ServerSettings


@asynccontextmanager
async def running(
    repository: Path, runtime: RuntimeFolder, *, slot: int = 0, replaces: bool = False, **settings: Any
) -> AsyncIterator[PolicyHost]:
    host = PolicyHost(ServerSettings(repository=repository, **settings), Metrics(), runtime=runtime, slot=slot)
    try:
        await host.start(replaces_another=replaces)
        yield host
    finally:
        await host.stop()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(work(), 120)

    asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def live_versions(host: PolicyHost, name: str = "tiny") -> list[int]:
    status = host.status(name)
    return [served.version for served in (status.live, status.canary) if served is not None]


def test_an_engine_that_is_not_here_fails_its_policy_and_no_other(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for name in ("tiny", "zebra"):
        write_policy(repository, name=name)

    async def work() -> None:
        async with running(repository, RuntimeFolder(tmp_path / "runtime")) as host:
            (repository / "tiny" / "serving.json").write_text(json.dumps({"engine": {"engine": "tensorrt"}}))
            await until(lambda: 1 in host.status("tiny").failures)
            assert "TensorrtExecutionProvider" in host.status("tiny").failures[1]
            assert live_versions(host) == [1]
            write_policy(repository, name="zebra", version=2)
            await until(lambda: live_versions(host, "zebra") == [2])
            await host.rollback("zebra")
            assert live_versions(host, "zebra") == [1]

    run(work)


def test_a_fault_that_nobody_foresaw_fails_its_policy_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    for name in ("tiny", "zebra"):
        write_policy(repository, name=name)
    load = policy_server.loading.load_version

    def faulty(folder: Path, settings: ServerSettings) -> Any:
        if folder.parent.name == "tiny" and folder.name == "2":
            raise MemoryError
        return load(folder, settings)

    monkeypatch.setattr(policy_server.loading, "load_version", faulty)

    async def work() -> None:
        async with running(repository, RuntimeFolder(tmp_path / "runtime")) as host:
            for name in ("tiny", "zebra"):
                write_policy(repository, name=name, version=2)
            await until(lambda: live_versions(host, "zebra") == [2])
            assert live_versions(host) == [1]
            assert "MemoryError" in host.status("tiny").failures[2]

    run(work)


@pytest.mark.parametrize("content", ["pipe", "folder", "large"])
def test_settings_that_are_no_small_file_are_refused_at_once(tmp_path: Path, content: str) -> None:
    repository = tmp_path / "repository"
    write_policy(repository)
    write_policy(repository, name="zebra")
    path = repository / "tiny" / "serving.json"
    if content == "pipe":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    else:
        path.write_text(" " * (5 << 20))

    async def work() -> None:
        async with running(repository, RuntimeFolder(tmp_path / "runtime")) as host:
            assert "serving.json" in host.status("tiny").failures[1]
            assert live_versions(host, "zebra") == [1]

    run(work)


def test_a_load_that_failed_is_forgotten(tmp_path: Path) -> None:
    repository, runtime = tmp_path / "repository", RuntimeFolder(tmp_path / "runtime")
    write_policy(repository, version=1, model=b"broken")
    write_policy(repository, version=2)

    async def work() -> None:
        async with running(repository, runtime) as host:
            with pytest.raises(LoadFailedError, match="ONNX"):
                await host.load("tiny", 1)
            assert live_versions(host) == [2]
        async with running(repository, runtime) as host:  # as a worker that is started again
            assert live_versions(host) == [2]
            write_policy(repository, version=3)
            await until(lambda: live_versions(host) == [3])
            await host.unload("tiny")
            with pytest.raises(LoadFailedError, match="ONNX"):
                await host.load("tiny", 1)
            assert host.status("tiny").state == "unloaded"

    run(work)


@pytest.mark.parametrize("operation", ["load", "rollback", "canary"])
def test_what_one_worker_cannot_do_is_done_by_none(tmp_path: Path, operation: str) -> None:
    repository, runtime = tmp_path / "repository", RuntimeFolder(tmp_path / "runtime")
    large = make_model(1)
    large.doc_string = "x" * 50_000
    write_policy(repository, version=1, model=large)
    write_policy(repository, version=2)

    async def work() -> None:
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(running(repository, runtime))
            second = await stack.enter_async_context(running(repository, runtime, slot=1, max_model_bytes=20_000))
            asked = {
                "load": lambda: first.load("tiny", 1),
                "rollback": lambda: first.rollback("tiny"),
                "canary": lambda: first.set_canary("tiny", 1, 0.5),
            }[operation]
            with pytest.raises(LoadFailedError, match=r"worker 1: .*at most 20000 are allowed"):
                await asked()
            assert live_versions(first) == [2]
            assert live_versions(second) == [2]
            assert first.status("tiny").withdrawn == []

    run(work)


def test_a_worker_tries_again_when_it_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the fault was, it may be over: for the worker that is asked and for the others."""
    repository, runtime = tmp_path / "repository", RuntimeFolder(tmp_path / "runtime")
    write_policy(repository, version=1)
    load = policy_server.loading.load_version
    faulty = True

    def sometimes(folder: Path, settings: ServerSettings) -> Any:
        if faulty and folder.name == "2":
            raise MemoryError
        return load(folder, settings)

    monkeypatch.setattr(policy_server.loading, "load_version", sometimes)

    async def work() -> None:
        nonlocal faulty
        async with AsyncExitStack() as stack:
            hosts = [await stack.enter_async_context(running(repository, runtime, slot=slot)) for slot in range(2)]
            write_policy(repository, version=2)
            await until(lambda: all(2 in host.status("tiny").failures for host in hosts))
            faulty = False
            await hosts[0].load("tiny")
            assert [live_versions(host) for host in hosts] == [[2], [2]]

    run(work)


def test_a_change_asked_for_while_a_worker_starts_is_carried_out_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, runtime = tmp_path / "repository", RuntimeFolder(tmp_path / "runtime")
    for version in (1, 2):
        write_policy(repository, version=version)
    load = policy_server.loading.load_version
    asked: list[int] = []

    def slow(folder: Path, settings: ServerSettings) -> Any:
        if not asked:  # another worker is asked meanwhile, which cannot know of this one yet
            asked.append(1)
            runtime.change(lambda desired: desired.with_policy("tiny", desired.of("tiny").rolled_back([1, 2], 2)))
        return load(folder, settings)

    monkeypatch.setattr(policy_server.loading, "load_version", slow)

    async def work() -> None:
        async with running(repository, runtime) as host:
            assert live_versions(host) == [1]
            assert [status.generation for status in runtime.statuses()] == [runtime.desired().generation]

    run(work)


def test_a_worker_that_replaces_another_answers_even_if_nothing_loads_any_more(tmp_path: Path) -> None:
    repository, runtime = tmp_path / "repository", RuntimeFolder(tmp_path / "runtime")
    folder = write_policy(repository)
    whole = (folder / "policy.onnx").read_bytes()
    (folder / "policy.onnx").write_bytes(b"broken")

    async def work() -> None:
        async with running(repository, runtime, replaces=True) as host:
            assert host.ready
            with pytest.raises(PolicyNotFoundError, match="none of its versions could be loaded"):
                host.find("tiny")
            (folder / "policy.onnx").write_bytes(whole)
            await until(lambda: host.status("tiny").state == "live")
        folder.parents[1].rename(tmp_path / "away")
        async with running(repository, runtime, replaces=True) as host:
            assert host.policies() == []
            (tmp_path / "away").rename(repository)
            await until(lambda: host.policies() != [])

    run(work)


def test_without_watching_only_a_load_brings_a_new_version(tmp_path: Path) -> None:
    repository, runtime = tmp_path / "repository", RuntimeFolder(tmp_path / "runtime")
    for name in ("other", "tiny"):
        write_policy(repository, name=name)

    async def work() -> None:
        async with AsyncExitStack() as stack:
            hosts = [
                await stack.enter_async_context(running(repository, runtime, slot=slot, watch=False))
                for slot in range(2)
            ]
            for name in ("other", "tiny"):
                write_policy(repository, name=name, version=2)
            await hosts[0].load("other")
            for host in hosts:
                assert (live_versions(host), live_versions(host, "other")) == ([1], [2])
            await hosts[1].load("tiny")
            assert [live_versions(host) for host in hosts] == [[2], [2]]

    run(work)
