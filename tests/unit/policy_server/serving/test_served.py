"""A served version: its noise, its bounds, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_policies import write_policy

from policy_server.engines.fake import FakeEngine
from policy_server.errors import EngineFailedError, InvalidRequestError, NonFiniteActionError
from policy_server.manifest import Manifest, read_manifest
from policy_server.served import ActRequest, ServedPolicy, action_bound, draw_noise
from policy_server.settings import BatchingSettings

Function = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]


def manifest_of(repository: Path, *, distribution: bool = False, changes: dict[str, Any] | None = None) -> Manifest:
    return read_manifest(write_policy(repository, distribution=distribution, changes=changes))


def discrete(repository: Path, *, shape: tuple[int, ...] = (), num_choices: tuple[int, ...] = (3,)) -> Manifest:
    changes = {
        "action": {"shape": shape, "kind": "discrete", "dtype": "int64", "num_choices": num_choices},
        "outputs": "distribution",
        "distribution": {"kind": "categorical", "noise_size": sum(num_choices)},
    }
    return manifest_of(repository, changes=changes)


def request(*rows: float, **fields: Any) -> ActRequest:
    observation = np.repeat(np.asarray(rows, np.float32)[:, None], 3, axis=1)
    return ActRequest(observation={"observation": observation}, rows=len(rows), **fields)


def serve(manifest: Manifest, function: Function, test: Callable[[ServedPolicy], Awaitable[None]]) -> None:
    async def main() -> None:
        served = ServedPolicy(
            manifest=manifest,
            engine=FakeEngine(function=function),
            batching=BatchingSettings(),
            engine_name="fake",
            observe=lambda _: None,
        )
        try:
            await asyncio.wait_for(test(served), 30)
        finally:
            await served.close()

    asyncio.run(main())


def adds_noise(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"action": given["observation"] + given["noise"]}


def test_a_seed_gives_the_same_action_whatever_runs_beside_it(tmp_path: Path) -> None:
    async def test(served: ServedPolicy) -> None:
        alone = await served.infer(request(1, deterministic=False, seed=7))
        crowd = [served.infer(request(5, deterministic=False)) for _ in range(5)]
        *_, beside = await asyncio.gather(*crowd, served.infer(request(1, deterministic=False, seed=7)))
        assert beside.batch_rows == 6
        np.testing.assert_array_equal(alone.outputs["action"], beside.outputs["action"])
        other = await served.infer(request(1, deterministic=False, seed=8))
        assert not np.array_equal(alone.outputs["action"], other.outputs["action"])

    serve(manifest_of(tmp_path, distribution=True), adds_noise, test)


def test_without_a_seed_every_action_is_another_and_without_noise_the_same(tmp_path: Path) -> None:
    async def test(served: ServedPolicy) -> None:
        drawn = [await served.infer(request(1, 1, deterministic=False)) for _ in range(2)]
        values = np.concatenate([done.outputs["action"] for done in drawn])
        assert len(np.unique(values)) == values.size
        best = await served.infer(request(1, 2))
        np.testing.assert_array_equal(best.outputs["action"], [[1] * 3, [2] * 3])

    serve(manifest_of(tmp_path, distribution=True), adds_noise, test)


def test_the_rows_of_a_seed_do_not_depend_on_their_number() -> None:
    for kind in ("standard_normal", "standard_gumbel"):
        np.testing.assert_array_equal(draw_noise(kind, (2, 4), 3), draw_noise(kind, (5, 4), 3)[:2])


@pytest.mark.parametrize(
    ("kind", "mean", "variance"), [("standard_normal", 0, 1), ("standard_gumbel", 0.5772, np.pi**2 / 6)]
)
def test_noise_is_of_the_kind_that_the_manifest_names(kind: str, mean: float, variance: float) -> None:
    noise = draw_noise(kind, (100_000, 2), 1)
    assert noise.dtype == np.float32
    np.testing.assert_allclose((noise.mean(), noise.var()), (mean, variance), atol=0.02)


def test_what_a_policy_without_a_distribution_refuses(tmp_path: Path) -> None:
    async def test(served: ServedPolicy) -> None:
        with pytest.raises(InvalidRequestError, match="--outputs distribution") as refused:
            served.prepare(request(1, deterministic=False))
        assert refused.value.field == "deterministic"
        with pytest.raises(InvalidRequestError, match="seed=0") as refused:
            served.prepare(request(1, seed=0))
        assert refused.value.field == "seed"

    serve(manifest_of(tmp_path), lambda given: {"action": given["observation"]}, test)


def test_actions_are_within_the_bounds_whatever_the_graph_says(tmp_path: Path) -> None:
    async def test(served: ServedPolicy) -> None:
        done = await served.infer(request(-5000, 3, 5000))
        np.testing.assert_array_equal(done.outputs["action"][:, 0], [-1000, 3, 1000])

    serve(manifest_of(tmp_path), lambda given: {"action": given["observation"]}, test)


def test_open_bounds_stay_open(tmp_path: Path) -> None:
    action = {"shape": [3], "low": [None, -1, None], "high": [2, None, None], "kind": "continuous", "dtype": "float32"}
    bound = action_bound(manifest_of(tmp_path, changes={"action": action}))
    np.testing.assert_array_equal(bound(np.array([[-9, -9, -9], [9, 9, 9]], np.float32)), [[-9, -1, -9], [2, 9, 9]])


def test_an_action_of_another_shape_is_never_sent(tmp_path: Path) -> None:
    async def test(served: ServedPolicy) -> None:
        with pytest.raises(EngineFailedError, match=r"shape is \[2\], not \[3\]"):
            await served.infer(request(1))

    serve(manifest_of(tmp_path), lambda given: {"action": given["observation"][:, :2]}, test)


def test_a_choice_that_does_not_exist_fails_alone(tmp_path: Path) -> None:
    def function(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"action": given["observation"][:, 0].astype(np.int64), "logits": given["observation"]}

    async def test(served: ServedPolicy) -> None:
        done = await asyncio.gather(*(served.infer(request(i)) for i in (0, 2, 3, -1)), return_exceptions=True)
        for result in done[2:]:
            assert isinstance(result, EngineFailedError)
            assert "a choice from" in result.message
        for value, result in zip((0, 2), done[:2], strict=True):
            assert not isinstance(result, BaseException)
            assert result.outputs["action"].dtype == np.int64
            assert result.outputs["action"].tolist() == [value]

    serve(discrete(tmp_path), function, test)


def test_each_of_several_choices_has_its_own_number(tmp_path: Path) -> None:
    bound = action_bound(discrete(tmp_path, shape=(2,), num_choices=(2, 5)))
    np.testing.assert_array_equal(bound(np.array([[1, 4]])), [[1, 4]])
    with pytest.raises(ValueError, match="a choice from 2 to 4"):
        bound(np.array([[2, 4]]))


def test_a_choice_among_nan_is_not_an_action(tmp_path: Path) -> None:
    def function(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        logits = np.where(given["observation"] > 1e38, np.float32("nan"), given["observation"])
        return {"action": logits.argmax(axis=1), "logits": logits}

    async def test(served: ServedPolicy) -> None:
        with pytest.raises(NonFiniteActionError):
            await served.infer(request(2e38))
        assert (await served.infer(request(1))).outputs["action"].tolist() == [0]

    serve(discrete(tmp_path), function, test)
