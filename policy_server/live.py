"""What is live of one policy, and what people are told of it."""

from __future__ import annotations

from dataclasses import dataclass

from policy_server.deployment import is_canary_session
from policy_server.errors import PolicyNotFoundError
from policy_server.served import ServedPolicy


@dataclass(frozen=True)
class LivePolicy:
    """What answers for one policy."""

    stable: ServedPolicy
    canary: ServedPolicy | None = None
    share: float = 0.0

    def versions(self) -> list[ServedPolicy]:
        """The stable version, then the canary if there is one."""
        return [self.stable, *([self.canary] if self.canary is not None else [])]

    def choose(self, name: str, version: int | None, session_id: str | None) -> ServedPolicy:
        """The version that shall answer a request.

        Raises:
            PolicyNotFoundError: A version was asked for that is not live.
        """
        if version is not None:
            for served in self.versions():
                if served.version == version:
                    return served
            shown = " and ".join(str(served.version) for served in self.versions())
            raise PolicyNotFoundError(f"version {version} of {name} is not live; {shown} is", field="version")
        if self.canary is not None and session_id is not None and is_canary_session(name, session_id, self.share):
            return self.canary
        return self.stable


@dataclass(frozen=True)
class PolicyStatus:
    """One policy of the repository, for people.

    Attributes:
        name: Its name.
        state: ``live``, ``unloaded`` or ``failed``.
        live: The stable version, if it is live.
        canary: The second version, if there is one.
        canary_share: Its share of the sessions.
        versions: All versions in the repository.
        withdrawn: Versions that were rolled back.
        failures: Why a version is not live.
    """

    name: str
    state: str
    live: ServedPolicy | None
    canary: ServedPolicy | None
    canary_share: float
    versions: list[int]
    withdrawn: list[int]
    failures: dict[int, str]
