"""The FastAPI application over a host of policies. Handlers stay thin: they parse, call the host and encode."""

from __future__ import annotations

import logging
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from policy_server.errors import HttpRefusedError, InvalidRequestError, PolicyServerError
from policy_server.host import PolicyHost
from policy_server.inference import server_metadata
from policy_server.metrics import Metrics
from policy_server.middleware import GateMiddleware, error_response, request_id_of
from policy_server.routes import act, health, inference, openpi, page, policies
from policy_server.routes import metrics as metrics_routes
from policy_server.security import ApiKeys
from policy_server.settings import ServerSettings

logger = logging.getLogger(__name__)

_CLIENT_CLOSED_REQUEST = 499
_DESCRIPTION = """
Actions of exported policies, batched over all who ask.

Three ways to ask for one: plain JSON (`/v1/policies/NAME/act`), the Open Inference Protocol (`/v2`, as Triton's clients
speak it; over gRPC too when it is switched on), and a WebSocket for control loops (`/v1/policies/NAME/ws`, in openpi's
protocol).
"""


def create_app(host: PolicyHost, settings: ServerSettings, metrics: Metrics) -> FastAPI:
    """Makes the application.

    Args:
        host: The policies; started by whoever runs the application.
        settings: The server's.
        metrics: What is counted.
    """
    app = FastAPI(title="Policy server", description=_DESCRIPTION, version=server_metadata()["version"], redoc_url=None)
    keys = ApiKeys(settings.api_keys)
    app.state.host, app.state.settings, app.state.metrics, app.state.keys = host, settings, metrics, keys
    for router in (act, policies, health, inference, metrics_routes, openpi, page):
        app.include_router(router.router)
    app.add_middleware(GateMiddleware, keys=keys, max_body_bytes=settings.max_body_bytes)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_exception_handler(PolicyServerError, _policy_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _unexpected_error)
    return app


def _policy_error(request: Request, error: Exception) -> Response:
    return error_response(cast("PolicyServerError", error), request.scope)


def _validation_error(request: Request, error: Exception) -> Response:
    problem = cast("RequestValidationError", error).errors()[0]
    field = ".".join(str(part) for part in problem["loc"] if part != "body") or "body"
    shown = f"{field}: {str(problem['msg']).removeprefix('Value error, ')}"
    return error_response(InvalidRequestError(shown, field=field), request.scope)


def _http_error(request: Request, error: Exception) -> Response:
    problem = cast("HTTPException", error)
    messages = {
        404: f"there is nothing at {request.url.path[:120]}; /docs lists what there is",
        405: f"{request.method} is not for {request.url.path[:120]}; /docs lists what is",
    }
    message = messages.get(problem.status_code, str(problem.detail))
    wrapped = HttpRefusedError(message, status=problem.status_code)
    return error_response(wrapped, request.scope, headers=dict(problem.headers or {}))


def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)  # nobody reads it


def _unexpected_error(request: Request, error: Exception) -> Response:
    logger.error("request %s failed", request_id_of(request.scope), exc_info=error)
    wrapped = PolicyServerError("the server made a mistake; its log says which, under the request's id")
    return error_response(wrapped, request.scope)
