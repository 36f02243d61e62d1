from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset

from gated_serving.llm.training.documents import is_held_out, load_documents, split_documents, stdlib_files
from gated_serving.llm.training.settings import DataSettings

TEXTS = ["alpha\n\nbeta\n", "gamma ünïcode", "delta\n"]


def load(tmp_path: Path, **settings: object) -> list[str]:
    return list(load_documents(DataSettings(**settings), tmp_path / "cache")["text"])  # pyright: ignore[reportArgumentType]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    for name, text in zip(["a.py", "b.py", "sub/c.py"], TEXTS, strict=True):
        (folder / name).write_text(text)
    (folder / "d.md").write_text("not python")
    return folder


def test_a_folder_is_read_in_the_order_of_its_paths(folder: Path, tmp_path: Path) -> None:
    assert load(tmp_path, source=str(folder), pattern="**/*.py") == TEXTS


def test_a_glob_pattern(folder: Path, tmp_path: Path) -> None:
    assert load(tmp_path, source=f"{folder}/*.py") == TEXTS[:2]


def test_jsonl_with_a_named_column(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"content": text, "other": 1}) + "\n" for text in TEXTS))
    assert load(tmp_path, source=str(path), text_field="content") == TEXTS


def test_parquet(tmp_path: Path) -> None:
    Dataset.from_dict({"text": TEXTS}).to_parquet(tmp_path / "data.parquet")
    assert load(tmp_path, source=str(tmp_path / "data.parquet")) == TEXTS


def test_a_dataset_as_load_dataset_finds_it(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    Dataset.from_dict({"text": TEXTS}).to_parquet(tmp_path / "set" / "train.parquet")
    assert load(tmp_path, source=str(tmp_path / "set"), format="dataset") == TEXTS


def test_empty_documents_are_left_out_and_the_number_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [TEXTS[0], " \n", *TEXTS[1:]]))
    assert load(tmp_path, source=str(path), max_documents=3) == TEXTS[:2]


def test_stdlib_is_the_library_alone() -> None:
    files = stdlib_files()
    names = {path.name for path in files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any({"test", "site-packages", "__pycache__"} & set(path.parts) for path in files)
    assert files == stdlib_files()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"source": "/no/such/place"}, FileNotFoundError, "no such file or folder"),
        ({"source": "{folder}", "pattern": "*.rst"}, FileNotFoundError, r"no file matches the pattern '\*.rst'"),
        ({"source": "{folder}/d.md"}, ValueError, "found 1 documents"),
        ({"source": "{jsonl}", "text_field": "body"}, ValueError, "data.text_field='body'.*it has text"),
        ({"source": "{folder}/mixed"}, ValueError, "mixes jsonl and text files"),
        ({"source": "{folder}/empty.jsonl"}, ValueError, "empty.jsonl'"),
        ({"source": "{folder}/numbers.jsonl"}, ValueError, "data.text_field='text': in .* not text"),
        ({"source": "{folder}/lists.jsonl"}, ValueError, "data.text_field='text': in .* not text"),
        ({"source": "{folder}/torn.jsonl"}, ValueError, "torn.jsonl': cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named(
    settings: dict[str, str], error: type[Exception], message: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (folder / "mixed").mkdir()
    (folder / "mixed" / "a.py").write_text("pass")
    (folder / "mixed" / "b.jsonl").write_text("{}")
    (folder / "empty.jsonl").touch()
    (folder / "numbers.jsonl").write_text('{"text": 1}\n{"text": 2}\n')
    (folder / "lists.jsonl").write_text('{"text": ["a"]}\n{"text": ["b"]}\n')
    (folder / "torn.jsonl").write_text('{"text": "a"}\n{"text": "b\n')
    filled = {name: v.format(folder=folder, jsonl=tmp_path / "data.jsonl") for name, v in settings.items()}
    with pytest.raises(error, match=message):
        load(tmp_path, **filled)


def test_files_that_are_not_utf_8_are_read_with_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "a.py").write_bytes(b"caf\xe9")
    assert load(tmp_path, source=str(folder), pattern="**/*.py")[0] == "caf\ufffd"
    assert [message for message in caplog.messages if "1 of 3 files are not UTF-8" in message and "a.py" in message]


def test_a_document_keeps_its_side_whatever_stands_around_it() -> None:
    texts = [f"document {number}" for number in range(2000)]
    sides = split_documents(Dataset.from_dict({"text": texts}), 0.1)
    held_out = set(sides["held_out"]["text"])
    assert 130 < len(held_out) < 270
    assert not held_out & set(sides["train"]["text"])
    again = split_documents(Dataset.from_dict({"text": [*reversed(texts), "one more", texts[0]]}), 0.1)
    assert held_out - {"one more"} == set(again["held_out"]["text"]) - {"one more"}
    assert all(is_held_out(text, 0.2) for text in held_out)


def test_a_split_with_an_empty_side_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data.held_out_share=1e-09: of 2 documents none falls to the held_out side"):
        split_documents(Dataset.from_dict({"text": ["a", "b"]}), 1e-9)
