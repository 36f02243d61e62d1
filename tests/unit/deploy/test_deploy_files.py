"""The image and the compose files: linted, and true to the tree that they are built from."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from policy_server.metrics import Metrics

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
TARGETS = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)


def _tool(name: str) -> str:
    path = shutil.which(name, path=str(Path(sys.executable).parent))
    assert path is not None, f"{name} comes with the extra dev"
    return path


def test_hadolint_finds_nothing() -> None:
    result = subprocess.run([_tool("hadolint"), ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_yamllint_finds_nothing() -> None:
    rules = "{extends: default, rules: {line-length: {max: 120}, document-start: disable, comments: disable}}"
    result = subprocess.run(
        [_tool("yamllint"), "--strict", "-d", rules, DEPLOY], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "")


def test_both_servers_have_a_target_that_is_not_root_and_has_a_health_check() -> None:
    assert {"llm", "policy"} <= set(TARGETS)
    for name in ("llm", "policy"):
        stage = DOCKERFILE.split(f" AS {name}\n")[1].split("\nFROM ")[0]
        assert re.search(r"^USER (?!0\b|root\b)\S+$", stage, re.MULTILINE), name
        assert re.search(r"^HEALTHCHECK ", stage, re.MULTILINE), name
        assert re.search(r"^VOLUME /models$", stage, re.MULTILINE), name


def test_what_the_image_copies_is_there_and_reaches_the_builder() -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
        for source in [word for word in line.split() if not word.startswith("--")][:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        kept = False
        for pattern in patterns:  # the last pattern that fits wins
            if fnmatch.fnmatch(source.split("/")[0], pattern.lstrip("!")) or fnmatch.fnmatch(
                source, pattern.lstrip("!")
            ):
                kept = pattern.startswith("!")
        assert kept, f"{source}: .dockerignore keeps it from the builder"


def test_every_package_of_the_wheel_is_copied() -> None:
    import tomllib

    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
        "packages"
    ]
    for package in packages:
        assert re.search(rf"^COPY {package.split('/')[0]} ", DOCKERFILE, re.MULTILINE), package


def test_compose_builds_the_targets_and_mounts_files_that_are_there() -> None:
    assert {"llm", "policy", "prometheus", "grafana"} == set(COMPOSE["services"])
    for name, service in COMPOSE["services"].items():
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / "Dockerfile").resolve() == ROOT / "Dockerfile"
            assert service["build"]["target"] in TARGETS
        else:
            assert re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", service["image"]), f"{name}: the image has no fixed version"
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), f"{name}: {port} is published to the network"
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), source
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"], source


@pytest.mark.skipif(shutil.which("docker") is None, reason="needs the docker command (its client is enough)")
def test_docker_compose_accepts_the_file() -> None:
    command = ["docker", "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "is not a docker command" in result.stderr or "unknown shorthand flag" in result.stderr:
        pytest.skip("this docker has no compose plugin")
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
def test_promtool_accepts_the_configuration() -> None:
    for command, file in (("config", "prometheus.yml"), ("rules", "alerts.yml")):
        result = subprocess.run(
            ["promtool", "check", command, str(DEPLOY / "prometheus" / file)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr + result.stdout


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads((DEPLOY / "grafana/dashboards/gated-serving.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels:
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "prometheus"}
        assert all(target["expr"] for target in panel["targets"])


def test_every_policy_metric_that_is_drawn_or_watched_is_exposed() -> None:
    exposed = re.findall(r"^# TYPE (\S+)", Metrics().render().decode(), re.MULTILINE)
    texts = [
        (DEPLOY / "grafana/dashboards/gated-serving.json").read_text(),
        (DEPLOY / "prometheus/alerts.yml").read_text(),
    ]
    used = set(re.findall(r"policy_[a-z_]+(?=[\[{ )]|$)", " ".join(texts), re.MULTILINE))
    assert len(used) >= 5
    for name in used:
        family = re.sub(r"_(bucket|count|sum)$", "", name)
        assert family in exposed or name in exposed, name
