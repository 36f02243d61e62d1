"""``/healthz`` and ``/readyz``, for load balancers and containers; no key is asked for."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from policy_server.errors import NotReadyError
from policy_server.routes.answers import ERRORS, host_of

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """How the server is."""

    status: str


@router.get("/healthz", summary="Is the process alive?")
async def healthz() -> Health:
    """Answers as long as the event loop turns."""
    return Health(status="ok")


@router.get("/readyz", summary="Can it act?", responses={503: ERRORS[503]})
async def readyz(request: Request) -> Health:
    """Whether its policies are loaded and it is not stopping."""
    if not host_of(request).ready:
        raise NotReadyError("the policies are still being loaded, or the server is stopping", retry_after_s=1)
    return Health(status="ready")
