"""What the image's policy target does, replayed without Docker: its pip command, its command, its health check.

The extra is installed into an empty environment at the image's constraints, measured, and its server asked for an
action of the shipped policy.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STAGE = (ROOT / "Dockerfile").read_text().split(" AS policy\n")[1].split("\nFROM ")[0]
REQUIREMENTS_LIMIT_MB = 200
START_LIMIT_S = 120

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that holds what the image's pip command installs, and nothing else."""
    folder = tmp_path_factory.mktemp("image")
    install = re.search(r"pip install (?P<flags>.*?) --constraint \S+ \"\$\(echo /wheels/\*\.whl\)\[policy\]\"", STAGE)
    assert install is not None, "the Dockerfile's pip command is another one; this test replays it"
    venv.create(folder / "venv", with_pip=True)
    pip = [str(folder / "venv/bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheels = folder / "wheels"
    _run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)])
    (wheel,) = wheels.glob("*.whl")
    constraints = ROOT / "constraints" / "policy.txt"
    _run([*pip, "install", *install["flags"].split(), "--constraint", str(constraints), f"{wheel}[policy]"])
    return folder / "venv"


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode and re.search(r"NewConnectionError|Temporary failure in name resolution", result.stderr):
        pytest.skip(f"no package index can be reached: {result.stderr.splitlines()[-1]}")
    assert result.returncode == 0, result.stderr


def _environment_variables() -> dict[str, str]:
    declared = dict(re.findall(r"(GATED_SERVING_\w+)=(\S+)", STAGE))
    assert declared["GATED_SERVING_POLICY_REPOSITORY"] == "/models"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    return {**clean, "PYTHONDONTWRITEBYTECODE": "1", **declared}


def test_its_requirements_take_less_than_200_mb(environment: Path) -> None:
    (packages,) = environment.glob("lib/python3*/site-packages")
    not_counted = ("pip", "setuptools", "pkg_resources", "_distutils_hack")  # the environment's own, not requirements
    sizes = {
        path.name: sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        if path.is_dir()
        else path.stat().st_size
        for path in packages.iterdir()
        if not path.name.startswith(not_counted)
    }
    assert "onnxruntime" in sizes
    assert "torch" not in sizes
    assert sum(sizes.values()) < REQUIREMENTS_LIMIT_MB * 1e6, sorted(sizes.items(), key=lambda item: -item[1])[:10]


@pytest.fixture(scope="module")
def server(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The image's command in that environment, on a free port and the shipped policies; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("run")
    log = folder / "server.log"
    command = json.loads(re.search(r"^CMD (\[.*\])$", STAGE, re.MULTILINE)[1])  # pyright: ignore
    entry = json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", STAGE, re.MULTILINE)[1])  # pyright: ignore
    variables = {
        **_environment_variables(),
        "GATED_SERVING_POLICY_REPOSITORY": str(ROOT / "policy_server" / "pretrained"),
        "GATED_SERVING_POLICY_HOST": "127.0.0.1",
    }
    with log.open("w") as file:
        process = subprocess.Popen(
            [str(environment / "bin" / entry[0]), *command, "--port", str(port)],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=variables,
        )
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not _healthy(environment, port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()


def _healthy(environment: Path, port: int) -> bool:
    check = json.loads(re.search(r"HEALTHCHECK .*?CMD (\[.*?\])$", STAGE, re.MULTILINE | re.DOTALL)[1])  # pyright: ignore
    command = [str(environment / "bin" / check[0]), *check[1:]]
    command[-1] = command[-1].replace(":8100/", f":{port}/")
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_its_server_becomes_healthy_and_acts(server: int) -> None:
    observation = {"observation": [0.0] * 10, "desired_goal": [0.1, 0.2, 0.3]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server}/v1/policies/fetch-reach/act",
        data=json.dumps({"observation": observation}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        action = json.load(answer)["action"]
    assert len(action) == 4
    assert all(-1 <= value <= 1 for value in action)


def test_torch_is_not_even_looked_for(environment: Path) -> None:
    script = (
        "import sys; import policy_server.app, policy_server.worker; print([m for m in sys.modules if m == 'torch'])"
    )
    result = subprocess.run(
        [str(environment / "bin/python"), "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=_environment_variables(),
    )
    assert result.stdout.strip() == "[]"
