"""The host: versions that come, go, fail, are rolled back and tried out, while requests are answered."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_policies import write_policy

from policy_server.batcher import RowsDone
from policy_server.deployment import Canary, PolicyDesire, candidates, is_canary_session
from policy_server.errors import InvalidRequestError, LoadFailedError, NotReadyError, PolicyNotFoundError, StartError
from policy_server.host import PolicyHost
from policy_server.metrics import Metrics
from policy_server.served import ActRequest, ServedPolicy, draw_noise
from policy_server.settings import ServerSettings


def with_host(repository: Path, test: Callable[[PolicyHost], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        host = PolicyHost(ServerSettings(repository=repository, **settings), Metrics())
        try:
            await host.start()
            await asyncio.wait_for(test(host), 120)
        finally:
            await host.stop()

    asyncio.run(main())


async def act(served: ServedPolicy, *values: float, **fields: Any) -> np.ndarray:
    observation = {"observation": np.asarray([values], np.float32)}
    done: RowsDone = await served.infer(ActRequest(observation, 1, **fields))
    return done.outputs["action"][0]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def live_versions(host: PolicyHost, name: str = "tiny") -> list[int]:
    status = host.status(name)
    return [served.version for served in (status.live, status.canary) if served is not None]


def test_the_highest_version_is_live(tmp_path: Path) -> None:
    for version in (1, 2, 10):
        write_policy(tmp_path, version=version)

    async def test(host: PolicyHost) -> None:
        assert live_versions(host) == [10]
        assert (await act(host.find("tiny"), 1, 2, 3)).tolist() == [10, 20, 30]
        with pytest.raises(PolicyNotFoundError, match="version 2 of tiny is not live; 10 is"):
            host.find("tiny", 2)
        with pytest.raises(PolicyNotFoundError, match="there are: tiny"):
            host.find("huge")

    with_host(tmp_path, test)


def test_actions_stay_within_the_bounds_whatever_the_graph_gives(tmp_path: Path) -> None:
    action = {
        "shape": [3],
        "low": [-1.0, None, 0.5],
        "high": [1.0, None, None],
        "kind": "continuous",
        "dtype": "float32",
    }
    write_policy(tmp_path, changes={"action": action})

    async def test(host: PolicyHost) -> None:
        assert (await act(host.find("tiny"), -7, -7, -7)).tolist() == [-1, -7, 0.5]
        assert (await act(host.find("tiny"), 7, 7, 7)).tolist() == [1, 7, 7]

    with_host(tmp_path, test)


def test_a_new_version_goes_live_by_itself_and_a_broken_one_does_not(tmp_path: Path) -> None:
    write_policy(tmp_path, version=1)

    async def test(host: PolicyHost) -> None:
        write_policy(tmp_path, version=3, model=b"broken")
        await until(lambda: 3 in host.status("tiny").failures)
        assert live_versions(host) == [1]
        write_policy(tmp_path, version=2)
        await until(lambda: live_versions(host) == [2])
        write_policy(tmp_path, name="other")
        await until(lambda: "other" in {status.name for status in host.policies()})
        await until(lambda: live_versions(host, "other") == [1])

    with_host(tmp_path, test)


def test_a_folder_that_is_still_being_copied_goes_live_when_it_is_whole(tmp_path: Path) -> None:
    write_policy(tmp_path, version=1)
    whole = write_policy(tmp_path / "elsewhere", version=2)

    async def test(host: PolicyHost) -> None:
        target = tmp_path / "tiny" / "2"
        target.mkdir()
        shutil.copy(whole / "policy.json", target)
        content = (whole / "policy.onnx").read_bytes()
        (target / "policy.onnx").write_bytes(content[:50])
        await until(lambda: "still being copied" in host.status("tiny").failures.get(2, ""))
        assert live_versions(host) == [1]
        (target / "policy.onnx").write_bytes(content)
        await until(lambda: live_versions(host) == [2])
        assert host.status("tiny").failures == {}

    with_host(tmp_path, test)


def test_no_request_is_lost_while_versions_change(tmp_path: Path) -> None:
    write_policy(tmp_path, version=1)
    answered: set[int] = set()

    async def test(host: PolicyHost) -> None:
        ended = asyncio.Event()

        async def loop() -> None:
            while not ended.is_set():
                served = host.find("tiny")
                action = await act(served, 1, 1, 1)
                assert action.tolist() == [served.version] * 3
                answered.add(served.version)

        loops = [asyncio.create_task(loop()) for _ in range(8)]
        for version in range(2, 8):
            write_policy(tmp_path, version=version)
            await until(lambda version=version: live_versions(host) == [version])
        await until(lambda: 7 in answered)
        ended.set()
        await asyncio.gather(*loops)

    with_host(tmp_path, test)
    assert {1, 7} <= answered


def test_a_removed_version_gives_way_and_a_removed_policy_is_gone(tmp_path: Path) -> None:
    for version in (1, 2):
        write_policy(tmp_path, version=version)

    async def test(host: PolicyHost) -> None:
        shutil.rmtree(tmp_path / "tiny" / "2")
        await until(lambda: live_versions(host) == [1])
        shutil.rmtree(tmp_path / "tiny")
        await until(lambda: host.policies() == [])
        with pytest.raises(PolicyNotFoundError):
            host.find("tiny")

    with_host(tmp_path, test)


def test_rolling_back_withdraws_a_version_until_it_is_named(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        write_policy(tmp_path, version=version)

    async def test(host: PolicyHost) -> None:
        assert await host.rollback("tiny") == 2
        assert live_versions(host) == [2]
        assert host.status("tiny").withdrawn == [3]
        write_policy(tmp_path, version=4)
        await until(lambda: live_versions(host) == [4])
        assert await host.rollback("tiny") == 2
        assert await host.rollback("tiny") == 1
        with pytest.raises(PolicyNotFoundError, match="no version before 1"):
            await host.rollback("tiny")
        await host.load("tiny", 3)
        assert live_versions(host) == [3]

    with_host(tmp_path, test)


def test_rolling_back_to_a_broken_version_changes_nothing(tmp_path: Path) -> None:
    write_policy(tmp_path, version=1, model=b"broken")
    write_policy(tmp_path, version=2)

    async def test(host: PolicyHost) -> None:
        with pytest.raises(LoadFailedError, match="no version of tiny before 2 can be loaded"):
            await host.rollback("tiny")
        assert live_versions(host) == [2]
        assert host.status("tiny").withdrawn == []

    with_host(tmp_path, test)


def test_unloading_and_loading(tmp_path: Path) -> None:
    write_policy(tmp_path, version=1)

    async def test(host: PolicyHost) -> None:
        await host.unload("tiny")
        assert host.status("tiny").state == "unloaded"
        with pytest.raises(PolicyNotFoundError, match="it is unloaded"):
            host.find("tiny")
        await host.load("tiny")
        assert live_versions(host) == [1]
        with pytest.raises(PolicyNotFoundError, match="has no version 7; it has 1"):
            await host.load("tiny", 7)
        with pytest.raises(PolicyNotFoundError, match="no policy 'nope'"):
            await host.load("nope")

    with_host(tmp_path, test)


def test_loading_a_broken_version_says_why_and_keeps_what_is_live(tmp_path: Path) -> None:
    write_policy(tmp_path, version=1)
    write_policy(tmp_path, version=2, model=b"broken")

    async def test(host: PolicyHost) -> None:
        assert live_versions(host) == [1]
        for version in (2, None):
            with pytest.raises(LoadFailedError, match="ONNX"):
                await host.load("tiny", version)
            assert live_versions(host) == [1]

    with_host(tmp_path, test)


def test_a_version_that_takes_something_else_is_not_made_live_under_the_same_name(tmp_path: Path) -> None:
    write_policy(tmp_path, version=1)

    async def test(host: PolicyHost) -> None:
        write_policy(tmp_path, version=2, size=4)
        await until(lambda: 2 in host.status("tiny").failures)
        assert "clients could not tell" in host.status("tiny").failures[2]
        assert live_versions(host) == [1]

    with_host(tmp_path, test)


def test_a_canary_gets_its_share_of_the_sessions_and_keeps_them(tmp_path: Path) -> None:
    for version in (1, 2):
        write_policy(tmp_path, version=version)

    async def test(host: PolicyHost) -> None:
        await host.load("tiny", 1)
        await host.set_canary("tiny", 2, 0.3)
        assert live_versions(host) == [1, 2]
        sessions = [f"robot-{index}" for index in range(2000)]
        chosen = {session: host.find("tiny", None, session).version for session in sessions}
        share = sum(version == 2 for version in chosen.values()) / len(sessions)
        assert abs(share - 0.3) < 0.04
        assert host.find("tiny").version == 1
        assert host.find("tiny", 2).version == 2
        await host.set_canary("tiny", 2, 0.6)
        for session, version in chosen.items():
            if version == 2:
                assert host.find("tiny", None, session).version == 2
        write_policy(tmp_path, version=3)
        await until(lambda: host.status("tiny").versions == [1, 2, 3])
        assert live_versions(host) == [1, 2]
        await host.set_canary("tiny", None)
        assert live_versions(host) == [1]  # as before the trial: a load had named it
        await host.load("tiny")
        assert live_versions(host) == [3]
        with pytest.raises(LoadFailedError, match="is the stable one"):
            await host.set_canary("tiny", 3, 0.5)

    with_host(tmp_path, test)


def test_a_broken_canary_is_refused(tmp_path: Path) -> None:
    write_policy(tmp_path, version=1)
    write_policy(tmp_path, version=2, model=b"broken")

    async def test(host: PolicyHost) -> None:
        with pytest.raises(LoadFailedError, match="ONNX"):
            await host.set_canary("tiny", 2, 0.5)
        assert live_versions(host) == [1]

    with_host(tmp_path, test)


def test_settings_beside_the_versions_take_effect_when_they_change(tmp_path: Path) -> None:
    write_policy(tmp_path, version=1)

    async def test(host: PolicyHost) -> None:
        (tmp_path / "tiny" / "serving.json").write_text(json.dumps({"batching": {"max_batch": 3}}))
        await until(lambda: host.find("tiny").batching.max_batch == 3)
        (tmp_path / "tiny" / "serving.json").write_text("{")
        await until(lambda: 1 in host.status("tiny").failures)
        assert host.find("tiny").batching.max_batch == 3

    with_host(tmp_path, test)


def test_starting_with_nothing_that_loads_is_refused(tmp_path: Path) -> None:
    async def test(host: PolicyHost) -> None:
        raise AssertionError

    with pytest.raises(StartError, match="no such folder") as refused:
        with_host(tmp_path / "none", test)
    assert refused.value.exit_code == 2
    write_policy(tmp_path, model=b"broken")
    with pytest.raises(StartError, match="no policy can be served") as refused:
        with_host(tmp_path, test)
    assert refused.value.exit_code == 1


def test_an_empty_repository_waits_for_policies(tmp_path: Path) -> None:
    async def test(host: PolicyHost) -> None:
        assert host.ready
        write_policy(tmp_path)
        await until(lambda: host.policies() != [])
        await until(lambda: live_versions(host) == [1])

    with_host(tmp_path, test)


def test_before_the_start_requests_are_told_to_come_again(tmp_path: Path) -> None:
    async def main() -> None:
        host = PolicyHost(ServerSettings(repository=tmp_path), Metrics())
        assert not host.ready
        with pytest.raises(NotReadyError):
            host.find("tiny")

    asyncio.run(main())


def test_drawn_actions_follow_their_seed_and_not_their_batch(tmp_path: Path) -> None:
    write_policy(tmp_path, distribution=True)
    write_policy(tmp_path, name="plain")

    async def test(host: PolicyHost) -> None:
        served = host.find("tiny")
        assert (await act(served, 1, 2, 3)).tolist() == [1, 2, 3]
        alone = await act(served, 1, 2, 3, deterministic=False, seed=5)
        among = await asyncio.gather(*(act(served, 1, 2, 3, deterministic=False, seed=seed) for seed in range(10)))
        assert among[5].tolist() == alone.tolist()
        assert len({tuple(action.tolist()) for action in among}) == 10
        fresh = await asyncio.gather(*(act(served, 1, 2, 3, deterministic=False) for _ in range(5)))
        assert len({tuple(action.tolist()) for action in fresh}) == 5
        with pytest.raises(InvalidRequestError, match="--outputs distribution"):
            await act(host.find("plain"), 1, 2, 3, deterministic=False)
        with pytest.raises(InvalidRequestError, match="draws nothing"):
            await act(served, 1, 2, 3, seed=5)

    with_host(tmp_path, test)


@pytest.mark.parametrize(
    ("kind", "mean", "deviation"), [("standard_normal", 0.0, 1.0), ("standard_gumbel", 0.5772, 1.2825)]
)
def test_noise_has_its_distribution(kind: str, mean: float, deviation: float) -> None:
    noise = draw_noise(kind, (20_000, 2), 0)
    assert noise.dtype == np.float32
    np.testing.assert_allclose(noise.mean(), mean, atol=0.02)
    np.testing.assert_allclose(noise.std(), deviation, atol=0.02)


def test_which_versions_may_be_the_stable_one() -> None:
    assert candidates([1, 3, 2], PolicyDesire()) == [3, 2, 1]
    assert candidates([1, 3, 2], PolicyDesire(withdrawn=(3,))) == [2, 1]
    assert candidates([1, 3, 2], PolicyDesire(pinned=1, withdrawn=(3,))) == [1]
    assert candidates([3, 2], PolicyDesire(pinned=1)) == [3, 2]
    assert candidates([1, 2], PolicyDesire(canary=Canary(version=2, share=0.1))) == [1]
    assert candidates([1, 2], PolicyDesire(unloaded=True)) == []


def test_the_canarys_choice_never_changes() -> None:
    """These are written down: another release or machine has to choose the same."""
    found = [is_canary_session("fetch-reach", f"session-{index}", 0.5) for index in range(12)]
    assert "".join("01"[chosen] for chosen in found) == "110001101010"
    assert is_canary_session("p", "s", 1.0)
    assert not is_canary_session("p", "s", 0.0)
