from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from policy_checkpoint import make_policy_checkpoint

from policy_server.export import pipeline
from policy_server.export.errors import ExportError
from policy_server.export.pipeline import ExportOptions, export_policy
from policy_server.export.policy import TrainedPolicy
from policy_server.export.residual_actor import read_residual_actor
from policy_server.export.sources import SourceOptions, read_source
from policy_server.manifest import read_manifest


@pytest.fixture
def policy(tmp_path: Path) -> TrainedPolicy:
    return read_residual_actor(make_policy_checkpoint(tmp_path / "run"))


def test_a_version_is_numbered_after_the_highest_there_is(policy: TrainedPolicy, tmp_path: Path) -> None:
    repository = tmp_path / "policies"
    first, _ = export_policy(policy, repository, ExportOptions())
    given, _ = export_policy(policy, repository, ExportOptions(version=12))
    (repository / "fetch-reach" / "notes").mkdir()
    third, manifest = export_policy(policy, repository, ExportOptions())
    assert [first.name, given.name, third.name] == ["1", "12", "13"]
    assert manifest.version == read_manifest(third).version == 13


def test_versions_of_one_name_read_and_give_the_same(policy: TrainedPolicy, tmp_path: Path) -> None:
    export_policy(policy, tmp_path / "policies", ExportOptions(name="arm"))
    wider = policy.action.model_copy(update={"shape": (policy.action.size + 1,)})
    with pytest.raises(ExportError, match=r"arm/1 reads .* give another --name"):
        export_policy(replace(policy, action=wider), tmp_path / "policies", ExportOptions(name="arm"))
    assert [entry.name for entry in (tmp_path / "policies" / "arm").iterdir()] == ["1"]


def test_a_run_s_own_folder_means_its_best_checkpoint(tmp_path: Path) -> None:
    make_policy_checkpoint(tmp_path / "run" / "checkpoints" / "best")
    assert read_source(str(tmp_path / "run"), SourceOptions()).architecture.name == "residual_gaussian"


def test_a_version_is_never_overwritten(policy: TrainedPolicy, tmp_path: Path) -> None:
    folder, _ = export_policy(policy, tmp_path, ExportOptions(version=2))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ExportError, match=r"2 exists, and a version is never overwritten"):
        export_policy(policy, tmp_path, ExportOptions(version=2))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_version_that_appears_meanwhile_is_not_overwritten(
    policy: TrainedPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "policies" / "fetch-reach" / "1"
    numbered = pipeline.sha256

    def appears(path: Path) -> str:
        other.mkdir(parents=True, exist_ok=True)
        (other / "mine").write_text("other")
        return numbered(path)

    monkeypatch.setattr(pipeline, "sha256", appears)
    with pytest.raises(ExportError, match="never overwritten"):
        export_policy(policy, tmp_path / "policies", ExportOptions(version=1))
    folder, _ = export_policy(policy, tmp_path / "policies", ExportOptions())
    assert folder.name == "2"
    assert (other / "mine").read_text() == "other"


def test_an_export_leaves_nothing_but_its_folder(policy: TrainedPolicy, tmp_path: Path) -> None:
    repository = tmp_path / "deep" / "policies"
    export_policy(policy, repository, ExportOptions())
    assert [path.name for path in repository.iterdir()] == ["fetch-reach"]
    assert [path.name for path in (repository / "fetch-reach").iterdir()] == ["1"]


def test_the_same_checkpoint_gives_the_same_bytes(policy: TrainedPolicy, tmp_path: Path) -> None:
    folders = [export_policy(policy, tmp_path / name, ExportOptions())[0] for name in ("a", "b")]
    for file in ("policy.onnx", "policy.json"):
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes()


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "with space", "../a", "a" * 129, "ä"])
def test_a_name_that_is_no_folder_is_refused(name: str, policy: TrainedPolicy, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="--name"):
        export_policy(policy, tmp_path / "policies", ExportOptions(name=name))
    assert not (tmp_path / "policies").exists()


def test_a_repository_that_is_a_file_is_refused(policy: TrainedPolicy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="cannot be written to"):
        export_policy(policy, tmp_path / "file", ExportOptions())


@pytest.mark.parametrize(("options", "message"), [({"version": 0}, "count from 1"), ({"version": -3}, "count from 1")])
def test_a_version_below_one_is_refused(
    options: dict[str, int], message: str, policy: TrainedPolicy, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        export_policy(policy, tmp_path, ExportOptions(**options))


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ExportError, match="--tolerance 0"):
        ExportOptions(tolerance=0)
    with pytest.raises(ExportError, match="--tolerance inf"):
        ExportOptions(tolerance=float("inf"))
    with pytest.raises(ExportError, match="--episodes -1"):
        ExportOptions(num_episodes=-1)
