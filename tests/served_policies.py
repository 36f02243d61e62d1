"""Small exported policies for tests of the server, and a server of its own process to ask.

The action of a version is ``clip(version * (first field's first values), -limit, limit) + scale * noise``, so that an
answer tells which version gave it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from policy_server.manifest import Manifest, sha256

START_LIMIT_S = 60
LIMIT = 1000.0


def make_model(
    version: int, *, size: int = 3, fields: dict[str, int] | None = None, distribution: bool = False
) -> onnx.ModelProto:
    """The graph of a version; ``fields`` are further inputs, which do not change the action."""
    inputs = [helper.make_tensor_value_info("observation", TensorProto.FLOAT, ["batch", size])]
    weights = [numpy_helper.from_array(np.float32(version), "factor")]
    weights += [numpy_helper.from_array(np.float32(value), name) for name, value in (("low", -LIMIT), ("high", LIMIT))]
    nodes = [helper.make_node("Mul", ["observation", "factor"], ["scaled"])]
    last = "scaled"
    for name, width in (fields or {}).items():
        inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width]))
        weights.append(numpy_helper.from_array(np.zeros((width, size), np.float32), f"{name}_zero"))
        nodes.append(helper.make_node("MatMul", [name, f"{name}_zero"], [f"{name}_part"]))
        nodes.append(helper.make_node("Add", [last, f"{name}_part"], [f"{name}_sum"]))
        last = f"{name}_sum"
    outputs = [helper.make_tensor_value_info("action", TensorProto.FLOAT, ["batch", size])]
    if distribution:
        inputs.append(helper.make_tensor_value_info("noise", TensorProto.FLOAT, ["batch", size]))
        nodes.append(helper.make_node("Add", [last, "noise"], ["drawn"]))
        nodes.append(helper.make_node("Identity", [last], ["mean"]))
        nodes.append(helper.make_node("Sub", [last, last], ["log_std"]))
        outputs += [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size]) for name in ("mean", "log_std")
        ]
        last = "drawn"
    nodes.append(helper.make_node("Clip", [last, "low", "high"], ["action"]))
    graph = helper.make_graph(nodes, "policy", inputs, outputs, initializer=weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def write_policy(
    repository: Path,
    *,
    name: str = "tiny",
    version: int = 1,
    size: int = 3,
    fields: dict[str, int] | None = None,
    distribution: bool = False,
    model: onnx.ModelProto | bytes | None = None,
    changes: dict[str, Any] | None = None,
) -> Path:
    """Writes ``NAME/VERSION/`` whole and moves it into the repository; ``changes`` go into the manifest as they are."""
    content = model if model is not None else make_model(version, size=size, fields=fields, distribution=distribution)
    staging = repository / f".staging-{name}-{version}"
    staging.mkdir(parents=True)
    file = staging / "policy.onnx"
    file.write_bytes(content if isinstance(content, bytes) else content.SerializeToString())
    manifest = {
        "format": "gated-serving-policy",
        "format_version": 1,
        "name": name,
        "version": version,
        "observation": [
            {"name": "observation", "shape": [size]},
            *({"name": field, "shape": [width]} for field, width in (fields or {}).items()),
        ],
        "action": {
            "shape": [size],
            "low": [-LIMIT] * size,
            "high": [LIMIT] * size,
            "kind": "continuous",
            "dtype": "float32",
        },
        "outputs": "distribution" if distribution else "action",
        "distribution": {"kind": "gaussian", "noise_size": size} if distribution else None,
        "opset": 18,
        "architecture": {"name": "scale", "num_parameters": 1},
        "training": {"framework": "by hand"},
        "parity": {
            "largest_error": 0.0,
            "tolerance": 1e-4,
            "batch_sizes": [1],
            "num_observations": 1,
            "share_at_bounds": 0.0,
        },
        "files": {"policy.onnx": sha256(file)},
        **(changes or {}),
    }
    if changes is None:
        Manifest.model_validate(manifest)
    (staging / "policy.json").write_text(json.dumps(manifest))
    target = repository / name / str(version)
    target.parent.mkdir(exist_ok=True)
    staging.rename(target)
    return target


class RunningPolicyServer:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.address = f"http://127.0.0.1:{port}"

    def request(
        self, path: str, content: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """One request; status, parsed body and headers."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode() if content is not None else None
        request = urllib.request.Request(
            self.address + path, data, {"Content-Type": "application/json", **(headers or {})}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, _parsed(answer.read()), dict(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read()), dict(error.headers)

    def act(self, observation: Any, *, name: str = "tiny", **fields: Any) -> tuple[int, Any]:
        """One act request."""
        status, content, _ = self.request(f"/v1/policies/{name}/act", {"observation": observation, **fields})
        return status, content

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends it; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(30)

    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text()


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body


@contextmanager
def running_policy_server(
    repository: Path | None, log: Path, *options: str, environment: dict[str, str] | None = None
) -> Iterator[RunningPolicyServer]:
    """Starts ``serve-policy`` on a free port, waits until it is ready, and ends it."""
    target = [str(repository)] if repository is not None else []
    command = [sys.executable, "-m", "gated_serving", "serve-policy", *target, "--port", "0", *options]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(environment or {})}
        )
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while "serving policies at http://" not in (text := log.read_text()):
            assert process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.02)
        port = int(text.split("serving policies at http://")[1].split()[0].rsplit(":", 1)[1])
        yield RunningPolicyServer(process, port, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
