"""Waiting for processes to be gone, for tests."""

from __future__ import annotations

import psutil


def assert_all_end(processes: list[psutil.Process]) -> None:
    """Fails if one of them still runs after half a minute; one that only waits to be reaped has ended."""
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
