from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from policy_server.export.errors import ExportError
from policy_server.export.pipeline import ExportOptions, export_policy
from policy_server.export.torch_module import read_torch_module
from policy_server.export.verify import load_session
from policy_server.manifest import MODEL_FILE, Outputs

MODULES = """
import torch
from torch import nn


class Reacher(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 6))

    def forward(self, arm, goal):
        return self.body(torch.cat([arm.flatten(1), goal], dim=1)).reshape(-1, 2, 3)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
        self.layers(torch.zeros(2, 3, 8, 8))

    def forward(self, image):
        return self.layers(image)


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = nn.GRU(4, 4)

    def forward(self, x):
        return self.memory(x)[0]


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


class FixedBatch(nn.Linear):
    def forward(self, x):
        return super().forward(x.reshape(3, 4))


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


made = Reacher(1)


def broken():
    raise RuntimeError("no such robot")


def spoilt():
    module = nn.Linear(4, 2)
    with torch.no_grad():
        module.bias[0] = float("inf")
    return module


def branching():
    return Branching(4, 2)


def fixed_batch():
    return FixedBatch(4, 2)


def pair():
    return Pair(4, 2)


def number():
    return 3
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "robot_modules.py").write_text(MODULES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "robot_modules", raising=False)


def read(name: str, *observation: str, low: str | None = None, high: str | None = None) -> Any:
    return read_torch_module(f"robot_modules:{name}", observation=observation, low=low, high=high)


def test_a_module_exports_with_a_free_batch_and_its_weights_inside(tmp_path: Path) -> None:
    policy = read("Reacher", "arm=2x3", "goal=2", low="-0.1", high="0.1")
    folder, manifest = export_policy(policy, tmp_path / "policies", ExportOptions())
    assert sorted(path.name for path in folder.iterdir()) == ["policy.json", "policy.onnx"]
    assert manifest.action.shape == (2, 3)
    model = onnx.load(folder / MODEL_FILE)
    onnx.checker.check_model(model, full_check=True)
    assert str(tmp_path).encode() not in model.SerializeToString()
    module = __import__("robot_modules").Reacher().eval()
    rng = np.random.default_rng(0)
    for batch in (1, 2, 33):
        arm, goal = (rng.normal(0, 2, (batch, *shape)).astype(np.float32) for shape in ((2, 3), (2,)))
        found = load_session(folder / MODEL_FILE).run(None, {"arm": arm, "goal": goal})[0]
        with torch.no_grad():
            expected = module(torch.from_numpy(arm), torch.from_numpy(goal)).clamp(-0.1, 0.1).numpy()
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_module_that_is_there_already_is_taken_as_it_is(tmp_path: Path) -> None:
    folder, manifest = export_policy(read("made", "arm=6", "goal=2"), tmp_path / "policies", ExportOptions())
    assert folder.parent.name == "made"
    assert manifest.action.low is None
    assert manifest.architecture.num_parameters == 8 * 16 + 16 + 16 * 6 + 6


def test_images_go_in_as_they_are(tmp_path: Path) -> None:
    folder, _ = export_policy(read("Convolution", "image=3x8x8"), tmp_path / "policies", ExportOptions())
    assert load_session(folder / MODEL_FILE).get_inputs()[0].shape == ["batch", 3, 8, 8]


@pytest.mark.parametrize(
    ("name", "observation", "message"),
    [
        ("Remembering", ("x=4",), r"recurrent \(GRU\)"),
        ("spoilt", ("x=4",), "bias holds NaN or infinity"),
        ("broken", ("x=4",), "RuntimeError: no such robot"),
        ("number", ("x=4",), "gives a int, not a torch.nn.Module"),
        ("pair", ("x=4",), "gives a tuple; its forward must give the action alone"),
        ("absent", ("x=4",), "cannot be imported"),
        ("Reacher", (), "--observation observation=10"),
        ("Reacher", ("arm",), "must be name=size"),
        ("Reacher", ("arm=2x0",), "must be name=size"),
        ("Reacher", ("arm=6", "arm=2"), "'arm' is taken"),
        ("Reacher", ("arm=6", "noise=2"), "'noise' is taken"),
        ("Reacher", ("arm=6", "goal=3"), r"forward fails on arm \[B, 6\], goal \[B, 3\]"),
    ],
)
def test_what_cannot_be_exported_is_refused(name: str, observation: tuple[str, ...], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        read(name, *observation)


@pytest.mark.parametrize(
    ("name", "message"),
    [("branching", "cannot export this module with a free batch"), ("fixed_batch", "it must take any batch")],
)
def test_a_module_without_a_free_batch_is_not_written(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        export_policy(read(name, "x=4"), tmp_path / "policies", ExportOptions())
    assert not (tmp_path / "policies").exists()


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        ("a", None, "--action-low 'a'"),
        ("1", "0", r"low\[0\]=1.0 is above high\[0\]=0.0"),
        ("0,0", None, "needs 6 numbers"),
    ],
)
def test_wrong_bounds_are_refused(low: str, high: str | None, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        read("Reacher", "arm=6", "goal=2", low=low, high=high)


def test_a_module_has_no_distribution(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="Reacher is deterministic"):
        export_policy(read("Reacher", "arm=6", "goal=2"), tmp_path, ExportOptions(outputs=Outputs.DISTRIBUTION))
