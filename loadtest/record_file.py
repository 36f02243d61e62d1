"""The requests of a run on disk: JSON lines while it runs, Parquet when it has ended and pyarrow is there.

A run that is killed leaves the lines it had; a Parquet file has its footer at the end and would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import orjson

from loadtest.errors import UsageError
from loadtest.records import RequestRecord

JSONL_FILE = "records.jsonl"
PARQUET_FILE = "records.parquet"
Format = Literal["auto", "jsonl", "parquet"]

_FIELDS = tuple(field.name for field in fields(RequestRecord))
_ROWS_OF_A_GROUP = 100_000


def check_format(wanted: Format) -> None:
    """Whether records can be written so.

    Raises:
        UsageError: Parquet was asked for and pyarrow is not there.
    """
    if wanted == "parquet" and find_spec("pyarrow") is None:
        raise UsageError("records='parquet': pyarrow is not installed: pip install pyarrow, or ask for jsonl")


class RecordWriter:
    """Writes records as they come; closing makes the file that was asked for.

    Args:
        folder: Where to.
        wanted: ``auto`` is Parquet where pyarrow is installed.
    """

    def __init__(self, folder: Path, wanted: Format = "auto") -> None:
        check_format(wanted)
        self._folder = folder
        self._parquet = wanted == "parquet" or (wanted == "auto" and find_spec("pyarrow") is not None)
        for name in (JSONL_FILE, PARQUET_FILE):
            (folder / name).unlink(missing_ok=True)
        self._file = (folder / JSONL_FILE).open("wb")

    def write(self, records: Iterable[RequestRecord]) -> None:
        """Appends records; they are on their way to the disk when this returns."""
        self.write_lines(as_lines(records))

    def write_lines(self, lines: bytes) -> None:
        """Appends records that are lines already."""
        self._file.write(lines)
        self._file.flush()

    def read(self) -> list[RequestRecord]:
        """What was written so far."""
        return list(_read_lines(self._folder / JSONL_FILE))

    def close(self) -> Path:
        """Ends the file; its path."""
        self._file.close()
        lines = self._folder / JSONL_FILE
        if not self._parquet:
            return lines
        path = self._folder / PARQUET_FILE
        partial = path.with_suffix(".partial")
        _write_parquet(partial, _read_lines(lines))
        partial.replace(path)
        lines.unlink()
        return path

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        if not self._file.closed:
            self.close()


def as_lines(records: Iterable[RequestRecord]) -> bytes:
    """Records as they lie in the file, and as they travel between processes."""
    return b"".join(map(as_line, records))


def as_line(record: RequestRecord) -> bytes:
    """One record, its line's end included."""
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def read_records(folder: Path) -> list[RequestRecord]:
    """The records in an output folder.

    Raises:
        UsageError: There are none, or they cannot be read.
    """
    parquet, lines = folder / PARQUET_FILE, folder / JSONL_FILE
    if parquet.exists():
        check_format("parquet")
        import pyarrow
        from pyarrow import parquet as pq

        try:
            rows: list[dict[str, Any]] = pq.read_table(parquet).to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            raise UsageError(f"{parquet}: cannot be read ({error})") from None
        return [_record_of(row, parquet) for row in rows]
    if lines.exists():
        return list(_read_lines(lines))
    raise UsageError(f"{folder}: holds neither {PARQUET_FILE} nor {JSONL_FILE}; name an --output folder of a load test")


def _read_lines(path: Path) -> Iterator[RequestRecord]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # a run that was killed while it wrote
                return
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise UsageError(f"{path}, line {number}: is not JSON ({error})") from None
            yield _record_of(row, path)


def _record_of(row: Any, path: Path) -> RequestRecord:
    try:
        return RequestRecord(**row)
    except TypeError as error:
        raise UsageError(f"{path}: not records of this release ({error})") from None


def _write_parquet(path: Path, records: Iterator[RequestRecord]) -> None:
    import pyarrow as pa
    from pyarrow import parquet as pq

    number, text, integer = pa.float64(), pa.string(), pa.int64()
    types = {"itl_ms": pa.list_(number), "deadline_missed": pa.bool_(), "warmup": pa.bool_()}
    types |= dict.fromkeys(("kind", "error", "message", "tokens_from"), text)
    types |= {name: number for name in _FIELDS if name.endswith(("_ms", "_s")) and name not in types}
    schema = pa.schema([(name, types.get(name, integer)) for name in _FIELDS])
    with pq.ParquetWriter(path, schema) as writer:
        group: list[RequestRecord] = []
        for record in records:
            group.append(record)
            if len(group) == _ROWS_OF_A_GROUP:
                writer.write_table(_table(group, schema))
                group = []
        writer.write_table(_table(group, schema))


def _table(records: Sequence[RequestRecord], schema: Any) -> Any:
    import pyarrow as pa

    return pa.table({name: [getattr(record, name) for record in records] for name in _FIELDS}, schema=schema)


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
