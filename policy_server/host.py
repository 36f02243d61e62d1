"""The policies of one worker process: which shall be live, watched and asked for, in step with the other workers."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import watchfiles

from policy_server.deployment import Canary, Desired, PolicyDesire
from policy_server.errors import LoadFailedError, PolicyNotFoundError, StartError
from policy_server.live import PolicyStatus
from policy_server.live_policies import LivePolicies
from policy_server.metrics import Metrics
from policy_server.repository_scan import LoadError, scan
from policy_server.runtime import RuntimeFolder, WorkerStatus
from policy_server.served import ServedPolicy
from policy_server.settings import ServerSettings

logger = logging.getLogger(__name__)

_DEBOUNCE_MS = 50
_awatch = cast("Any", watchfiles).awatch
_RESCAN_MS = 5_000  # file systems without notifications are looked at this often
_POLL_S = 0.02
_FOLD_S = 0.2


class PolicyHost:
    """Keeps the live policies as the repository and the requests for changes say.

    Args:
        settings: The server's.
        metrics: Hears of every batch.
        runtime: What the workers of the server share; one of its own if None.
        slot: Which worker this is.
    """

    def __init__(
        self, settings: ServerSettings, metrics: Metrics, *, runtime: RuntimeFolder | None = None, slot: int = 0
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self._own_runtime: tempfile.TemporaryDirectory[str] | None = None
        if runtime is None:
            self._own_runtime = tempfile.TemporaryDirectory(prefix="policy-server-")
            runtime = RuntimeFolder(Path(self._own_runtime.name))
        self._runtime = runtime
        self._slot = slot
        self._policies = LivePolicies(settings, metrics)
        self._reconciling = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    # What requests need.

    def find(self, name: str, version: int | None = None, session_id: str | None = None) -> ServedPolicy:
        """The live policy that shall answer.

        Args:
            name: The policy.
            version: A certain version; if None, the stable one, or its canary for sessions in its share.
            session_id: Whose request it is.

        Raises:
            PolicyNotFoundError: No such policy, or this version is not live.
            NotReadyError: The server is still loading.
        """
        return self._policies.find(name, version, session_id)

    @property
    def ready(self) -> bool:
        """Whether the first load is over and the server is not stopping."""
        return self._policies.started and not self._stopping.is_set()

    def policies(self) -> list[PolicyStatus]:
        """Every policy of the repository, by name."""
        return [self._policies.status(name) for name in self._policies.names()]

    def status(self, name: str) -> PolicyStatus:
        """One policy of the repository.

        Raises:
            PolicyNotFoundError: It is not in the repository.
            NotReadyError: The server is still loading.
        """
        return self._policies.status(name)

    # What changes it.

    async def start(self, *, replaces_another: bool = False) -> None:
        """Loads what there is and begins to watch.

        Args:
            replaces_another: The server runs, and a worker of it has ended. What cannot be loaded then is no reason
                not to start: connections wait for this worker, and the others still answer with what they have.

        Raises:
            StartError: The repository is not there, or none of its policies can be served.
        """
        folder = self.settings.repository
        if not replaces_another and not folder.is_dir():
            raise StartError(
                f"repository={str(folder)!r}: no such folder; name one that holds NAME/VERSION/", exit_code=2
            )
        # Whoever asks for a change waits for the workers that have reported. What was asked for before this one did,
        # it has to notice itself.
        while await self._reconcile() and self._policies.desired.generation != self._runtime.desired().generation:
            pass
        failures, live = self._policies.failures(), self._policies.live_versions()
        if failures and not live and not replaces_another:
            raise StartError("no policy can be served:\n" + "\n".join(failures.values()), exit_code=1)
        for text in failures.values():
            logger.warning("not served: %s", text)
        if not live:
            logger.warning("%s: holds no policy (NAME/VERSION/policy.json); waiting for one", folder)
        self._policies.started = True
        self._report()
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._fold())]

    async def stop(self) -> None:
        """Stops watching, lets what was begun finish, and closes the engines."""
        self._stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._policies.close()
        self.metrics.fold()
        if self._own_runtime is not None:
            self._own_runtime.cleanup()

    async def load(self, name: str, version: int | None = None) -> None:
        """Makes a policy live in every worker: its highest version, or this one.

        Raises:
            PolicyNotFoundError: It is not in the repository.
            LoadFailedError: It does not pass its checks in some worker; nothing was changed.
        """
        there = await self._scan_versions(name)
        if version is not None and version not in there:
            raise PolicyNotFoundError(f"{name} has no version {version}; it has {_listed(there)}", field="version")
        expected = version if version is not None else max(there)

        def change(desire: PolicyDesire) -> PolicyDesire:
            canary = desire.canary if desire.canary is not None and desire.canary.version != version else None
            canary = canary.model_copy(update={"stable": None}) if canary is not None else None
            withdrawn = tuple(other for other in desire.withdrawn if other != version)
            # The highest version is live by itself; pinned, it would keep the next one out.
            pinned = version if version != max(there) else None
            return PolicyDesire(pinned=pinned, withdrawn=withdrawn, canary=canary)

        await self._change(name, change, lambda status: status.failures.get(f"{name}/{expected}"))

    async def unload(self, name: str) -> None:
        """Takes a policy out of service in every worker; what was begun finishes.

        Raises:
            PolicyNotFoundError: It is not in the repository.
        """
        await self._scan_versions(name)
        await self._ask(lambda desired: desired.with_policy(name, PolicyDesire(unloaded=True)))

    async def rollback(self, name: str) -> int:
        """Withdraws the stable version, so that the one before goes live in every worker.

        Returns:
            The version that is live now.

        Raises:
            PolicyNotFoundError: It is not live, or has no version before.
            LoadFailedError: No version before passes its checks in some worker; nothing was changed.
        """
        current = self.find(name).version
        there = await self._scan_versions(name)
        desire = self._policies.desired.of(name)
        out = {*desire.withdrawn, *([desire.canary.version] if desire.canary is not None else [])}
        earlier = [version for version in there if version < current and version not in out]
        if not earlier:
            raise PolicyNotFoundError(f"{name} has no version before {current} to roll back to", field="version")

        def problem(status: WorkerStatus) -> str | None:
            if status.live.get(name, [current])[0] in earlier:
                return None
            found = [status.failures.get(f"{name}/{version}") for version in reversed(earlier)]
            reasons = "; ".join(text for text in found if text)
            return f"no version of {name} before {current} can be loaded: {reasons}"

        await self._change(name, lambda desire: desire.rolled_back(there, current), problem)
        return self.find(name).version

    async def set_canary(self, name: str, version: int | None, share: float = 0.0) -> None:
        """Gives a share of the sessions to a second version, in every worker; None ends it.

        Raises:
            PolicyNotFoundError: The policy is not live, or has no such version.
            LoadFailedError: The version does not pass its checks in some worker; nothing was changed.
        """
        stable = self.find(name)
        there = await self._scan_versions(name)
        if version is not None and version not in there:
            raise PolicyNotFoundError(f"{name} has no version {version}; it has {_listed(there)}", field="version")
        if version == stable.version:
            raise LoadFailedError(
                f"version {version} of {name} is the stable one; a canary is another version", field="version"
            )
        canary = Canary(version=version, share=share, stable=stable.version) if version is not None else None
        await self._change(
            name,
            lambda desire: desire.model_copy(update={"canary": canary}),
            lambda status: status.failures.get(f"{name}/{version}") if canary is not None else None,
        )

    async def _scan_versions(self, name: str) -> list[int]:
        try:
            found = await asyncio.to_thread(scan, self.settings.repository)
        except LoadError as error:
            raise LoadFailedError(str(error)) from error
        if name not in found:
            raise PolicyNotFoundError(f"there is no policy {name[:60]!r} in the repository", field="policy")
        return list(found[name])

    async def _change(
        self,
        name: str,
        change: Callable[[PolicyDesire], PolicyDesire],
        problem: Callable[[WorkerStatus], str | None],
    ) -> None:
        """Asks every worker for a change of one policy, and takes it back where one of them cannot carry it out.

        Args:
            name: The policy.
            change: From what is asked for now to what shall be.
            problem: Why a worker has not done it, by what it reports; None if it has.

        Raises:
            LoadFailedError: A worker could not; names it.
        """
        before = PolicyDesire()

        def apply(desired: Desired) -> Desired:
            nonlocal before
            before = desired.of(name)
            return desired.with_policy(name, change(before))

        asked = (await self._ask(apply)).of(name)
        found = [(status.slot, problem(status)) for status in self._runtime.statuses()]
        problems = {text: slot for slot, text in reversed(found) if text is not None}
        if not problems:
            return

        def take_back(desired: Desired) -> Desired:  # unless somebody has asked for something else since
            return desired.with_policy(name, before) if desired.of(name) == asked else desired

        await self._ask(take_back)
        texts = [text if slot == self._slot else f"worker {slot}: {text}" for text, slot in problems.items()]
        raise LoadFailedError("; ".join(texts), field="version")

    async def _ask(self, change: Callable[[Desired], Desired]) -> Desired:
        """Asks every worker for a change, and waits until all that are alive have carried it out."""
        desired = await asyncio.to_thread(self._runtime.change, change)
        await self._reconcile()
        limit_s = self.settings.load_timeout_s + 1
        deadline = time.monotonic() + limit_s
        while behind := [status for status in self._runtime.statuses() if status.generation < desired.generation]:
            if time.monotonic() > deadline:
                slots = _listed([status.slot for status in behind])
                raise LoadFailedError(f"worker {slots} has not carried it out within {limit_s:g} s; ask again")
            await asyncio.sleep(_POLL_S)
        return desired

    # What keeps it true.

    async def _reconcile(self) -> bool:
        """Makes live what shall be: by the repository and by what was asked for; False if the former cannot be read."""
        async with self._reconciling:
            desired = await asyncio.to_thread(self._runtime.desired)
            try:
                found = await asyncio.to_thread(scan, self.settings.repository)
            except LoadError as error:
                logger.error("%s; what is live stays so", error)
                return False
            await self._policies.bring_in_line(found, desired)
            self._report()
            return True

    def _report(self) -> None:
        self._runtime.report(
            WorkerStatus(
                pid=os.getpid(),
                slot=self._slot,
                generation=self._policies.desired.generation,
                ready=self._policies.started,
                live=self._policies.live_versions(),
                failures=self._policies.failures(),
            )
        )

    async def _watch(self) -> None:
        async for _ in self._changes():
            try:
                await self._reconcile()
            except Exception:  # the next change is another chance
                logger.exception("the repository could not be looked through")

    async def _changes(self) -> AsyncIterator[None]:
        folders = [self._runtime.desired_folder]
        if self.settings.watch:
            folders.append(self.settings.repository)
        while not self._stopping.is_set():
            try:
                async for _ in _awatch(
                    *folders,
                    watch_filter=None,
                    debounce=_DEBOUNCE_MS * 4,
                    step=_DEBOUNCE_MS,
                    stop_event=self._stopping,
                    rust_timeout=_RESCAN_MS,
                    yield_on_timeout=True,
                ):
                    yield
            except (OSError, RuntimeError) as error:  # a folder that was removed and may come back
                logger.warning("watching %s: %s", self.settings.repository, error)
                await asyncio.sleep(_RESCAN_MS / 1e3)
                yield

    async def _fold(self) -> None:
        while True:
            await asyncio.sleep(_FOLD_S)
            self.metrics.fold()


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers) or "none"
