"""What several routes share: the one shape of errors, and the way to the server's parts."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Request, WebSocket
from pydantic import BaseModel, Field

from policy_server.host import PolicyHost
from policy_server.metrics import Metrics
from policy_server.settings import ServerSettings

PolicyName = Annotated[
    str,
    Path(
        description="The policy's name.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=128,
        examples=["fetch-reach"],
    ),
]


class ErrorDetail(BaseModel):
    """What went wrong."""

    code: Annotated[str, Field(description="For programs.", examples=["invalid_request"])]
    message: Annotated[str, Field(description="For people.", examples=["observation.desired_goal: is missing"])]
    request_id: Annotated[
        str, Field(description="Names the request in the server's log.", examples=["5f0c2a9be1d4-1a"])
    ]
    field: Annotated[str | None, Field(description="The wrong part.", examples=["observation.desired_goal"])] = None


class ErrorAnswer(BaseModel):
    """The one shape of every error."""

    error: ErrorDetail


_MEANINGS = {
    400: "A part of the request is wrong; `field` says which.",
    401: "No API key, or a wrong one.",
    404: "No such policy or version is live.",
    413: "The body or the batch is above the limit.",
    422: "The policy's action is not finite, or a version does not load.",
    503: "The queue is full, or the policy is still loading; Retry-After says when to try again.",
    504: "The deadline passed before the engine was free.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": meaning} for status, meaning in _MEANINGS.items()
}


def host_of(connection: Request | WebSocket) -> PolicyHost:
    """The policies."""
    return connection.app.state.host


def metrics_of(connection: Request | WebSocket) -> Metrics:
    """The counters."""
    return connection.app.state.metrics


def settings_of(connection: Request | WebSocket) -> ServerSettings:
    """The server's settings."""
    return connection.app.state.settings
