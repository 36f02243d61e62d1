"""Turns version folders into policies that serve, once for each state of their files, and remembers why some do not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from policy_server.manifest import Manifest
from policy_server.metrics import Metrics
from policy_server.repository import LoadedVersion, load_version
from policy_server.repository_scan import LoadError, fingerprint
from policy_server.served import ServedPolicy
from policy_server.settings import ServerSettings

logger = logging.getLogger(__name__)


class VersionLoader:
    """Loads versions in a thread; a folder that did not load is tried again when its files change.

    Args:
        settings: The server's.
        metrics: Hears of every batch.
    """

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._fingerprints: dict[tuple[str, int], object] = {}
        self._failed: dict[tuple[str, int], tuple[object, str]] = {}

    def failures(self) -> dict[str, str]:
        """Why versions do not load, by ``NAME/VERSION``."""
        return {f"{name}/{version}": text for (name, version), (_, text) in self._failed.items()}

    def failures_of(self, name: str) -> dict[int, str]:
        """Why versions of one policy do not load."""
        return {version: text for (policy, version), (_, text) in sorted(self._failed.items()) if policy == name}

    def forget_failures(self, which: Callable[[str, int], bool]) -> None:
        """Lets versions be tried again though nothing has changed; ``which`` chooses them by name and version."""
        self._failed = {key: failure for key, failure in self._failed.items() if not which(*key)}

    async def obtain(
        self, folder: Path, at_hand: Mapping[int, ServedPolicy], *, quiet: bool = False
    ) -> ServedPolicy | None:
        """A version that is live already, or loads; None, and why is remembered, if it does not.

        Args:
            folder: ``NAME/VERSION/``.
            at_hand: The policy's live versions.
            quiet: Do not warn of a version that does not load.
        """
        name, version = folder.parent.name, int(folder.name)
        key = (name, version)
        state = await asyncio.to_thread(fingerprint, folder)
        served = at_hand.get(version)
        if served is not None and self._fingerprints.get(key) == state:
            return served
        failed = self._failed.get(key)
        if failed is not None and failed[0] == state:
            return served
        try:
            loaded = await asyncio.to_thread(load_version, folder, self._settings)
            fresh = self._serve(folder, loaded, at_hand)
        except LoadError as error:
            self._failed[key] = (state, str(error))
            log = logger.info if served is None and quiet else logger.warning
            log("%s %s is not made live: %s", name, version, error)
            return served
        except Exception as error:  # one policy's fault must not keep the others from theirs
            text = f"{folder}: cannot be loaded ({type(error).__name__}: {error}); ask for it again"
            self._failed[key] = (state, text)
            logger.exception("%s %s is not made live", name, version)
            return served
        self._failed.pop(key, None)
        self._fingerprints[key] = state
        logger.info(
            "%s %s loaded in %.2f s; a batch of %d takes %.2f ms",
            name, version, loaded.load_s, loaded.batching.max_batch, loaded.batch_s * 1e3,
        )  # fmt: skip
        return fresh

    def _serve(self, folder: Path, loaded: LoadedVersion, at_hand: Mapping[int, ServedPolicy]) -> ServedPolicy:
        manifest = loaded.manifest
        other = next(iter(at_hand.values()), None)
        try:
            if other is not None and not are_exchangeable(manifest, other.manifest):
                raise LoadError(
                    f"{folder}: takes or gives something else than version {other.version}, which is live; clients "
                    "could not tell; export it under another name, or unload the policy first"
                )
            return ServedPolicy(
                manifest=manifest,
                engine=loaded.engine,
                batching=loaded.batching,
                engine_name=loaded.engine_settings.engine,
                observe=self._metrics.meters(manifest.name, manifest.version).observe_batch,
                max_rows=self._settings.max_rows,
                run_inline_below_s=loaded.engine_settings.run_inline_below_ms / 1e3,
                batch_s=loaded.batch_s,
            )
        except BaseException:
            loaded.engine.close()
            raise


def are_exchangeable(one: Manifest, other: Manifest) -> bool:
    """Whether clients of one version can be answered by the other: same observation and same action."""
    return [(field.name, field.shape, field.dtype) for field in one.observation] == [
        (field.name, field.shape, field.dtype) for field in other.observation
    ] and (one.action.kind, one.action.shape) == (other.action.kind, other.action.shape)
