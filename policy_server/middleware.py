"""What stands before every route that the framework serves: request ids, API keys and the limit of bodies."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from fastapi.responses import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from policy_server.errors import PolicyServerError
from policy_server.request_head import REQUEST_ID_HEADER, error_headers, new_request_id, usable_request_id
from policy_server.security import ApiKeys, is_open, too_large
from policy_server.wire import encode_json

_REQUEST_ID = "policy_server.request_id"
_POLICY_VIOLATION = 1008


class GateMiddleware:
    """Lets a request in or answers it; every answer carries the request's id.

    Args:
        app: What is behind.
        keys: Who is let in.
        max_body_bytes: Largest body, whether its length is announced or not.
    """

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, max_body_bytes: int) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope[_REQUEST_ID] = usable_request_id(headers.get(REQUEST_ID_HEADER)) or new_request_id()
        try:
            self._check(scope, headers)
        except PolicyServerError as error:
            if scope["type"] == "http":
                await error_response(error, scope)(scope, receive, send)
            else:  # before it is accepted; the server answers the handshake with 403
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": error.message[:120]})
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        await self._serve(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        length = headers.get("content-length", "")
        if scope["type"] == "http" and length.isdigit() and int(length) > self._max_body_bytes:
            raise too_large(int(length), self._max_body_bytes)
        if self._keys.required and (scope["type"] == "websocket" or not is_open(scope["path"])):
            if scope.get("method") == "OPTIONS":  # a browser's question before it sends the key
                return
            self._keys.check(headers)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        answered, refused, size = False, False, 0

        async def send_with_id(message: Message) -> None:
            nonlocal answered
            if refused:  # what the route makes of the missing rest is of no interest
                return
            if message["type"] == "http.response.start":
                answered = True
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = scope[_REQUEST_ID]
            await send(message)

        async def receive_limited() -> Message:
            nonlocal size, refused
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body_bytes and not answered:
                if not refused:
                    refused = True
                    await error_response(too_large(None, self._max_body_bytes), scope)(scope, receive, send)
                return {"type": "http.disconnect"}
            return message

        await self._app(scope, receive_limited, send_with_id)


def request_id_of(scope: MutableMapping[str, Any]) -> str:
    """The id of the request."""
    found = scope.get(_REQUEST_ID)
    return found if isinstance(found, str) else new_request_id()


def error_response(
    error: PolicyServerError, scope: MutableMapping[str, Any], *, headers: dict[str, str] | None = None
) -> Response:
    """An error as the path's protocol has it: the Open Inference Protocol's shape below ``/v2``."""
    request_id = request_id_of(scope)
    inference = str(scope.get("path", "")).startswith("/v2")
    content = {"error": error.message} if inference else error.body(request_id)
    return Response(
        encode_json(content),
        status_code=error.status,
        media_type="application/json",
        headers={**(headers or {}), **error_headers(error), REQUEST_ID_HEADER: request_id},
    )
