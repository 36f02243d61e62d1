"""The Open Inference Protocol over gRPC, as Triton's client speaks it; the extra ``grpc`` brings the messages.

The messages are those of tritonclient, so that both sides have the same ones. Every worker has a server of its own on
the shared port.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

from policy_server.engines.base import Array
from policy_server.errors import InvalidRequestError, PolicyServerError, StartError, UnauthorizedError
from policy_server.host import PolicyHost
from policy_server.inference import describe_model, infer, model_config, repository_index, server_metadata
from policy_server.metrics import Metrics
from policy_server.security import ApiKeys
from policy_server.settings import ServerSettings
from policy_server.wire import MAX_TIMEOUT_MS
from policy_server.wire_tensors import DATATYPES, InferRequest, array_of, parse_options, to_bytes

try:
    import grpc  # pyright: ignore[reportMissingTypeStubs]
    from google.protobuf import json_format
    from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc  # pyright: ignore[reportMissingTypeStubs]
except ModuleNotFoundError as error:
    raise StartError(
        f"grpc_port: {error.name} is not installed: pip install 'gated-serving[grpc]'", exit_code=3
    ) from None

logger = logging.getLogger(__name__)

# Neither grpc nor the generated messages have types.
_pb = cast("Any", service_pb2)
_config_pb = cast("Any", model_config_pb2)
_grpc = cast("Any", grpc)
_Servicer = cast("Any", service_pb2_grpc).GRPCInferenceServiceServicer

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
_CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    409: "ABORTED",
    413: "RESOURCE_EXHAUSTED",
    422: "FAILED_PRECONDITION",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


async def start_grpc_server(host: PolicyHost, settings: ServerSettings, metrics: Metrics) -> Any:
    """A gRPC server that is up.

    Raises:
        StartError: The port is taken.
    """
    server = _grpc.aio.server(
        interceptors=[_KeyInterceptor(ApiKeys(settings.api_keys))],
        options=[
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", settings.max_body_bytes),
            ("grpc.max_send_message_length", -1),
        ],
    )
    cast("Any", service_pb2_grpc).add_GRPCInferenceServiceServicer_to_server(_Service(host, metrics), server)
    address = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        bound = server.add_insecure_port(f"{address}:{settings.grpc_port}")
    except RuntimeError as error:
        raise StartError(f"cannot listen on {address}:{settings.grpc_port} for gRPC: {error}", exit_code=3) from None
    if bound != settings.grpc_port:
        raise StartError(f"cannot listen on {address}:{settings.grpc_port} for gRPC", exit_code=3)
    await server.start()
    return server


class _KeyInterceptor(_grpc.aio.ServerInterceptor):
    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        method = str(details.method).rpartition("/")[2]
        if self._keys.required and method not in ("ServerLive", "ServerReady"):
            headers = {str(key): str(value) for key, value in details.invocation_metadata}
            try:
                self._keys.check(headers)
            except UnauthorizedError as error:
                return _refusing(error.message)
        return await continuation(details)


def _refusing(message: str) -> Any:
    async def refuse(_request: Any, context: Any) -> None:
        await context.abort(_grpc.StatusCode.UNAUTHENTICATED, message)

    return _grpc.unary_unary_rpc_method_handler(refuse)


class _Service(_Servicer):
    """One method a call of the protocol; names are the protocol's."""

    def __init__(self, host: PolicyHost, metrics: Metrics) -> None:
        self._host = host
        self._metrics = metrics

    async def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        return _pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return _pb.ServerReadyResponse(ready=self._host.ready)

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        try:
            self._host.find(request.name, _version(request.version))
        except PolicyServerError:
            return _pb.ModelReadyResponse(ready=False)
        return _pb.ModelReadyResponse(ready=True)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return _pb.ServerMetadataResponse(**server_metadata())

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        async def describe() -> Any:
            return _pb.ModelMetadataResponse(**describe_model(self._host, request.name, _version(request.version)))

        return await _answered(describe(), context)

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        async def describe() -> Any:
            found = model_config(self._host.find(request.name, _version(request.version)))
            config = _config_pb.ModelConfig()
            json_format.ParseDict(found, config)
            return _pb.ModelConfigResponse(config=config)

        return await _answered(describe(), context)

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        entries = repository_index(self._host)
        if request.ready:
            entries = [entry for entry in entries if entry["state"] == "READY"]
        return _pb.RepositoryIndexResponse(
            models=[_pb.RepositoryIndexResponse.ModelIndex(**entry) for entry in entries]
        )

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        async def load() -> Any:
            await self._host.load(request.model_name)
            return _pb.RepositoryModelLoadResponse()

        return await _answered(load(), context)

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:  # noqa: N802
        async def unload() -> Any:
            await self._host.unload(request.model_name)
            return _pb.RepositoryModelUnloadResponse()

        return await _answered(unload(), context)

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await _answered(self._infer(request, context.time_remaining()), context)

    async def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        """A stream of requests, answered in their order; a request's error does not end the stream."""
        async for request in request_iterator:
            try:
                yield _pb.ModelStreamInferResponse(infer_response=await self._infer(request, context.time_remaining()))
            except PolicyServerError as error:
                yield _pb.ModelStreamInferResponse(error_message=error.message)

    async def _infer(self, request: Any, remaining_s: float | None) -> Any:
        with self._metrics.observing(request.model_name, "grpc") as observed:
            asked = _parse(request, remaining_s)
            served = self._host.find(request.model_name, _version(request.model_version), asked.options.session_id)
            observed.version = served.version
            outputs = await infer(served, asked)
        return _encode(outputs, request.model_name, served.version, request.id)


async def _answered(work: Awaitable[Any], context: Any) -> Any:
    try:
        return await work
    except PolicyServerError as error:
        code = getattr(_grpc.StatusCode, _CODES.get(error.status, "INTERNAL"))
        await context.abort(code, error.message)
    except Exception:
        logger.exception("a gRPC call failed")
        await context.abort(_grpc.StatusCode.INTERNAL, "the server made a mistake; its log says which")


def _parse(request: Any, remaining_s: float | None) -> InferRequest:
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequestError(
            f"raw_input_contents: {len(raw)} for {len(request.inputs)} inputs", field="raw_input_contents"
        )
    arrays: dict[str, Array] = {}
    for index, tensor in enumerate(request.inputs):
        if tensor.name in arrays:
            raise InvalidRequestError(f"inputs.{tensor.name}: is given twice", field=f"inputs.{tensor.name}")
        data = None
        if not raw:
            data = list(getattr(tensor.contents, _CONTENTS.get(tensor.datatype, "fp32_contents")))
        content = raw[index] if raw else None
        arrays[tensor.name] = array_of(tensor.name, tensor.datatype, list(tensor.shape), content, data)
    options = parse_options({name: _value(parameter) for name, parameter in request.parameters.items()})
    if remaining_s is not None and (options.timeout_ms is None or remaining_s * 1e3 < options.timeout_ms):
        options.timeout_ms = min(max(remaining_s * 1e3, 1e-3), float(MAX_TIMEOUT_MS))
    return InferRequest(arrays, outputs=[output.name for output in request.outputs], options=options)


def _value(parameter: Any) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)


def _encode(outputs: dict[str, Array], model: str, version: int, request_id: str) -> Any:
    answer = _pb.ModelInferResponse(model_name=model, model_version=str(version), id=request_id)
    for name, values in outputs.items():
        answer.outputs.add(name=name, datatype=DATATYPES[values.dtype.name], shape=list(values.shape))
        answer.raw_output_contents.append(to_bytes(values))
    return answer


def _version(text: str) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise InvalidRequestError(f"model_version: {text[:40]!r}, a whole number is expected", field="model_version")
    return int(text)
