"""``POST /v1/policies/NAME/act``: an observation in, an action out."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from policy_server.errors import PolicyServerError
from policy_server.request_head import SESSION_HEADER, TIMEOUT_HEADER, read_act_headers
from policy_server.routes.answers import ERRORS, PolicyName, host_of, metrics_of
from policy_server.served import MAX_SEED
from policy_server.wire import MAX_SESSION_ID, MAX_TIMEOUT_MS, decode_act, encode_act, parse_act, session_of

router = APIRouter(tags=["act"])

_OBSERVATION = {
    "observation": [1.34, 0.75, 0.53, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    "desired_goal": [1.40, 0.70, 0.50],
}
_VECTOR = [value for part in _OBSERVATION.values() for value in part]


class ActBody(BaseModel):
    """What is asked."""

    model_config = ConfigDict(extra="forbid")

    observation: Annotated[
        dict[str, Any] | list[Any],
        Field(
            description="Named fields, or one flat vector in the manifest's order; one observation, or a batch with "
            "one dimension more.",
            examples=[_OBSERVATION],
        ),
    ]
    deterministic: Annotated[bool, Field(description="The best action; false draws one.")] = True
    seed: Annotated[
        int | None,
        Field(ge=0, le=MAX_SEED, description="What to draw with; the same seed gives the same action."),
    ] = None
    timeout_ms: Annotated[
        float | None, Field(gt=0, le=MAX_TIMEOUT_MS, description="When the request is too late to begin: 504.")
    ] = None
    session_id: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=MAX_SESSION_ID,
            description="Whose request it is; a session stays with its version.",
        ),
    ] = None


class Timing(BaseModel):
    """Where the time went."""

    queue_ms: Annotated[float, Field(description="Waiting for the engine.", examples=[0.06])]
    inference_ms: Annotated[float, Field(description="The engine's run.", examples=[0.31])]
    total_ms: Annotated[float, Field(description="From the request's last byte to the answer.", examples=[0.52])]
    batch_rows: Annotated[int, Field(description="Observations that ran together.", examples=[1])]


class ActAnswer(BaseModel):
    """What is answered."""

    action: Annotated[
        list[Any] | int,
        Field(
            description="The action, within the manifest's bounds; or a batch of them.",
            examples=[[0.41, -0.52, -0.2, 0.03]],
        ),
    ]
    version: Annotated[int, Field(description="Which version acted.", examples=[1])]
    timing: Timing


_EXAMPLES = {
    "named fields": {"value": {"observation": _OBSERVATION}},
    "flat vector": {"value": {"observation": _VECTOR}},
    "a batch": {"value": {"observation": [_VECTOR, _VECTOR]}},
    "a drawn action": {"value": {"observation": _OBSERVATION, "deterministic": False, "seed": 7}},
}
_DOCS: dict[str, Any] = {
    "response_model": ActAnswer,
    "responses": ERRORS,
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": ActBody.model_json_schema(), "examples": _EXAMPLES},
            },
        },
        "parameters": [
            {
                "name": SESSION_HEADER,
                "in": "header",
                "description": "As session_id.",
                "schema": {"type": "string", "minLength": 1, "maxLength": MAX_SESSION_ID},
            },
            {
                "name": TIMEOUT_HEADER,
                "in": "header",
                "description": "As timeout_ms.",
                "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_MS},
            },
        ],
    },
}


@router.post("/v1/policies/{name}/act", summary="Ask for an action", **_DOCS)
async def act(name: PolicyName, request: Request) -> Response:
    """The stable version acts, or its canary for the sessions in its share."""
    return await _act(name, None, request)


@router.post("/v1/policies/{name}/versions/{version}/act", summary="Ask one version for an action", **_DOCS)
async def act_version(
    name: PolicyName, version: Annotated[int, Path(ge=1, lt=10**18, examples=[1])], request: Request
) -> Response:
    """This version acts; it has to be live."""
    return await _act(name, version, request)


async def _act(name: str, version: int | None, request: Request) -> Response:
    body = await request.body()
    started = time.perf_counter()
    host, metrics = host_of(request), metrics_of(request)
    found = 0
    try:
        header_session, timeout_ms = read_act_headers(request.headers.get)
        content = decode_act(body)
        served = host.find(name, version, session_of(content) or header_session)
        found = served.version
        asked = parse_act(content, served.observations, timeout_ms=timeout_ms)
        done = await served.infer(asked)
    except PolicyServerError as error:
        metrics.observe_request(name, found, error.status, time.perf_counter() - started, "http")
        raise
    total_s = time.perf_counter() - started
    metrics.observe_request(name, found, 200, total_s, "http")
    return Response(
        encode_act(done, served.version, batched=asked.batched, total_s=total_s), media_type="application/json"
    )
