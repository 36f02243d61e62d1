"""The field's own clients, unchanged: tritonclient over HTTP and gRPC, openpi-client over its WebSocket."""

from __future__ import annotations

import json
import socket
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from served_policies import RunningPolicyServer, running_policy_server, write_policy
from tritonclient.utils import InferenceServerException
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from policy_server.wire_msgpack import pack, unpack


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, grpc_port: int) -> Iterator[RunningPolicyServer]:
    folder = tmp_path_factory.mktemp("server")
    write_policy(folder / "repository", fields={"goal": 2}, distribution=True)
    options = ("--workers", "2", "--grpc-port", str(grpc_port))
    with running_policy_server(folder / "repository", folder / "log", *options) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def triton(request: pytest.FixtureRequest, server: RunningPolicyServer, grpc_port: int) -> Iterator[tuple[Any, Any]]:
    module = {"http": tritonclient.http, "grpc": tritonclient.grpc}[request.param]
    port = {"http": server.port, "grpc": grpc_port}[request.param]
    client = module.InferenceServerClient(f"127.0.0.1:{port}")
    yield module, client
    client.close()


def inputs_of(module: Any, observation: np.ndarray, goal: np.ndarray, **options: Any) -> list[Any]:
    inputs: list[Any] = []
    for name, values in (("observation", observation), ("goal", goal)):
        datatype = {"float32": "FP32", "float64": "FP64"}[values.dtype.name]
        tensor = module.InferInput(name, list(values.shape), datatype)
        tensor.set_data_from_numpy(values, **options)
        inputs.append(tensor)
    return inputs


OBSERVATION = np.arange(6, dtype=np.float32).reshape(2, 3)
GOAL = np.zeros((2, 2), np.float32)


def test_triton_health_and_metadata(triton: tuple[Any, Any]) -> None:
    _, client = triton
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "1")
    assert not client.is_model_ready("tiny", "2")
    assert not client.is_model_ready("nope")
    metadata = client.get_model_metadata("tiny")
    as_text = str(metadata)
    assert "observation" in as_text
    assert "log_std" in as_text
    assert "noise" not in as_text
    assert "max_batch_size" in str(client.get_model_config("tiny"))
    assert "READY" in str(client.get_model_repository_index())


def test_triton_infers(triton: tuple[Any, Any]) -> None:
    module, client = triton
    outputs = [module.InferRequestedOutput("action")]
    found = client.infer("tiny", inputs_of(module, OBSERVATION, GOAL), outputs=outputs, request_id="7")
    np.testing.assert_array_equal(found.as_numpy("action"), OBSERVATION)
    assert found.as_numpy("mean") is None
    response = found.get_response()
    assert (response["id"] if isinstance(response, dict) else response.id) == "7"
    double = client.infer("tiny", inputs_of(module, OBSERVATION.astype(np.float64), GOAL), model_version="1")
    np.testing.assert_array_equal(double.as_numpy("mean"), OBSERVATION)


def test_triton_draws_by_seed(triton: tuple[Any, Any]) -> None:
    module, client = triton
    inputs = inputs_of(module, OBSERVATION, GOAL)
    drawn = [
        client.infer("tiny", inputs, parameters={"deterministic": False, "seed": seed}).as_numpy("action")
        for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).all()
    assert (drawn[0] != OBSERVATION).all()


def test_both_ways_of_triton_draw_the_same(server: RunningPolicyServer, grpc_port: int) -> None:
    drawn: list[np.ndarray] = []
    for module, port in ((tritonclient.http, server.port), (tritonclient.grpc, grpc_port)):
        client = module.InferenceServerClient(f"127.0.0.1:{port}")
        inputs = inputs_of(module, OBSERVATION[:1], GOAL[:1])
        drawn.append(client.infer("tiny", inputs, parameters={"deterministic": False, "seed": 9}).as_numpy("action"))
        client.close()
    over_json = server.act([0, 1, 2, 0, 0], deterministic=False, seed=9)[1]["action"]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[0][0], np.float32(over_json))


@pytest.mark.parametrize("binary", [True, False])
def test_triton_json_and_binary_tensors(server: RunningPolicyServer, binary: bool) -> None:
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}")
    inputs = inputs_of(tritonclient.http, OBSERVATION, GOAL, binary_data=binary)
    outputs = [tritonclient.http.InferRequestedOutput("action", binary_data=not binary)]
    np.testing.assert_array_equal(client.infer("tiny", inputs, outputs=outputs).as_numpy("action"), OBSERVATION)
    client.close()


@pytest.mark.parametrize(
    ("observation", "goal", "words"),
    [
        (OBSERVATION[:, :2], GOAL, r"inputs\.observation: has the shape \[2, 2\]"),
        (OBSERVATION, GOAL[:1], r"inputs\.goal: is a batch of 1"),
        (OBSERVATION * np.float32(np.nan), GOAL, "finite"),
        (OBSERVATION[:0], GOAL[:0], "empty batch"),
        (np.zeros((1025, 3), np.float32), np.zeros((1025, 2), np.float32), "at most 1024"),
    ],
)
def test_triton_gets_errors_that_name_the_input(
    triton: tuple[Any, Any], observation: np.ndarray, goal: np.ndarray, words: str
) -> None:
    module, client = triton
    with pytest.raises(InferenceServerException, match=words):
        client.infer("tiny", inputs_of(module, observation, goal))


def test_triton_is_told_of_unknown_names(triton: tuple[Any, Any]) -> None:
    module, client = triton
    inputs = inputs_of(module, OBSERVATION, GOAL)
    for call, words in (
        (lambda: client.infer("nope", inputs), "there is no policy 'nope'"),
        (lambda: client.infer("tiny", inputs[:1]), r"inputs\.goal: is missing"),
        (lambda: client.infer("tiny", inputs, model_version="2"), "version 2 of tiny is not live"),
        (
            lambda: client.infer("tiny", inputs, outputs=[module.InferRequestedOutput("reward")]),
            "the policy gives action",
        ),
        (lambda: client.load_model("nope"), "no policy 'nope'"),
    ):
        with pytest.raises(InferenceServerException, match=words):
            call()


def test_triton_unloads_and_loads_in_every_worker(triton: tuple[Any, Any], server: RunningPolicyServer) -> None:
    _, client = triton
    client.unload_model("tiny")
    try:
        assert {server.act([0] * 5)[0] for _ in range(20)} == {404}
    finally:
        client.load_model("tiny")
    assert {server.act([0] * 5)[0] for _ in range(20)} == {200}


def test_triton_is_told_that_its_deadline_has_passed(triton: tuple[Any, Any]) -> None:
    module, client = triton
    with pytest.raises(InferenceServerException, match="past its deadline"):
        client.infer("tiny", inputs_of(module, OBSERVATION, GOAL), timeout=1)  # microseconds


def test_a_grpc_stream(server: RunningPolicyServer, grpc_port: int) -> None:
    import queue

    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{grpc_port}")
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    good, bad = inputs_of(tritonclient.grpc, OBSERVATION, GOAL), inputs_of(tritonclient.grpc, OBSERVATION, GOAL[:1])
    for inputs in (good, bad, good):
        client.async_stream_infer("tiny", inputs)
    found = [answers.get(timeout=20) for _ in range(3)]
    client.stop_stream()
    client.close()
    assert [error is None for _, error in found] == [True, False, True]
    np.testing.assert_array_equal(found[2][0].as_numpy("action"), OBSERVATION)


def test_grpc_asks_for_keys_and_one_port_only(tmp_path: Path) -> None:
    write_policy(tmp_path / "repository")
    port = free_port()
    options = ("--grpc-port", str(port), "--api-key", "secret")
    with running_policy_server(tmp_path / "repository", tmp_path / "log", *options):
        client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}")
        assert client.is_server_live()
        with pytest.raises(InferenceServerException, match="API key"):
            client.get_model_repository_index()
        assert "READY" in str(client.get_model_repository_index(headers={"authorization": "Bearer secret"}))
        client.close()


# openpi.

OPENPI_SCRIPT = """
import json, sys
import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

client = WebsocketClientPolicy("127.0.0.1", int(sys.argv[1]), api_key="unused")
found = {"metadata": client.get_server_metadata()}
answer = client.infer({"observation": np.arange(3), "goal": np.zeros(2, np.float32)})
found["action"], found["dtype"] = answer["action"].tolist(), str(answer["action"].dtype)
found["timing"] = sorted(answer["server_timing"])
found["batch"] = client.infer({"observation": np.ones((4, 3)), "goal": np.zeros((4, 2))})["action"].shape
try:
    client.infer({"observation": np.arange(3)})
except RuntimeError as error:
    found["error"] = str(error)
found["after"] = client.infer({"observation": [1.0, 2.0, 3.0], "goal": [0, 0]})["action"].tolist()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def openpi_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own: openpi-client needs numpy below 2."""
    folder = tmp_path_factory.mktemp("openpi") / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    # typing_extensions: it imports it and does not ask for it.
    packages = ["openpi-client==0.1.2", "typing_extensions"]
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"openpi-client cannot be installed here: {result.stderr.strip().splitlines()[-1]}")
    return python


def test_openpi_client(server: RunningPolicyServer, openpi_python: Path) -> None:
    command = [str(openpi_python), "-c", OPENPI_SCRIPT, str(server.port)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["metadata"]["policy"], found["metadata"]["version"]) == ("tiny", 1)
    assert (found["action"], found["dtype"], found["batch"]) == ([0, 1, 2], "float32", [4, 3])
    assert found["timing"] == ["infer_ms", "queue_ms", "total_ms"]
    assert "observation.goal: is missing" in found["error"]
    assert found["after"] == [1, 2, 3]


FRAME = {"observation": np.float32([1, 2, 3]), "goal": np.zeros(2, np.float32)}


def test_frames_that_are_wrong_get_a_text_frame_and_the_next_one_its_action(server: RunningPolicyServer) -> None:
    with connect(f"ws://127.0.0.1:{server.port}/", compression=None) as socket:
        socket.recv()
        for wrong in ("text", b"", b"\xc1", pack(5), pack([1]), pack({}), pack({"observation": 1}), pack({1: 2})):
            socket.send(wrong)
            answer = socket.recv()
            assert isinstance(answer, str)
            assert answer.startswith("invalid_request: ")
        socket.send(pack(FRAME))
        assert unpack(socket.recv())["action"].tolist() == [1, 2, 3]


def test_a_socket_can_name_policy_version_and_draw(server: RunningPolicyServer) -> None:
    address = f"ws://127.0.0.1:{server.port}/v1/policies/tiny/ws?version=1&deterministic=false&seed=9"
    with connect(address, compression=None) as socket:
        socket.recv()
        actions: list[list[float]] = []
        for _ in range(2):
            socket.send(pack(FRAME))
            actions.append(unpack(socket.recv())["action"].tolist())
    expected = [server.act([1, 2, 3, 0, 0], deterministic=False, seed=seed)[1]["action"] for seed in (9, 10)]
    np.testing.assert_array_equal(np.float32(actions), np.float32(expected))


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("policy=nope", "no policy 'nope'"),
        ("version=7", "version 7 of tiny is not live"),
        ("version=x", "a whole number is expected"),
        ("latest=maybe", "true or false is expected"),
        ("seed=-1", "seed"),
        ("colour=red", "there is no such parameter"),
        ("timeout_ms=soon", "a number is expected"),
    ],
)
def test_a_socket_with_wrong_parameters_is_told_so_and_closed(
    server: RunningPolicyServer, query: str, words: str
) -> None:
    with connect(f"ws://127.0.0.1:{server.port}/?{query}", compression=None) as socket:
        assert words in str(socket.recv())
        with pytest.raises(ConnectionClosed):
            socket.recv()


def test_the_latest_observation_wins_when_asked(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_policy(repository)
    (repository / "tiny" / "serving.json").write_text('{"batching": {"max_delay_ms": 400}}')
    with (
        running_policy_server(repository, tmp_path / "log") as server,
        connect(f"ws://127.0.0.1:{server.port}/?latest=1", compression=None) as socket,
    ):
        socket.recv()
        for value in range(5):
            socket.send(pack({"observation": np.full(3, value, np.float32)}))
        answers = [socket.recv() for _ in range(5)]
    texts = [answer for answer in answers if isinstance(answer, str)]
    actions = [unpack(answer)["action"][0] for answer in answers if isinstance(answer, bytes)]
    assert len(texts) >= 3
    assert all(text.startswith("superseded: ") for text in texts)
    assert actions[-1] == 4


def test_without_it_every_observation_is_answered_in_its_order(server: RunningPolicyServer) -> None:
    with connect(f"ws://127.0.0.1:{server.port}/", compression=None) as socket:
        socket.recv()
        for value in range(50):
            socket.send(pack({"observation": np.full(3, value, np.float32), "goal": np.zeros(2, np.float32)}))
        assert [unpack(socket.recv())["action"][0] for _ in range(50)] == list(range(50))


def test_a_socket_needs_the_key_when_keys_are_set(tmp_path: Path) -> None:
    write_policy(tmp_path / "repository")
    with running_policy_server(tmp_path / "repository", tmp_path / "log", "--api-key", "secret") as server:
        address = f"ws://127.0.0.1:{server.port}/"
        with pytest.raises(Exception, match="403"):
            connect(address, compression=None)
        with connect(address, compression=None, additional_headers={"Authorization": "Api-Key secret"}) as socket:
            assert unpack(socket.recv())["policy"] == "tiny"
