from __future__ import annotations

import importlib.metadata
import socket

import pytest

from gated_serving.llm.serving import machine
from gated_serving.llm.serving.errors import MachineError, UsageError
from gated_serving.llm.serving.machine import available_memory_bytes, claim_port, find_vllm, num_physical_cores
from gated_serving.llm.serving.supervisor import Endpoint


def test_a_free_port_can_be_opened_at_once() -> None:
    port = claim_port("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", port)) as listener:
        assert listener.getsockname()[1] == port == claim_port("127.0.0.2", port)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(MachineError, match=f"port {port} on 127.0.0.1 is in use"):
            claim_port("127.0.0.1", port)


def test_a_port_for_root_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(MachineError, match="port 80: only root"):
        claim_port("127.0.0.1", 80)


def test_an_address_that_is_not_this_machines() -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.77"):
        claim_port("192.0.2.77", 0)


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".org"])
def test_a_host_that_can_be_no_name(host: str) -> None:
    with pytest.raises(UsageError, match=f"--host {host}: not a known address"):
        claim_port(host, 0)


def test_this_machine_has_cores_memory_and_vllm() -> None:
    assert num_physical_cores() >= 1
    memory = available_memory_bytes()
    assert memory is not None
    assert memory > 0
    assert find_vllm().version[0].isdigit()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("box", "http://box:80"),
    ],
)
def test_clients_address(host: str, url: str) -> None:
    assert Endpoint(host=host, port=80).url == url


def test_nothing_listens_means_not_healthy() -> None:
    assert not Endpoint(host="127.0.0.1", port=claim_port("127.0.0.1", 0)).is_healthy()
    assert not Endpoint(host="", port=0, unix_socket="/no/such/socket").is_healthy()


def test_a_gpu_build_without_a_gpu_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.33.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(machine, "_ACCELERATORS", ("/dev/null",))
    build = find_vllm()
    assert (build.version, build.is_cpu) == ("0.33.0", False)
    monkeypatch.setattr(machine, "_ACCELERATORS", ("/dev/no-such-device",))
    with pytest.raises(MachineError, match=r"gated-serving\[cpu\]"):
        find_vllm()
