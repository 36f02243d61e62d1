"""Records on disk: whole, cut off, and none."""

from __future__ import annotations

from pathlib import Path

import pytest
from load_records import act_records, chat_record

from loadtest.errors import UsageError
from loadtest.record_file import JSONL_FILE, PARQUET_FILE, Format, RecordWriter, read_records
from loadtest.records import RequestRecord


def some_records() -> list[RequestRecord]:
    failed = RequestRecord("chat", 1.0, 1.0, error="timeout", message='no "answer"\nwithin 1 s ü')
    return [chat_record(0.5, [10.5, 20.25]), failed, *act_records(5)]


@pytest.mark.parametrize(("wanted", "file"), [("jsonl", JSONL_FILE), ("parquet", PARQUET_FILE)])
def test_what_is_written_is_read(tmp_path: Path, wanted: Format, file: str) -> None:
    if wanted == "parquet":
        pytest.importorskip("pyarrow")
    records = some_records()
    with RecordWriter(tmp_path, wanted) as writer:
        writer.write(records[:3])
        writer.write(records[3:])
    assert [path.name for path in tmp_path.iterdir()] == [file]
    assert read_records(tmp_path) == records


def test_no_records_are_a_whole_file_too(tmp_path: Path) -> None:
    with RecordWriter(tmp_path):
        pass
    assert read_records(tmp_path) == []


def test_a_run_that_is_killed_leaves_what_it_had(tmp_path: Path) -> None:
    records = some_records()
    RecordWriter(tmp_path).write(records)
    assert read_records(tmp_path) == records
    path = tmp_path / JSONL_FILE
    path.write_bytes(path.read_bytes()[:-7])  # in the middle of a line
    assert read_records(tmp_path) == records[:-1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (JSONL_FILE, b"{broken}\n", "line 1: is not JSON"),
        (JSONL_FILE, b'{"kind": "act", "colour": "red"}\n', "not records of this release"),
        (PARQUET_FILE, b"PAR1 but not really", "cannot be read"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_records(tmp_path)


def test_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds neither"):
        read_records(tmp_path)
