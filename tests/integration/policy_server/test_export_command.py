from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import onnxruntime
import pytest
from policy_checkpoint import edit_record, make_policy_checkpoint
from stable_baselines3 import SAC
from typer.testing import CliRunner

from gated_serving.cli import app
from policy_server.export import pipeline
from policy_server.manifest import read_manifest

RUNNER = CliRunner()
MAX_EXTRA_BYTES = 1.5e9
# Peak memory over what the process had after its imports, for the graph and its file.
BUILD = """
import sys
from pathlib import Path
from policy_server.export.pipeline import write_model
from policy_server.export.residual_actor import read_residual_actor
from policy_server.manifest import Outputs

def peak_bytes():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024

before = peak_bytes()
write_model(read_residual_actor(Path(sys.argv[1])).build_graph(Outputs.ACTION), Path(sys.argv[2]))
print(peak_bytes() - before)
"""


def test_a_checkpoint_becomes_a_folder_that_onnxruntime_runs_alone(tmp_path: Path) -> None:
    checkpoint = make_policy_checkpoint(tmp_path / "best", depth=8, normalizer=True)
    result = RUNNER.invoke(app, ["export-policy", str(checkpoint), str(tmp_path / "policies"), "--name", "reach"])
    assert result.exit_code == 0, result.stderr
    folder = tmp_path / "policies" / "reach" / "1"
    assert f"wrote {folder}: residual_gaussian, depth 8, width 32, fp32" in result.stdout
    assert "largest error against torch in float64" in result.stdout
    session = onnxruntime.InferenceSession(folder / "policy.onnx", providers=["CPUExecutionProvider"])
    inputs = {"observation": np.ones((5, 10), np.float32), "desired_goal": np.ones((5, 3), np.float32)}
    (action,) = session.run(None, inputs)
    assert action.shape == (5, 4)


def test_running_the_exported_file_needs_neither_torch_nor_this_project(tmp_path: Path) -> None:
    checkpoint = make_policy_checkpoint(tmp_path / "best")
    RUNNER.invoke(app, ["export-policy", str(checkpoint), str(tmp_path)])
    code = (
        "import sys, json, numpy, onnxruntime; folder = sys.argv[1]; fields = json.load(open(folder + '/policy.json'))"
        "['observation']; session = onnxruntime.InferenceSession(folder + '/policy.onnx'); "
        "action = session.run(None, {f['name']: numpy.ones([2, *f['shape']], f['dtype']) for f in fields})[0]; "
        "assert not {'torch', 'gated_serving', 'policy_server'} & set(sys.modules); print(action.shape)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "fetch-reach" / "1")], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "(2, 4)"


def test_versions_count_up_and_are_never_overwritten(tmp_path: Path) -> None:
    arguments = ["export-policy", str(make_policy_checkpoint(tmp_path / "best")), str(tmp_path / "policies")]
    assert [RUNNER.invoke(app, arguments).exit_code for _ in range(2)] == [0, 0]
    assert sorted(path.name for path in (tmp_path / "policies" / "fetch-reach").iterdir()) == ["1", "2"]
    result = RUNNER.invoke(app, [*arguments, "--policy-version", "2"])
    assert result.exit_code == 1
    assert "a version is never overwritten" in result.stderr


def test_a_stable_baselines3_model_goes_through_the_same_command(tmp_path: Path) -> None:
    SAC("MlpPolicy", gymnasium.make("Pendulum-v1"), device="cpu", policy_kwargs={"net_arch": [8]}).save(tmp_path / "p")
    result = RUNNER.invoke(
        app,
        ["export-policy", str(tmp_path / "p.zip"), str(tmp_path), "--environment", "Pendulum-v1", "--control-period",
         "0.05", "--outputs", "distribution"],
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    manifest = read_manifest(tmp_path / "p" / "1")
    assert manifest.training.environment == "Pendulum-v1"
    assert manifest.control_period_s == 0.05
    assert manifest.distribution is not None
    assert manifest.action.high == (2.0,)


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (["--precision", "int3"], 2, "--precision 'int3': must be one of fp32, fp16, int8"),
        (["--engine", "coreml"], 2, "--engine 'coreml': must be one of onnx, tensorrt"),
        (["--outputs", "all"], 2, "--outputs 'all'"),
        (["--vec-normalize", "x.pkl"], 1, "--vec-normalize is not for a checkpoint folder"),
        (["--observation", "x=3"], 1, "--observation is not for a checkpoint folder"),
        (["--config", "x"], 1, "--config is not for a checkpoint folder"),
        (["--tolerance", "1e-13"], 1, "above the tolerance 1e-13; nothing was written"),
        (["--control-period", "-1"], 1, "--control-period -1.0"),
    ],
)
def test_a_wrong_option_is_named(options: list[str], exit_code: int, message: str, tmp_path: Path) -> None:
    checkpoint = make_policy_checkpoint(tmp_path / "best")
    result = RUNNER.invoke(app, ["export-policy", str(checkpoint), str(tmp_path / "policies"), *options])
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "policies").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "no such file or folder; give a checkpoint folder of train-rl"),
        ("empty", "checkpoint.json: cannot be read (No such file or directory); give a folder such as"),
        ("notes.txt", "is no policy that can be exported; give a checkpoint folder"),
        ("old", "checkpoint.json: format_version: Input should be 1"),
        ("model.zip", "cannot be read (BadZipFile"),
        ("model.pt", "cannot be read without running code"),
        ("no_such_package:actor", "cannot be imported"),
    ],
)
def test_what_is_no_policy_is_refused_with_2(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for file in ("notes.txt", "model.zip", "model.pt"):
        (tmp_path / file).write_text("something")
    edit_record(make_policy_checkpoint(tmp_path / "old"), format_version=0)
    source = name if ":" in name else str(tmp_path / name)
    options = ["--observation", "x=3"] if ":" in name else []
    result = RUNNER.invoke(app, ["export-policy", source, str(tmp_path / "policies"), *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "policies").exists()


@pytest.mark.parametrize(
    ("file", "module", "package"),
    [("model.zip", "stable_baselines3", "stable-baselines3"), ("model.pt", "rsl_rl", "rsl-rl-lib")],
)
def test_a_missing_package_is_named(
    file: str, module: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).write_text("")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else found(name))
    result = RUNNER.invoke(app, ["export-policy", str(tmp_path / file), str(tmp_path / "policies")])
    assert result.exit_code == 1
    assert f"pip install {package}" in result.stderr


def test_an_interrupted_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "verify", interrupt)
    checkpoint = make_policy_checkpoint(tmp_path / "best")
    result = RUNNER.invoke(app, ["export-policy", str(checkpoint), str(tmp_path / "policies")])
    assert result.exit_code == 130
    assert "nothing was written" in result.stderr
    assert not (tmp_path / "policies").exists()


def test_a_deep_actor_is_written_in_little_memory(tmp_path: Path) -> None:
    checkpoint = make_policy_checkpoint(tmp_path / "best", depth=1024, width=256)
    result = subprocess.run(
        [sys.executable, "-c", BUILD, str(checkpoint), str(tmp_path / "policy.onnx")],
        capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert json.loads(result.stdout) < MAX_EXTRA_BYTES
    assert (tmp_path / "policy.onnx").stat().st_size > 4 * 1024 * 256 * 256
