"""The policies of one worker process: which are live, and how versions come and go under load.

Loading, checking and warming happen in a thread; the swap is one assignment on the event loop. A request that found the
old version before still gets its answer from it: a version that is taken out of service drains before it is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import watchfiles

from policy_server.deployment import Canary, Desired, PolicyDesire, candidates
from policy_server.errors import LoadFailedError, NotReadyError, PolicyNotFoundError, PolicyServerError, StartError
from policy_server.live import LivePolicy, PolicyStatus
from policy_server.loading import VersionLoader
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
        self._live: dict[str, LivePolicy] = {}
        self._loader = VersionLoader(settings, metrics)
        self._versions: dict[str, list[int]] = {}
        self._desired = Desired()
        self._reconciling = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._started = False

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
        live = self._live.get(name)
        if live is None:
            raise self._not_live(name)
        return live.choose(name, version, session_id)

    def _not_live(self, name: str) -> PolicyServerError:
        if not self._started:
            return NotReadyError("the policies are still being loaded", retry_after_s=1)
        if name in self._versions:
            reason = "it is unloaded" if self._desired.of(name).unloaded else "none of its versions could be loaded"
            return PolicyNotFoundError(f"{name} is not live: {reason}", field="policy")
        known = ", ".join(sorted(self._live)[:20]) or "there is none yet"
        return PolicyNotFoundError(f"there is no policy {name[:60]!r}; there are: {known}", field="policy")

    @property
    def ready(self) -> bool:
        """Whether the first load is over and the server is not stopping."""
        return self._started and not self._stopping.is_set()

    def policies(self) -> list[PolicyStatus]:
        """Every policy of the repository, by name."""
        return [self.status(name) for name in sorted({*self._versions, *self._live})]

    def status(self, name: str) -> PolicyStatus:
        """One policy of the repository.

        Raises:
            PolicyNotFoundError: It is not in the repository.
            NotReadyError: The server is still loading.
        """
        if name not in self._versions and name not in self._live:
            raise self._not_live(name)
        live, desire = self._live.get(name), self._desired.of(name)
        return PolicyStatus(
            name=name,
            state="live" if live is not None else "unloaded" if desire.unloaded else "failed",
            live=live.stable if live is not None else None,
            canary=live.canary if live is not None else None,
            canary_share=live.share if live is not None else 0.0,
            versions=self._versions.get(name, []),
            withdrawn=sorted(desire.withdrawn),
            failures=self._loader.failures_of(name),
        )

    # What changes it.

    async def start(self) -> None:
        """Loads what there is and begins to watch.

        Raises:
            StartError: The repository is not there, or none of its policies can be served.
        """
        folder = self.settings.repository
        if not folder.is_dir():
            raise StartError(
                f"repository={str(folder)!r}: no such folder; name one that holds NAME/VERSION/", exit_code=2
            )
        await self._reconcile()
        failures = self._loader.failures()
        if failures and not self._live:
            raise StartError("no policy can be served:\n" + "\n".join(failures.values()), exit_code=1)
        if not self._live:
            logger.warning("%s: holds no policy (NAME/VERSION/policy.json); waiting for one", folder)
        self._started = True
        self._report()
        self._spawn(self._watch())
        self._spawn(self._fold())

    async def stop(self) -> None:
        """Stops watching, lets what was begun finish, and closes the engines."""
        self._stopping.set()
        for task in list(self._tasks):
            if task.get_name() in ("watch", "fold"):
                task.cancel()
        live, self._live = list(self._live.values()), {}
        await asyncio.gather(*(self._retire(served) for policy in live for served in policy.versions()))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.metrics.fold()
        if self._own_runtime is not None:
            self._own_runtime.cleanup()

    async def load(self, name: str, version: int | None = None) -> None:
        """Makes a policy live in every worker: its highest version, or this one.

        Raises:
            PolicyNotFoundError: It is not in the repository.
            LoadFailedError: It does not pass its checks in some worker; what was live there still is.
        """
        there = await asyncio.to_thread(self._scan_versions, name)
        if version is not None and version not in there:
            raise PolicyNotFoundError(f"{name} has no version {version}; it has {_listed(there)}", field="version")

        def change(desired: Desired) -> Desired:
            desire = desired.of(name)
            canary = desire.canary if desire.canary is not None and desire.canary.version != version else None
            withdrawn = tuple(other for other in desire.withdrawn if other != version)
            # The highest version is live by itself; pinned, it would keep the next one out.
            pinned = version if version != max(there) else None
            return desired.with_policy(name, PolicyDesire(pinned=pinned, withdrawn=withdrawn, canary=canary))

        self._loader.forget_failures(lambda policy, _: policy == name)  # asked for again: try again
        generation = await self._ask(change)
        expected = version if version is not None else max(there, default=None)
        live = self._live.get(name)
        failure = self._loader.failures_of(name).get(expected or 0)
        if failure is not None and (live is None or live.stable.version != expected):
            raise LoadFailedError(failure, field="version")
        self._raise_failures(generation, name, expected)

    async def unload(self, name: str) -> None:
        """Takes a policy out of service in every worker; what was begun finishes.

        Raises:
            PolicyNotFoundError: It is not in the repository.
        """
        await asyncio.to_thread(self._scan_versions, name)
        await self._ask(lambda desired: desired.with_policy(name, PolicyDesire(unloaded=True)))

    async def rollback(self, name: str) -> int:
        """Withdraws the stable version, so that the one before goes live in every worker.

        Returns:
            The version that is live now.

        Raises:
            PolicyNotFoundError: It is not live, or has no version before.
            LoadFailedError: No version before passes its checks; nothing was changed.
        """
        current = self.find(name).version
        there = await asyncio.to_thread(self._scan_versions, name)
        before = self._desired
        desire = before.of(name)
        earlier = [version for version in there if version < current and version not in desire.withdrawn]
        if not earlier:
            raise PolicyNotFoundError(f"{name} has no version before {current} to roll back to", field="version")
        withdrawn = tuple(sorted({*desire.withdrawn, *(version for version in there if version >= current)}))
        rolled = desire.model_copy(update={"pinned": None, "withdrawn": withdrawn, "unloaded": False})
        await self._ask(lambda desired: desired.with_policy(name, rolled))
        now = self.find(name).version
        if now == current:
            failures = self.status(name).failures
            await self._ask(lambda desired: desired.with_policy(name, desire))
            reasons = "; ".join(failures[version] for version in earlier if version in failures)
            raise LoadFailedError(f"no version of {name} before {current} can be loaded: {reasons}", field="version")
        return now

    async def set_canary(self, name: str, version: int | None, share: float = 0.0) -> None:
        """Gives a share of the sessions to a second version, in every worker; None ends it.

        Raises:
            PolicyNotFoundError: The policy is not live, or has no such version.
            LoadFailedError: The version does not pass its checks.
        """
        stable = self.find(name)
        there = await asyncio.to_thread(self._scan_versions, name)
        if version is not None and version not in there:
            raise PolicyNotFoundError(f"{name} has no version {version}; it has {_listed(there)}", field="version")
        if version == stable.version:
            raise LoadFailedError(
                f"version {version} of {name} is the stable one; a canary is another version", field="version"
            )
        canary = Canary(version=version, share=share) if version is not None else None

        def change(desired: Desired) -> Desired:
            # The stable version is pinned meanwhile, so that the trial compares two versions and not three.
            update = {"canary": canary, "pinned": stable.version if canary is not None else None}
            return desired.with_policy(name, desired.of(name).model_copy(update=update))

        before = self._desired.of(name)
        self._loader.forget_failures(lambda policy, number: (policy, number) == (name, version))
        await self._ask(change)
        failure = self._loader.failures_of(name).get(version or 0)
        if failure is not None:
            await self._ask(lambda desired: desired.with_policy(name, before))
            raise LoadFailedError(failure, field="version")

    def _scan_versions(self, name: str) -> list[int]:
        versions = scan(self.settings.repository).get(name)
        if versions is None:
            raise PolicyNotFoundError(f"there is no policy {name[:60]!r} in the repository", field="policy")
        return list(versions)

    async def _ask(self, change: Callable[[Desired], Desired]) -> int:
        """Asks every worker for a change, and waits until all that are alive have carried it out."""
        desired = await asyncio.to_thread(self._runtime.change, change)
        await self._reconcile()
        deadline = time.monotonic() + self.settings.load_timeout_s + 1
        while time.monotonic() < deadline:
            behind = [status for status in self._runtime.statuses() if status.generation < desired.generation]
            if not behind:
                return desired.generation
            await asyncio.sleep(_POLL_S)
        raise LoadFailedError(
            f"not every worker process has carried it out within {self.settings.load_timeout_s:g} s; ask again"
        )

    def _raise_failures(self, generation: int, name: str, expected: int | None) -> None:
        for status in self._runtime.statuses():
            text = status.failures.get(f"{name}/{expected}")
            if status.generation >= generation and text is not None and expected not in status.live.get(name, []):
                raise LoadFailedError(f"worker {status.slot}: {text}", field="version")

    # What keeps it true.

    async def _reconcile(self) -> None:
        """Makes live what shall be: by the repository and by what was asked for."""
        async with self._reconciling:
            desired = await asyncio.to_thread(self._runtime.desired)
            try:
                found = await asyncio.to_thread(scan, self.settings.repository)
            except LoadError as error:
                logger.error("%s; what is live stays so", error)
                return
            self._desired = desired
            self._versions = {name: list(folders) for name, folders in found.items()}
            self._loader.forget_failures(lambda policy, number: number not in found.get(policy, {}))
            for name in sorted({*found, *self._live}):
                await self._reconcile_policy(name, found.get(name, {}), desired.of(name))
            self._report()

    async def _reconcile_policy(self, name: str, folders: dict[int, Path], desire: PolicyDesire) -> None:
        live = self._live.get(name)
        at_hand = {served.version: served for served in live.versions()} if live is not None else {}
        floor = live.stable.version if live is not None else 0
        stable: ServedPolicy | None = None
        for version in candidates(folders, desire):
            stable = await self._loader.obtain(folders[version], at_hand, quiet=not self._started)
            if stable is not None:
                break
        if stable is None and live is not None and floor in folders and not desire.unloaded:
            stable = live.stable  # nothing else loads: rather this one than none
        canary: ServedPolicy | None = None
        if desire.canary is not None and stable is not None and desire.canary.version in folders:
            canary = await self._loader.obtain(folders[desire.canary.version], at_hand, quiet=not self._started)
            if canary is not None and canary.version == stable.version:
                canary = None
        self._swap(name, stable, canary, desire.canary.share if desire.canary is not None else 0.0)

    def _swap(self, name: str, stable: ServedPolicy | None, canary: ServedPolicy | None, share: float) -> None:
        """From here on requests find these; the others finish what they have and end."""
        old = self._live.get(name)
        if stable is None:
            self._live.pop(name, None)
        else:
            self._live[name] = LivePolicy(stable, canary, share)
        kept = {id(served) for served in (stable, canary) if served is not None}
        for served in old.versions() if old is not None else []:
            if id(served) not in kept:
                self._spawn(self._retire(served))
        if old is None or stable is None or old.stable is not stable:
            logger.info(
                "%s: %s", name, f"version {stable.version} is live" if stable is not None else "not live any more"
            )

    async def _retire(self, served: ServedPolicy) -> None:
        await asyncio.sleep(0)  # a request that has just found it hands it its rows in the same turn of the loop
        await served.batcher.drain()
        await served.close()

    def _report(self) -> None:
        self._runtime.report(
            WorkerStatus(
                pid=os.getpid(),
                slot=self._slot,
                generation=self._desired.generation,
                ready=self._started,
                live={name: [served.version for served in live.versions()] for name, live in self._live.items()},
                failures=self._loader.failures(),
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

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=work.__name__.strip("_"))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _listed(versions: list[int]) -> str:
    return ", ".join(str(version) for version in versions) or "none"
