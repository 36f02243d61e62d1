"""The shipped policy: what it says of itself, that the command makes the same of its checkpoint, and that it works."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from typer.testing import CliRunner

from gated_serving.cli import app
from policy_server.manifest import check_files, read_manifest

ROOT = Path(__file__).parents[3]
EXPORTED = ROOT / "policy_server" / "pretrained" / "fetch-reach" / "1"
CHECKPOINT = ROOT / "gated_serving" / "rl" / "pretrained" / "fetch-reach"


def test_manifest_fits_its_files_and_tells_what_was_reached():
    manifest = read_manifest(EXPORTED)

    check_files(EXPORTED, manifest)
    assert manifest.training.environment == "FetchReach-v4"
    assert manifest.training.num_evaluation_episodes == 100
    assert manifest.training.success_rate is not None
    assert manifest.training.success_rate >= 0.95
    assert manifest.architecture.depth is not None
    assert manifest.architecture.depth >= 32
    assert sum(path.stat().st_size for folder in (EXPORTED, CHECKPOINT) for path in folder.iterdir()) < 20e6


def test_command_makes_the_shipped_file_of_the_shipped_checkpoint(tmp_path):
    result = CliRunner().invoke(app, ["export-policy", str(CHECKPOINT), str(tmp_path), "--outputs", "distribution"])

    assert result.exit_code == 0, result.output
    rng = np.random.default_rng(0)
    feeds = {
        "observation": rng.normal(size=(5, 10)).astype(np.float32),
        "desired_goal": rng.normal(size=(5, 3)).astype(np.float32),
        "noise": rng.normal(size=(5, 4)).astype(np.float32),
    }
    actions = [
        onnxruntime.InferenceSession(folder / "policy.onnx", providers=["CPUExecutionProvider"]).run(["action"], feeds)
        for folder in (EXPORTED, tmp_path / "fetch-reach" / "1")
    ]
    np.testing.assert_array_equal(actions[0], actions[1])


def test_exported_file_succeeds_by_onnxruntime_alone():
    pytest.importorskip("gymnasium_robotics")

    output = subprocess.run(
        [sys.executable, ROOT / "tests" / "play_policy.py", EXPORTED, "100"],
        check=True, capture_output=True, text=True, timeout=300,
    ).stdout  # fmt: skip

    assert json.loads(output.splitlines()[-1])["num_successes"] >= 95


def test_without_onnx_the_command_says_what_to_install():
    code = "import sys; sys.modules['onnx'] = None; from gated_serving.cli import main; main()"

    result = subprocess.run(
        [sys.executable, "-c", code, "export-policy", CHECKPOINT, "nowhere"],
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert result.returncode == 1
    assert "onnx is not installed: pip install 'gated-serving[train]'" in result.stderr
