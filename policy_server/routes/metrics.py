"""``/metrics`` for Prometheus, and the same figures as JSON for the page."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response

from policy_server.routes.answers import metrics_of
from policy_server.wire import encode_json

router = APIRouter(tags=["metrics"])

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.get(
    "/metrics",
    summary="Prometheus' metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "Summed over all workers."}},
)
async def metrics(request: Request) -> Response:
    """Latency by stage, batch sizes, queue depth, sheds and requests, by policy and version."""
    found = metrics_of(request)
    found.fold()
    return Response(await asyncio.to_thread(found.render), media_type=_CONTENT_TYPE)


@router.get("/v1/stats", summary="The same figures as JSON", response_class=Response)
async def stats(request: Request) -> Response:
    """Histograms are cumulative; the difference of two answers is what happened between them."""
    found = metrics_of(request)
    found.fold()
    return Response(encode_json(await asyncio.to_thread(found.snapshot)), media_type="application/json")
