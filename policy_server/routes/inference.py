"""The Open Inference Protocol, version 2, as Triton's HTTP client speaks it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from policy_server.errors import InvalidRequestError, PolicyNotFoundError
from policy_server.inference import describe_model, infer, model_config, repository_index, server_metadata
from policy_server.routes.answers import PolicyName, host_of, metrics_of
from policy_server.wire_tensors import encode_infer, parse_infer

router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

HEADER_LENGTH = "inference-header-content-length"
Version = Annotated[int, Path(ge=1, lt=10**18, examples=[1])]


class InferenceError(BaseModel):
    """The protocol's shape of errors."""

    error: Annotated[str, Field(examples=["inputs.observation: 8 bytes, [1, 10] of FP32 are 40"])]


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": InferenceError} for status in (400, 401, 404, 413, 422, 503, 504)
}
_EXAMPLE = {
    "inputs": [
        {"name": "observation", "shape": [1, 10], "datatype": "FP32", "data": [1.34, 0.75, 0.53, *[0.0] * 7]},
        {"name": "desired_goal", "shape": [1, 3], "datatype": "FP32", "data": [1.4, 0.7, 0.5]},
    ],
    "parameters": {"deterministic": True},
}
_TENSOR: dict[str, Any] = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"type": "string"},
        "data": {"type": "array", "items": {}},
        "parameters": {"type": "object"},
    },
}
_INFER_DOCS: dict[str, Any] = {
    "responses": {
        **_ERRORS,
        200: {
            "description": "The outputs; as octets when binary tensors follow the JSON.",
            "content": {
                "application/json": {
                    "schema": {"type": "object", "required": ["model_name", "model_version", "outputs"]}
                },
                "application/octet-stream": {},
            },
        },
    },
    "response_class": Response,
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {
                        "type": "object",
                        "required": ["inputs"],
                        "properties": {
                            "id": {"type": "string"},
                            "inputs": {"type": "array", "items": _TENSOR, "minItems": 1},
                            "outputs": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "required": ["name"],
                                    "properties": {"name": {"type": "string"}},
                                },
                            },
                            "parameters": {"type": "object"},
                        },
                    },
                    "example": _EXAMPLE,
                }
            },
        }
    },
}


@router.get("", summary="The server")
async def server() -> dict[str, Any]:
    """Name, version and extensions."""
    return server_metadata()


@router.get("/health/live", summary="Is it alive?", response_class=Response)
async def live() -> Response:
    """Answers as long as the event loop turns."""
    return Response()


@router.get("/health/ready", summary="Are all models ready?", response_class=Response, responses={400: {}})
async def ready(request: Request) -> Response:
    """Whether the policies are loaded."""
    return Response(status_code=200 if host_of(request).ready else 400)


@router.get("/models/{name}/ready", summary="Is a model ready?", response_class=Response, responses=_ERRORS)
@router.get(
    "/models/{name}/versions/{version}/ready", summary="Is a version ready?", response_class=Response, responses=_ERRORS
)
async def model_ready(name: PolicyName, request: Request, version: int | None = None) -> Response:
    """Whether it is live."""
    try:
        host_of(request).find(name, version)
    except PolicyNotFoundError:
        return Response(status_code=400)
    return Response()


@router.get("/models/{name}", summary="Describe a model", responses=_ERRORS)
async def model(name: PolicyName, request: Request) -> dict[str, Any]:
    """Its inputs and outputs."""
    return describe_model(host_of(request), name, None)


@router.get("/models/{name}/versions/{version}", summary="Describe a version", responses=_ERRORS)
async def model_version(name: PolicyName, version: Version, request: Request) -> dict[str, Any]:
    """Its inputs and outputs."""
    return describe_model(host_of(request), name, version)


@router.get("/models/{name}/config", summary="How a model is run", responses=_ERRORS)
async def config(name: PolicyName, request: Request) -> dict[str, Any]:
    """The part of Triton's model configuration that means something here."""
    return model_config(host_of(request).find(name))


@router.get("/models/{name}/versions/{version}/config", summary="How a version is run", responses=_ERRORS)
async def config_version(name: PolicyName, version: Version, request: Request) -> dict[str, Any]:
    """The part of Triton's model configuration that means something here."""
    return model_config(host_of(request).find(name, version))


@router.post("/models/{name}/infer", summary="Run a model", **_INFER_DOCS)
async def infer_stable(name: PolicyName, request: Request) -> Response:
    """The stable version acts, or its canary for the sessions in its share."""
    return await _infer(name, None, request)


@router.post("/models/{name}/versions/{version}/infer", summary="Run a version", **_INFER_DOCS)
async def infer_version(name: PolicyName, version: Version, request: Request) -> Response:
    """This version acts; it has to be live."""
    return await _infer(name, version, request)


@router.post("/repository/index", summary="List the models", responses={401: _ERRORS[401]})
async def index(request: Request) -> list[dict[str, str]]:
    """Every version of every policy, with its state."""
    return repository_index(host_of(request))


@router.post("/repository/models/{name}/load", summary="Load a model", response_class=Response, responses=_ERRORS)
async def load(name: PolicyName, request: Request) -> Response:
    """Makes its highest version live in every worker. The body's parameters are not needed and not read."""
    await host_of(request).load(name)
    return Response()


@router.post("/repository/models/{name}/unload", summary="Unload a model", response_class=Response, responses=_ERRORS)
async def unload(name: PolicyName, request: Request) -> Response:
    """Takes it out of service in every worker; what was begun finishes."""
    await host_of(request).unload(name)
    return Response()


async def _infer(name: str, version: int | None, request: Request) -> Response:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise InvalidRequestError("content-encoding: send the body uncompressed", field="content-encoding")
    body = await request.body()
    with metrics_of(request).observing(name, "oip") as observed:
        asked = parse_infer(body, request.headers.get(HEADER_LENGTH))
        served = host_of(request).find(name, version, asked.options.session_id)
        observed.version = served.version
        outputs = await infer(served, asked)
    content, length = encode_infer(outputs, model=name, version=served.version, request=asked)
    if length is None:
        return Response(content, media_type="application/json")
    return Response(content, media_type="application/octet-stream", headers={HEADER_LENGTH: str(length)})
