"""Which versions of a policy shall be live: what was asked for, and how it is decided. Pure functions and data.

By default the highest version that loads is live. A rollback withdraws it, so that the one before goes live and a newer
one still does when it appears. A canary is a second live version that gets a share of the sessions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_HASH_RANGE = float(1 << 64)


class Canary(BaseModel):
    """A second version, and which share of the sessions it answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Annotated[int, Field(ge=1)]
    share: Annotated[float, Field(ge=0, le=1)]
    stable: int | None = None
    """The version it is compared with: no newer one takes its place meanwhile."""


class PolicyDesire(BaseModel):
    """What was asked for about one policy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    unloaded: bool = False
    pinned: int | None = None
    """The version that a load named; the highest if none."""
    withdrawn: tuple[int, ...] = ()
    """Versions that were rolled back; they go live only when a load names them."""
    canary: Canary | None = None
    asked: int = 0
    """The generation of the last request about this policy, even of one that changed nothing else."""

    def rolled_back(self, there: Iterable[int], current: int) -> PolicyDesire:
        """Without the version that is live now and those above it.

        Args:
            there: Every version in the repository.
            current: The stable version now.
        """
        withdrawn = tuple(sorted({*self.withdrawn, *(version for version in there if version >= current)}))
        canary = self.canary.model_copy(update={"stable": None}) if self.canary is not None else None
        return self.model_copy(
            update={"pinned": None, "withdrawn": withdrawn, "unloaded": False, "canary": canary},
        )


class Desired(BaseModel):
    """What was asked for about all policies; the generation rises with every change."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    generation: int = 0
    policies: dict[str, PolicyDesire] = Field(default_factory=dict[str, PolicyDesire])

    def of(self, name: str) -> PolicyDesire:
        """What was asked for about this policy."""
        return self.policies.get(name, PolicyDesire())

    def with_policy(self, name: str, desire: PolicyDesire) -> Desired:
        """The next generation, with this changed."""
        generation = self.generation + 1
        asked = desire.model_copy(update={"asked": generation})
        return Desired(generation=generation, policies={**self.policies, name: asked})


def candidates(versions: Iterable[int], desire: PolicyDesire) -> list[int]:
    """The versions that may be the stable one, best first."""
    if desire.unloaded:
        return []
    there = sorted(versions, reverse=True)
    canary = desire.canary.version if desire.canary is not None else None
    compared = desire.canary.stable if desire.canary is not None else None
    for named in (compared, desire.pinned):
        if named is not None and named in there:
            return [named]
    # A canary is on trial: it does not become the stable version by being the highest.
    return [version for version in there if version not in desire.withdrawn and version != canary]


def is_canary_session(policy: str, session_id: str, share: float) -> bool:
    """Whether a session is answered by the canary; the same session always is, or always is not.

    A session that is in a share is in every larger one too, so raising it moves nobody back.
    """
    digest = hashlib.blake2b(f"{policy}\0{session_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / _HASH_RANGE < share
