"""The folder through which the workers of one server agree: what was asked for, and what each of them has done.

::

    desired/desired.json     see ``deployment.Desired``; changed under a lock, replaced whole
    workers/<slot>.json      what the worker in this slot has live
    metrics/                 counters, see ``metrics``
    settings.json            the server's settings, for the workers
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from policy_server.deployment import Desired


class WorkerStatus(BaseModel):
    """What a worker says of itself."""

    pid: int
    slot: int
    generation: int
    """The newest request for a change that it has carried out."""
    ready: bool
    live: dict[str, list[int]] = Field(default_factory=dict[str, list[int]])
    """Live versions by policy: the stable one, then the canary if there is one."""
    failures: dict[str, str] = Field(default_factory=dict[str, str])
    """Why a version is not live, by ``NAME/VERSION``."""


class RuntimeFolder:
    """See above. Made by the supervisor, used by it and every worker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.desired_folder = path / "desired"
        self.metrics_folder = path / "metrics"
        self._workers = path / "workers"
        for folder in (self.desired_folder, self.metrics_folder, self._workers):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def settings_file(self) -> Path:
        """Where the workers find their settings."""
        return self.path / "settings.json"

    def desired(self) -> Desired:
        """What was asked for last."""
        try:
            return Desired.model_validate_json((self.desired_folder / "desired.json").read_bytes())
        except FileNotFoundError:
            return Desired()

    def change(self, change: Callable[[Desired], Desired]) -> Desired:
        """Asks for something else; one after the other, whichever workers do it.

        Args:
            change: From what is asked for now to what shall be.

        Returns:
            What is asked for now.
        """
        with (self.desired_folder.parent / "desired.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            desired = change(self.desired())
            write_atomically(self.desired_folder / "desired.json", desired.model_dump_json())
            return desired

    def report(self, status: WorkerStatus) -> None:
        """A worker tells what it has live."""
        write_atomically(self._workers / f"{status.slot}.json", status.model_dump_json())

    def forget(self, slot: int) -> None:
        """A worker is gone; what it told does not hold any more."""
        (self._workers / f"{slot}.json").unlink(missing_ok=True)

    def knows(self, slot: int) -> bool:
        """Whether the worker of this slot has told anything since it was last forgotten."""
        return (self._workers / f"{slot}.json").exists()

    def statuses(self) -> list[WorkerStatus]:
        """What the workers that are alive have told."""
        found: list[WorkerStatus] = []
        for path in sorted(self._workers.glob("*.json")):
            try:
                status = WorkerStatus.model_validate_json(path.read_bytes())
            except (FileNotFoundError, ValidationError):
                continue
            if is_alive(status.pid):
                found.append(status)
        return found


def is_alive(pid: int) -> bool:
    """Whether a process of this number runs; one that has ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (ProcessLookupError, PermissionError):
        return False
    except OSError:  # no /proc here
        return True
    return state != "Z"


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file whole; a reader sees the old or the new one."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
