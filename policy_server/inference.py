"""The Open Inference Protocol's operations, whatever carries them: HTTP and gRPC both end here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from policy_server.engines.base import Array
from policy_server.host import PolicyHost
from policy_server.served import ACTION, ActRequest, ServedPolicy
from policy_server.wire import deadline_after
from policy_server.wire_tensors import DATATYPES, InferRequest, check_outputs

EXTENSIONS = ("binary_tensor_data", "model_repository", "model_configuration", "parameters")


def server_metadata() -> dict[str, Any]:
    """Name, version and extensions of the server."""
    try:
        number = version("gated-serving")
    except PackageNotFoundError:  # run from a tree that is not installed
        number = "0"
    return {"name": "gated-serving policy server", "version": number, "extensions": list(EXTENSIONS)}


def describe_model(host: PolicyHost, name: str, version: int | None) -> dict[str, Any]:
    """A model's inputs and outputs; every first dimension is the batch.

    Raises:
        PolicyNotFoundError: It is not live.
    """
    served = host.find(name, version)
    status = host.status(name)
    shown = [served] if version is not None else [status.live, status.canary]
    return {
        "name": name,
        "versions": [str(other.version) for other in shown if other is not None],
        "platform": "onnxruntime_onnx",
        "inputs": _inputs(served),
        "outputs": _outputs(served),
    }


def model_config(served: ServedPolicy) -> dict[str, Any]:
    """The part of Triton's model configuration that means something here.

    Raises:
        PolicyNotFoundError: It is not live.
    """

    def tensor(entry: dict[str, Any]) -> dict[str, Any]:
        return {"name": entry["name"], "data_type": f"TYPE_{entry['datatype']}", "dims": entry["shape"][1:]}

    batching = served.batching
    return {
        "name": served.name,
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "max_batch_size": batching.max_batch,
        "input": [tensor(entry) for entry in _inputs(served)],
        "output": [tensor(entry) for entry in _outputs(served)],
        "dynamic_batching": {"max_queue_delay_microseconds": round(batching.max_delay_ms * 1e3)},
    }


def repository_index(host: PolicyHost) -> list[dict[str, str]]:
    """Every version of every policy, with its state in Triton's words."""
    entries: list[dict[str, str]] = []
    for status in host.policies():
        live = {served.version for served in (status.live, status.canary) if served is not None}
        for number in status.versions:
            reason = "" if number in live else status.failures.get(number, "not live")
            state = "READY" if number in live else "UNAVAILABLE"
            entries.append({"name": status.name, "version": str(number), "state": state, "reason": reason})
    return entries


async def infer(served: ServedPolicy, asked: InferRequest) -> dict[str, Array]:
    """Runs a request.

    Returns:
        The outputs asked for, with a batch dimension exactly when the inputs have one.

    Raises:
        PolicyServerError: The inputs are wrong, or what became of the request.
    """
    arrays, rows, batched = served.observations.from_arrays(asked.arrays, path="inputs")
    names = output_names(served)
    check_outputs(names, asked.outputs)
    options = asked.options
    request = ActRequest(
        arrays,
        rows,
        batched,
        options.deterministic,
        options.seed,
        deadline_after(options.timeout_ms),
        options.session_id,
    )
    done = await served.infer(request)
    outputs = {name: done.outputs[name] for name in asked.outputs or names}
    return outputs if batched else {name: values[0] for name, values in outputs.items()}


def output_names(served: ServedPolicy) -> list[str]:
    """What a policy gives, in the graph's order."""
    distribution = served.manifest.distribution
    return [ACTION, *(distribution.parameters if distribution is not None else ())]


def _inputs(served: ServedPolicy) -> list[dict[str, Any]]:
    return [
        {"name": field.name, "datatype": DATATYPES[field.dtype], "shape": [-1, *field.shape]}
        for field in served.manifest.observation
    ]


def _outputs(served: ServedPolicy) -> list[dict[str, Any]]:
    names = set(output_names(served))
    return [
        {
            "name": tensor.name,
            "datatype": DATATYPES[tensor.dtype],
            "shape": [-1, *(size or -1 for size in tensor.shape)],
        }
        for tensor in served.engine.outputs
        if tensor.name in names
    ]
