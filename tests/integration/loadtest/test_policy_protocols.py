"""The policy client against the real server, by every protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_policies import RunningPolicyServer, running_policy_server, write_policy

from loadtest.errors import DeadServerError, UsageError
from loadtest.policy_client import EncodedObservation, PolicyClient
from loadtest.settings import PolicySettings
from loadtest.targets import check_policy

PROTOCOLS = pytest.mark.parametrize("protocol", ["json", "binary", "websocket"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPolicyServer]:
    folder = tmp_path_factory.mktemp("policies")
    write_policy(folder / "repository")
    write_policy(folder / "repository", name="fields", fields={"goal": 2})
    write_policy(folder / "repository", name="drawn", distribution=True)
    with running_policy_server(folder / "repository", folder / "log") as running:
        yield running


def ask(settings: PolicySettings, observation: dict[str, Any], *, times: int = 1, timeout_s: float = 10) -> list[Any]:
    client = PolicyClient(settings, timeout_s=timeout_s)
    message = EncodedObservation(settings, observation)
    records = [client.send(message) for _ in range(times)]
    client.close()
    return records


@PROTOCOLS
@pytest.mark.parametrize("policy", ["tiny", "fields", "drawn"])
def test_every_protocol_is_answered(server: RunningPolicyServer, protocol: Any, policy: str) -> None:
    target = check_policy(PolicySettings(url=server.address, policy=policy, protocol=protocol))
    observation = {field.name: np.zeros((1, *field.shape), field.dtype) for field in target.fields}
    for record in ask(target.settings, observation, times=5):
        assert (record.error, record.status, record.rows) == (None, 200, 1), record.message
        assert record.latency_ms == pytest.approx(record.service_ms)
        assert record.received_bytes > 10


@pytest.mark.parametrize("protocol", ["json", "binary"])
def test_batches_are_rows(server: RunningPolicyServer, protocol: Any) -> None:
    settings = PolicySettings(url=server.address, policy="tiny", protocol=protocol, rows=7)
    (record,) = ask(settings, {"observation": np.ones((7, 3), np.float32)})
    assert (record.error, record.rows) == (None, 7), record.message


@PROTOCOLS
def test_drawn_actions_can_be_asked_for(server: RunningPolicyServer, protocol: Any) -> None:
    settings = PolicySettings(url=server.address, policy="drawn", protocol=protocol, deterministic=False)
    (record,) = ask(settings, {"observation": np.ones((1, 3), np.float32)})
    assert record.error is None, record.message


@pytest.mark.parametrize(
    ("protocol", "error"), [("json", "http_400"), ("binary", "http_400"), ("websocket", "invalid_request")]
)
def test_a_refusal_is_a_failure_with_the_servers_words(server: RunningPolicyServer, protocol: Any, error: str) -> None:
    settings = PolicySettings(url=server.address, policy="tiny", protocol=protocol)
    records = ask(settings, {"observation": np.ones((1, 4), np.float32)}, times=2)
    assert [record.error for record in records] == [error, error]
    assert "observation" in records[0].message
    assert records[0].latency_ms is None


@PROTOCOLS
def test_a_policy_that_is_not_there(server: RunningPolicyServer, protocol: Any) -> None:
    settings = PolicySettings(url=server.address, policy="nobody", protocol=protocol)
    (record,) = ask(settings, {"observation": np.ones((1, 3), np.float32)})
    assert record.error in ("http_404", "policy_not_found")
    with pytest.raises(UsageError, match="policy='nobody': not live there; there are: drawn, fields, tiny"):
        check_policy(settings)


@PROTOCOLS
def test_a_killed_server_is_a_failure_and_no_exception(tmp_path: Path, protocol: Any) -> None:
    write_policy(tmp_path / "repository")
    with running_policy_server(tmp_path / "repository", tmp_path / "log") as server:
        settings = PolicySettings(url=server.address, policy="tiny", protocol=protocol)
        client = PolicyClient(settings, timeout_s=10)
        message = EncodedObservation(settings, {"observation": np.ones((1, 3), np.float32)})
        assert client.send(message).error is None
        server.process.kill()
        server.process.wait()
        found: set[str | None] = set()
        while "connection" not in found:  # until its worker has noticed
            found.add(client.send(message).error)
        assert found <= {None, "cut_off", "connection"}


def test_keys(tmp_path: Path) -> None:
    write_policy(tmp_path / "repository")
    with running_policy_server(tmp_path / "repository", tmp_path / "log", "--api-key", "sesame") as server:
        with pytest.raises(DeadServerError, match="give it with --api-key"):
            check_policy(PolicySettings(url=server.address))
        for protocol in ("json", "binary", "websocket"):
            target = check_policy(PolicySettings(url=server.address, protocol=protocol, api_key="sesame"))
            (record,) = ask(target.settings, {"observation": np.ones((1, 3), np.float32)})
            assert record.error is None, (protocol, record.message)
