"""The live versions of one worker process, and how one becomes the next under load.

Loading, checking and warming happen in a thread; the swap is one assignment on the event loop. A request that found the
old version before still gets its answer from it: a version that is taken out of service drains before it is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from policy_server.deployment import Desired, PolicyDesire, candidates
from policy_server.errors import NotReadyError, PolicyNotFoundError, PolicyServerError
from policy_server.live import LivePolicy, PolicyStatus
from policy_server.loading import VersionLoader
from policy_server.metrics import Metrics
from policy_server.served import ServedPolicy
from policy_server.settings import ServerSettings

logger = logging.getLogger(__name__)


class LivePolicies:
    """What answers for each policy, and what is known of those that do not. Used on one event loop.

    Args:
        settings: The server's.
        metrics: Hears of every batch.

    Attributes:
        desired: What was asked for when they were last brought in line.
        started: Whether the first load is over.
    """

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        self.desired = Desired()
        self.started = False
        self._watches = settings.watch
        self._loader = VersionLoader(settings, metrics)
        self._live: dict[str, LivePolicy] = {}
        self._versions: dict[str, list[int]] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    def find(self, name: str, version: int | None = None, session_id: str | None = None) -> ServedPolicy:
        """See ``PolicyHost.find``."""
        live = self._live.get(name)
        if live is None:
            raise self._not_live(name)
        return live.choose(name, version, session_id)

    def _not_live(self, name: str) -> PolicyServerError:
        if not self.started:
            return NotReadyError("the policies are still being loaded", retry_after_s=1)
        if name in self._versions:
            failed = self.status(name).state == "failed"
            reason = "none of its versions could be loaded" if failed else "it is unloaded"
            return PolicyNotFoundError(f"{name} is not live: {reason}", field="policy")
        known = ", ".join(sorted(self._live)[:20]) or "there is none yet"
        return PolicyNotFoundError(f"there is no policy {name[:60]!r}; there are: {known}", field="policy")

    def names(self) -> list[str]:
        """Every policy that is live or in the repository."""
        return sorted({*self._versions, *self._live})

    def status(self, name: str) -> PolicyStatus:
        """See ``PolicyHost.status``."""
        if name not in self._versions and name not in self._live:
            raise self._not_live(name)
        live, desire = self._live.get(name), self.desired.of(name)
        failures = self._loader.failures_of(name)
        failed = failures and not desire.unloaded
        return PolicyStatus(
            name=name,
            state="live" if live is not None else "failed" if failed else "unloaded",
            live=live.stable if live is not None else None,
            canary=live.canary if live is not None else None,
            canary_share=live.share if live is not None else 0.0,
            versions=self._versions.get(name, []),
            withdrawn=sorted(desire.withdrawn),
            failures=failures,
        )

    def live_versions(self) -> dict[str, list[int]]:
        """By policy: the stable version, then the canary if there is one."""
        return {name: [served.version for served in live.versions()] for name, live in self._live.items()}

    def failures(self) -> dict[str, str]:
        """Why versions are not live, by ``NAME/VERSION``."""
        return self._loader.failures()

    async def bring_in_line(self, found: Mapping[str, Mapping[int, Path]], desired: Desired) -> None:
        """Makes live what shall be. One call at a time.

        A policy that was asked for is tried again even if nothing about its files has changed; without watching, only
        what was asked for changes.

        Args:
            found: The versions in the repository.
            desired: What was asked for.
        """
        before, self.desired = self.desired, desired
        asked = {name for name in {*found, *self._live} if desired.of(name).asked != before.of(name).asked}
        self._versions = {name: list(folders) for name, folders in found.items()}
        self._loader.forget_failures(lambda name, version: name in asked or version not in found.get(name, {}))
        for name in sorted({*found, *self._live}):
            if name in asked or self._watches or not self.started:
                await self._bring_policy_in_line(name, found.get(name, {}), desired.of(name))

    async def close(self) -> None:
        """Lets what was begun finish, and closes the engines."""
        live, self._live = list(self._live.values()), {}
        await asyncio.gather(*(_retire(served) for policy in live for served in policy.versions()))
        await asyncio.gather(*self._retiring, return_exceptions=True)

    async def _bring_policy_in_line(self, name: str, folders: Mapping[int, Path], desire: PolicyDesire) -> None:
        live = self._live.get(name)
        at_hand = {served.version: served for served in live.versions()} if live is not None else {}
        stable: ServedPolicy | None = None
        for version in candidates(folders, desire):
            stable = await self._loader.obtain(folders[version], at_hand, quiet=not self.started)
            if stable is not None:
                break
        if stable is None and live is not None and live.stable.version in folders and not desire.unloaded:
            stable = live.stable  # nothing else loads: rather this one than none
        canary: ServedPolicy | None = None
        if desire.canary is not None and stable is not None and desire.canary.version in folders:
            canary = await self._loader.obtain(folders[desire.canary.version], at_hand, quiet=not self.started)
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
                task = asyncio.create_task(_retire(served))
                self._retiring.add(task)
                task.add_done_callback(self._retiring.discard)
        if stable is not None and (old is None or old.stable is not stable):
            logger.info("%s: version %d is live", name, stable.version)
        elif stable is None and old is not None:
            logger.info("%s: not live any more", name)


async def _retire(served: ServedPolicy) -> None:
    await asyncio.sleep(0)  # a request that has just found it hands it its rows in the same turn of the loop
    await served.batcher.drain()
    await served.close()
