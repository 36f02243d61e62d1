from __future__ import annotations

from pathlib import Path

import pytest

from gated_serving.llm.checkpoints import folder as checkpoint_folder
from gated_serving.llm.serving.errors import UsageError
from gated_serving.llm.serving.launch import ready_message, served_name
from gated_serving.llm.serving.model_source import ServedModel, find_folder
from gated_serving.llm.serving.options import ServeSettings
from gated_serving.llm.serving.supervisor import Endpoint


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "pretrained" / "tiny-model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(checkpoint_folder, "SHIPPED_MODELS", folder.parent)
    return folder


def test_a_shipped_model_goes_by_its_short_name(shipped: Path) -> None:
    assert find_folder("tiny-model") == shipped


def test_a_folder_comes_before_a_shipped_model(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-model").mkdir()
    assert find_folder("tiny-model") == tmp_path / "tiny-model" != shipped


def test_what_is_not_there_is_named_along_with_what_is(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shipped.parent)
    with pytest.raises(UsageError, match=r"other/model: no such folder.*tiny-model"):
        find_folder("other/model")


@pytest.mark.parametrize("model", ["~nobody-at-all/model", "x" * 300])
def test_what_can_be_no_folder_is_not_there(model: str) -> None:
    with pytest.raises(UsageError, match="shipped model"):
        find_folder(model)


def test_clients_call_the_model_by_its_folder_unless_told_otherwise() -> None:
    model = ServedModel(folder=Path("/some/where"), name="where", summary="", config={}, weights_bytes=0)
    assert served_name(ServeSettings(model="/some/where"), model) == "where"
    named = ServeSettings(model="/some/where", vllm_options=("--served-model-name", "mine", "other"))
    assert served_name(named, model) == "mine"


def test_the_curl_line_names_address_model_and_key() -> None:
    open_line = ready_message(Endpoint(host="0.0.0.0", port=81), "mine", protected=False, seconds=1.0)
    assert "curl http://127.0.0.1:81/v1/completions" in open_line
    assert '"model": "mine"' in open_line
    assert '"temperature": 0' in open_line
    assert "Authorization" not in open_line
    assert "Authorization: Bearer" in ready_message(
        Endpoint(host="0.0.0.0", port=81), "mine", protected=True, seconds=1.0
    )
