"""The same observation over every protocol of the server: JSON, binary tensors, WebSocket, gRPC.

One server (64 layers, 2 workers), one client process on the same two cores. The client of the first four writes bytes
that were made beforehand and looks only for an answer's end, so that its own cost is small and the same; gRPC has
grpc.aio's, which costs more than the server. In every round each protocol is measured in turn; the first answer of
every connection is compared with onnxruntime's action, and a connection that breaks ends the run.

    python benchmarks/policy/protocols.py [--rounds 3] [--seconds 2] [--depth 64]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: benchmarks/ is no package

from random_actor import ACTION_SIZE, GOAL_SIZE, OBSERVATION_SIZE, export_actor
from record import keep_record
from sides import OBSERVATION, PORT, Side, ours, running

from policy_server.engines.onnxruntime import OnnxRuntimeEngine
from policy_server.settings import EngineSettings
from policy_server.wire_msgpack import pack, unpack

CONNECTIONS = (1, 16, 64)
GRPC_PORT = PORT + 5
SIZES = {"observation": OBSERVATION_SIZE, "desired_goal": GOAL_SIZE}
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Wire:
    """One protocol of the raw client.

    Attributes:
        name: For the table.
        hello: What is sent once, before anything else; its answer is passed over.
        request: What is sent again and again.
        length_of: Bytes of the first whole answer in a buffer; 0 if it is not whole yet.
        action_of: The action in a whole answer.
    """

    name: str
    hello: bytes
    request: bytes
    length_of: Callable[[bytearray], int]
    action_of: Callable[[bytes], Any]


def fields() -> dict[str, np.ndarray]:
    """The observation, a batch of one."""
    found: dict[str, np.ndarray] = {}
    first = 0
    for name, size in SIZES.items():
        found[name] = np.asarray([OBSERVATION[first : first + size]], np.float32)
        first += size
    return found


def http_length(buffer: bytearray) -> int:
    """Length of an answer with a Content-Length."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return 0
    if not buffer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(bytes(buffer[:300]).decode())
    head = buffer[:end].lower()
    at = head.index(b"\r\ncontent-length: ") + 18
    stop = head.find(b"\r\n", at)
    whole = end + 4 + int(head[at : stop if stop > 0 else end])
    return whole if len(buffer) >= whole else 0


def frame_length(buffer: bytearray) -> int:
    """Length of a WebSocket frame from the server."""
    if len(buffer) < 2:
        return 0
    if buffer[0] != 0x82:
        raise RuntimeError(bytes(buffer[:300]))
    length, header = buffer[1] & 0x7F, 2
    if length == 126:
        if len(buffer) < 4:
            return 0
        length, header = struct.unpack(">H", buffer[2:4])[0], 4
    return header + length if len(buffer) >= header + length else 0


def http_body(answer: bytes) -> bytes:
    """What follows the head."""
    return answer[answer.index(b"\r\n\r\n") + 4 :]


def http_request(path: str, body: bytes, *headers: str) -> bytes:
    """A request as bytes."""
    lines = [f"POST {path} HTTP/1.1", "Host: here", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def frame(payload: bytes) -> bytes:
    """A masked binary frame; a mask of zeros leaves the payload as it is."""
    length = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + struct.pack(">H", len(payload))
    return b"\x82" + length + bytes(4) + payload


def wires() -> list[Wire]:
    """The raw client's protocols."""
    arrays = fields()
    plain = {name: values[0].tolist() for name, values in arrays.items()}
    json_act = json.dumps({"observation": plain}).encode()
    tensors = [{"name": name, "shape": list(values.shape), "datatype": "FP32"} for name, values in arrays.items()]
    json_infer = json.dumps(
        {
            "inputs": [{**tensor, "data": arrays[tensor["name"]].ravel().tolist()} for tensor in tensors],
            "outputs": [{"name": "action"}],
        }
    ).encode()
    header = json.dumps(
        {
            "inputs": [
                {**tensor, "parameters": {"binary_data_size": arrays[tensor["name"]].nbytes}} for tensor in tensors
            ],
            "outputs": [{"name": "action", "parameters": {"binary_data": True}}],
        }
    ).encode()
    binary = header + b"".join(values.tobytes() for values in arrays.values())
    key = base64.b64encode(os.urandom(16)).decode()
    hello = (
        f"GET /v1/policies/actor/ws HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()
    infer = "/v2/models/actor/infer"
    as_json = "Content-Type: application/json"
    packed = pack({name: values[0] for name, values in arrays.items()})
    return [
        Wire("JSON, act", b"", http_request("/v1/policies/actor/act", json_act, as_json), http_length, action_of_act),
        Wire(
            "JSON, Open Inference Protocol", b"", http_request(infer, json_infer, as_json), http_length, action_of_infer
        ),
        Wire(
            "binary tensors over HTTP",
            b"",
            http_request(infer, binary, f"Inference-Header-Content-Length: {len(header)}"),
            http_length,
            action_of_binary,
        ),
        Wire("WebSocket, msgpack", hello, frame(packed), frame_length, action_of_frame),
    ]


def action_of_act(answer: bytes) -> Any:
    """Of an act request."""
    return json.loads(http_body(answer))["action"]


def action_of_infer(answer: bytes) -> Any:
    """Of an infer request in JSON."""
    return json.loads(http_body(answer))["outputs"][0]["data"]


def action_of_binary(answer: bytes) -> Any:
    """Of an infer request with binary tensors: the only output, so the body's end."""
    return np.frombuffer(http_body(answer)[-4 * ACTION_SIZE :], np.float32)


def action_of_frame(answer: bytes) -> Any:
    """Of a WebSocket's frame, whose header has two or four bytes."""
    return unpack(answer[4 if answer[1] == 126 else 2 :])["action"]


def check_action(action: Any, expected: np.ndarray, name: str) -> None:
    """Compares with onnxruntime's.

    Raises:
        AssertionError: They differ.
    """
    np.testing.assert_allclose(np.asarray(action, np.float32).ravel(), expected, atol=TOLERANCE, err_msg=name)


class Client(asyncio.Protocol):
    """One connection in a closed loop."""

    def __init__(
        self, wire: Wire, times: list[float], expected: np.ndarray, ready: asyncio.Future[None], broken: list[str]
    ) -> None:
        self._wire = wire
        self._times = times
        self._expected = expected
        self._ready = ready
        self._broken = broken
        self._checked = False
        self._buffer = bytearray()
        self._greeting = bool(wire.hello)
        self._sent = 0.0
        self.running = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        if self._greeting:
            self._transport.write(self._wire.hello)
        else:
            self._ready.set_result(None)

    def send(self) -> None:
        """One request."""
        self._sent = time.perf_counter()
        self._transport.write(self._wire.request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._greeting:  # the upgrade's answer, then the policy's description
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0 or not frame_length(rest := self._buffer[end + 4 :]):
                return
            self._buffer = rest[frame_length(rest) :]
            self._greeting = False
            self._ready.set_result(None)
            return
        try:
            length = self._wire.length_of(self._buffer)
            if length and not self._checked:
                check_action(self._wire.action_of(bytes(self._buffer[:length])), self._expected, self._wire.name)
                self._checked = True
        except Exception as error:  # the loop would only log it, and the connection would count as a slow one
            self.running = False
            self._broken.append(repr(error))
            self._transport.abort()
            return
        if length:
            del self._buffer[:length]
            self._times.append(time.perf_counter() - self._sent)
            if self.running:
                self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.running:
            self._broken.append(f"closed by the server: {exc}")

    def close(self) -> None:
        """Hangs up."""
        self._transport.close()


async def run_wire(wire: Wire, connections: int, seconds: float, expected: np.ndarray) -> tuple[float, list[float]]:
    """Requests a second, and every latency.

    Raises:
        RuntimeError: A connection broke, or an answer was not understood or wrong.
    """
    loop = asyncio.get_running_loop()
    times: list[float] = []
    broken: list[str] = []
    clients: list[Client] = []
    for _ in range(connections):
        ready = loop.create_future()
        _, client = await loop.create_connection(
            lambda ready=ready: Client(wire, times, expected, ready, broken), "127.0.0.1", PORT
        )
        await asyncio.wait_for(ready, 10)
        clients.append(client)
    started = time.perf_counter()
    for client in clients:
        client.running = True
        client.send()
    await asyncio.sleep(seconds)
    took, counted = time.perf_counter() - started, len(times)
    for client in clients:
        client.running = False
        client.close()
    if broken:
        raise RuntimeError(f"{wire.name}: {len(broken)} of {connections} connections broke: {broken[0]}")
    return counted / took, times[:counted]


async def run_grpc(connections: int, seconds: float, expected: np.ndarray) -> tuple[float, list[float]]:
    """The same over gRPC; so many calls at once over a few channels."""
    import grpc.aio
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    request: Any = cast("Any", service_pb2).ModelInferRequest(model_name="actor")
    for name, values in fields().items():
        request.inputs.add(name=name, datatype="FP32", shape=list(values.shape))
        request.raw_input_contents.append(values.tobytes())
    request.outputs.add(name="action")
    times: list[float] = []
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [
        grpc.aio.insecure_channel(f"127.0.0.1:{GRPC_PORT}", options=options) for _ in range(min(connections, 8))
    ]
    stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in channels]
    answer = await stubs[0].ModelInfer(request)
    check_action(np.frombuffer(answer.raw_output_contents[0], np.float32), expected, "gRPC")
    end = time.perf_counter() + seconds

    async def loop(stub: Any) -> None:
        while time.perf_counter() < end:
            sent = time.perf_counter()
            await stub.ModelInfer(request)
            times.append(time.perf_counter() - sent)

    started = time.perf_counter()
    await asyncio.gather(*(loop(stubs[index % len(stubs)]) for index in range(connections)))
    took = time.perf_counter() - started
    for channel in channels:
        await channel.close()
    return len(times) / took, times


def main() -> None:
    """Measures, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True, help="write benchmarks/results")
    arguments = parser.parse_args()
    found: dict[tuple[str, int], list[tuple[float, list[float]]]] = {}
    plain = ours(2)
    side = Side(plain.name, (*plain.command, "--grpc-port", str(GRPC_PORT)), path=plain.path)
    with tempfile.TemporaryDirectory() as name:
        model = export_actor(Path(name), arguments.depth)
        expected = OnnxRuntimeEngine(model.read_bytes(), EngineSettings(), max_batch=1).run(fields())["action"][0]
        with running(side, Path(name)):
            for number in range(arguments.rounds):
                for connections in CONNECTIONS:
                    for wire in wires():
                        run = run_wire(wire, connections, arguments.seconds, expected)
                        found.setdefault((wire.name, connections), []).append(uvloop.run(run))
                    run = run_grpc(connections, arguments.seconds, expected)
                    found.setdefault(("gRPC", connections), []).append(asyncio.run(run))
                print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    rows = [row_of(name, connections, runs) for (name, connections), runs in found.items()]
    rates = {(row["protocol"], row["connections"]): row["requests/s"] for row in rows}
    verdicts = [
        f"{connections} connections: "
        + ", ".join(
            f"{name} {rates[name, connections] / rates['JSON, act', connections]:.2f} times"
            for name in dict.fromkeys(row["protocol"] for row in rows)
            if name != "JSON, act"
        )
        + " the rate of JSON."
        for connections in CONNECTIONS
    ]
    method = (
        f"Actor of {arguments.depth} layers, width 256, 2 workers. {arguments.rounds} rounds of "
        f"{arguments.seconds:g} s, every protocol in turn; the median round counts. JSON, binary tensors and WebSocket "
        "are asked by one raw client that sends bytes made beforehand; gRPC by grpc.aio, whose own cost is the larger "
        "part. Server and client share two cores."
    )
    if arguments.keep:
        keep_record("policy-protocols", method=method, rows=rows, verdicts=verdicts)
    else:
        for row in [*rows, *verdicts]:
            print(row)


def row_of(name: str, connections: int, runs: list[tuple[float, list[float]]]) -> dict[str, Any]:
    """The median round."""
    return {
        "protocol": name,
        "connections": connections,
        "requests/s": statistics.median(rate for rate, _ in runs),
        "p50 ms": statistics.median(1e3 * float(np.percentile(times, 50)) for _, times in runs),
        "p99 ms": statistics.median(1e3 * float(np.percentile(times, 99)) for _, times in runs),
    }


if __name__ == "__main__":
    main()
