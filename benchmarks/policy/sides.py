"""The servers that are compared: how each is started on the same ONNX file, and how it is asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from random_actor import GOAL_SIZE, OBSERVATION_SIZE

HERE = Path(__file__).parent
PORT = 8190
START_LIMIT_S = 120
OBSERVATION = [round(0.1 * index - 0.6, 3) for index in range(OBSERVATION_SIZE + GOAL_SIZE)]
PLAIN = {"observation": OBSERVATION}
MLSERVER = {
    "inputs": [{"name": "observation", "shape": [1, len(OBSERVATION)], "datatype": "FP32", "data": OBSERVATION}]
}


@dataclass(frozen=True)
class Side:
    """One server.

    Attributes:
        name: For the table.
        command: Starts it; ``{port}`` and ``{repository}`` are filled in.
        path: Where it is asked.
        body: What it is asked.
        environment: Variables of its own.
        files: Written into its working folder.
        package: Whose version is recorded, and the Python that knows it.
        compared: Whether it takes part in the verdicts; a yardstick does not.
        acts: Whether it answers with the policy's action.
    """

    name: str
    command: tuple[str, ...]
    path: str = "/act"
    body: dict[str, Any] = field(default_factory=lambda: PLAIN)
    environment: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, str] = field(default_factory=dict[str, str])
    package: tuple[str, str] | None = None
    compared: bool = True
    acts: bool = True

    def action_of(self, answer: Any) -> list[float]:
        """The action in its answer."""
        if "outputs" in answer:
            return answer["outputs"][0]["data"]
        action = answer["action"] if isinstance(answer, dict) else answer
        return action[0] if isinstance(action[0], list) else action


def ours(workers: int, *, name: str | None = None, path: str = "/v1/policies/actor/act") -> Side:
    """This project's server."""
    command = (sys.executable, "-m", "gated_serving", "serve-policy", "{repository}", "--port", "{port}")
    label = name or f"policy server, {workers} worker{'s' if workers > 1 else ''}"
    return Side(label, (*command, "--workers", str(workers)), path=path)


def yardsticks() -> list[Side]:
    """Our own server by its plain FastAPI route, and one that does nothing: what the short way gains, and could gain.

    A query string is enough for the short way to leave a request to the framework.
    """
    route = ours(1, name="our FastAPI route, 1 worker", path="/v1/policies/actor/act?")
    noop = (sys.executable, str(HERE / "peers" / "noop_server.py"))
    return [replace(route, compared=False), Side("no-op server", noop, compared=False, acts=False)]


def peers(folder: Path) -> list[Side]:
    """Those whose environments ``peers/install.py`` has made."""
    found: list[Side] = []

    def add(kind: str, name: str, *command: str, package: str, **extra: Any) -> None:
        python = folder / kind / "bin" / "python"
        if python.exists():
            filled = tuple(part.format(bin=python.parent, port="{port}", here=HERE / "peers") for part in command)
            found.append(Side(name, filled, package=(package, str(python)), **extra))

    for processes in (1, 2):
        script = (
            "{bin}/python",
            "{here}/mosec_server.py",
            "--address",
            "127.0.0.1",
            "--port",
            "{port}",
            "--timeout",
            "30000",
        )
        label = f"mosec, {processes} process{'es' if processes > 1 else ''}"
        environment = {"NUM_PROCESSES": str(processes)}
        add("mosec", label, *script, package="mosec", path="/inference", environment=environment)
    add("litserve", "LitServe", "{bin}/python", "{here}/litserve_server.py", package="litserve")
    serve = ("{bin}/bentoml", "serve", "bentoml_service:Policy", "--host", "127.0.0.1", "--port", "{port}")
    add("bentoml", "BentoML", *serve, package="bentoml", body={"observation": [OBSERVATION]})
    settings = {
        "name": "actor",
        "implementation": "mlserver_model.Policy",
        "max_batch_size": 64,
        "max_batch_time": 0.001,
    }
    server = {
        "http_port": PORT,
        "grpc_port": PORT + 1,
        "metrics_port": PORT + 2,
        "host": "127.0.0.1",
        "parallel_workers": 0,
        "debug": False,
    }
    files = {"model-settings.json": json.dumps(settings), "settings.json": json.dumps(server)}
    path = "/v2/models/actor/infer"
    add(
        "mlserver",
        "MLServer",
        "{bin}/mlserver",
        "start",
        ".",
        package="mlserver",
        path=path,
        body=MLSERVER,
        files=files,
    )
    add("rayserve", "Ray Serve", "{bin}/python", "{here}/rayserve_server.py", package="ray")
    add("fastapi", "plain FastAPI", "{bin}/python", "{here}/fastapi_server.py", package="fastapi")
    return found


def versions(sides: list[Side]) -> str:
    """Packages and their versions, for the record."""
    shown: dict[str, str] = {}
    for side in sides:
        if side.package is not None and side.package[0] not in shown:
            package, python = side.package
            script = f"from importlib.metadata import version; print(version({package!r}))"
            shown[package] = subprocess.run(
                [python, "-c", script], capture_output=True, text=True, check=True
            ).stdout.strip()
    return ", ".join(f"{package} {number}" for package, number in shown.items())


@contextmanager
def running(side: Side, repository: Path, *, port: int = PORT) -> Iterator[str]:
    """Starts a side in a folder of its own, waits until it acts, and ends it with all its processes; its address."""
    with tempfile.TemporaryDirectory() as name:
        for file, content in side.files.items():
            (Path(name) / file).write_text(content)
        log = Path(name) / "server.log"
        model = repository / "actor" / "1" / "policy.onnx"
        environment = {
            **os.environ,
            "POLICY_FILE": str(model),
            "PORT": str(port),
            "PYTHONPATH": os.pathsep.join([str(HERE / "peers"), os.environ.get("PYTHONPATH", "")]),
            "RAY_USAGE_STATS_ENABLED": "0",
            "BENTOML_DO_NOT_TRACK": "1",
            **side.environment,
        }
        command = [part.replace("{port}", str(port)).replace("{repository}", str(repository)) for part in side.command]
        if "gated_serving" in command:
            environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=name, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        address = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + START_LIMIT_S
            while True:
                try:
                    ask(side, address)
                    break
                except OSError as error:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"{side.name} does not start:\n{log.read_text()[-3000:]}") from error
                    time.sleep(0.2)
            yield address
        finally:
            _end(process)
            if "rayserve" in " ".join(command):
                ray = Path(command[0]).parent / "ray"
                subprocess.run([str(ray), "stop", "--force"], capture_output=True, check=False)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def ask(side: Side, address: str) -> list[float]:
    """One request over a connection of its own; the action.

    Raises:
        OSError: It does not answer, or not with 200.
    """
    request = urllib.request.Request(
        address + side.path, json.dumps(side.body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return side.action_of(json.load(answer))
