"""``/v1/policies``: what is served, and changes of it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from policy_server.live import PolicyStatus
from policy_server.manifest import Manifest
from policy_server.routes.answers import ERRORS, PolicyName, host_of
from policy_server.served import ServedPolicy

router = APIRouter(tags=["policies"])


class CanaryDescription(BaseModel):
    """A second version on trial."""

    version: int
    share: Annotated[float, Field(description="Of the sessions.")]


class PolicyDescription(BaseModel):
    """A policy of the repository."""

    name: str
    state: Annotated[str, Field(description="live, unloaded or failed", examples=["live"])]
    version: Annotated[int | None, Field(description="The stable version, if it is live.")]
    canary: CanaryDescription | None
    versions: Annotated[list[int], Field(description="All versions in the repository.")]
    withdrawn: Annotated[list[int], Field(description="Versions that were rolled back.")]
    failures: Annotated[dict[int, str], Field(description="Why a version is not live.")]


class Serving(BaseModel):
    """How the live version is run."""

    engine: str
    max_batch: int
    max_delay_ms: float
    max_queue: int
    deadline_ms: float | None
    full_batch_ms: Annotated[float, Field(description="How long a full batch took when it was warmed.")]
    runs_inline: Annotated[bool, Field(description="On the event loop itself, as its full batch is so short.")]
    loaded_at: Annotated[float, Field(description="Seconds since the epoch.")]


class PolicyDetail(PolicyDescription):
    """A policy with what its live version says of itself."""

    serving: Serving | None
    manifest: Annotated[Manifest | None, Field(description="policy.json of the live version.")]


class PolicyList(BaseModel):
    """All policies."""

    policies: list[PolicyDescription]


class VersionChoice(BaseModel):
    """Which version to load."""

    model_config = ConfigDict(extra="forbid")

    version: Annotated[int | None, Field(ge=1, description="The highest that is not withdrawn, if not given.")] = None


class CanaryChoice(BaseModel):
    """Which version gets which share."""

    model_config = ConfigDict(extra="forbid")

    version: Annotated[int, Field(ge=1, examples=[2])]
    share: Annotated[float, Field(ge=0, le=1, description="Of the sessions, by their ids.", examples=[0.1])]


@router.get("/v1/policies", summary="List the policies", responses={401: ERRORS[401]})
async def list_policies(request: Request) -> PolicyList:
    """Every policy of the repository, live or not."""
    return PolicyList(policies=[PolicyDescription(**_describe(status)) for status in host_of(request).policies()])


@router.get("/v1/policies/{name}", summary="Describe a policy", responses=ERRORS)
async def describe_policy(name: PolicyName, request: Request) -> PolicyDetail:
    """What it takes, what it gives, where it comes from and how it is run."""
    return _detail(host_of(request).status(name))


@router.post("/v1/policies/{name}/load", summary="Make a version live", responses=ERRORS)
async def load(name: PolicyName, request: Request, choice: VersionChoice | None = None) -> PolicyDetail:
    """The highest version, or the named one, in every worker; no request is lost meanwhile."""
    host = host_of(request)
    await host.load(name, choice.version if choice is not None else None)
    return _detail(host.status(name))


@router.post("/v1/policies/{name}/unload", summary="Take a policy out of service", responses=ERRORS)
async def unload(name: PolicyName, request: Request) -> PolicyDetail:
    """What was begun finishes; a load brings it back."""
    host = host_of(request)
    await host.unload(name)
    return _detail(host.status(name))


@router.post("/v1/policies/{name}/rollback", summary="Go back to the version before", responses=ERRORS)
async def rollback(name: PolicyName, request: Request) -> PolicyDetail:
    """The live version is withdrawn; newer ones still go live when they appear."""
    host = host_of(request)
    await host.rollback(name)
    return _detail(host.status(name))


@router.put("/v1/policies/{name}/canary", summary="Try a second version", responses=ERRORS)
async def set_canary(name: PolicyName, choice: CanaryChoice, request: Request) -> PolicyDetail:
    """A share of the sessions is answered by it; a session stays with its version."""
    host = host_of(request)
    await host.set_canary(name, choice.version, choice.share)
    return _detail(host.status(name))


@router.delete("/v1/policies/{name}/canary", summary="End the trial", responses=ERRORS)
async def end_canary(name: PolicyName, request: Request) -> PolicyDetail:
    """All sessions are answered by the stable version again."""
    host = host_of(request)
    await host.set_canary(name, None)
    return _detail(host.status(name))


def _describe(status: PolicyStatus) -> dict[str, Any]:
    canary = status.canary
    return {
        "name": status.name,
        "state": status.state,
        "version": status.live.version if status.live is not None else None,
        "canary": CanaryDescription(version=canary.version, share=status.canary_share) if canary is not None else None,
        "versions": status.versions,
        "withdrawn": status.withdrawn,
        "failures": status.failures,
    }


def _detail(status: PolicyStatus) -> PolicyDetail:
    live = status.live
    return PolicyDetail(
        **_describe(status),
        serving=_serving(live) if live is not None else None,
        manifest=live.manifest if live is not None else None,
    )


def _serving(served: ServedPolicy) -> Serving:
    batching = served.batching
    return Serving(
        engine=served.engine_name,
        max_batch=batching.max_batch,
        max_delay_ms=batching.max_delay_ms,
        max_queue=batching.max_queue,
        deadline_ms=batching.deadline_ms,
        full_batch_ms=round(served.batch_s * 1e3, 3),
        runs_inline=served.batcher.runs_inline,
        loaded_at=served.loaded_at,
    )
