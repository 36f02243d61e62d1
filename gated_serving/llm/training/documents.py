"""Where documents come from, and which of them are held out.

Every source gives the same documents in the same order on every run: files are sorted by their path.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import sysconfig
from pathlib import Path
from typing import Any, cast

from datasets import Dataset, Value, load_dataset
from datasets.exceptions import DatasetsError

from gated_serving.llm.training.settings import DataSettings

logger = logging.getLogger(__name__)

_FORMAT_BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_BUILDER_BY_FORMAT = {"jsonl": "json", "parquet": "parquet"}
_TEXT_TYPES = frozenset({"string", "large_string", "string_view"})
_STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def load_documents(settings: DataSettings, cache_dir: Path) -> Dataset:
    """Reads all documents into one dataset with the single column ``text``.

    Args:
        settings: Where they come from.
        cache_dir: Where tables are kept.

    Raises:
        FileNotFoundError: The source names no file.
        ValueError: The tables cannot be read, the text's column is missing or holds no text, or there are fewer than
            two documents.
    """
    kind, files = _locate(settings)
    if kind == "dataset":
        documents = _load(settings, settings.source, settings.dataset_config, split=settings.dataset_split)
    elif kind == "text":
        if settings.max_documents is not None:
            files = files[: settings.max_documents]
        documents = Dataset.from_dict({"text": _read_texts(files)})
    else:
        names = [str(path) for path in files]
        builder = _BUILDER_BY_FORMAT[kind]
        documents = _load(settings, builder, data_files=names, split="train", cache_dir=str(cache_dir))
    field = "text" if kind == "text" else settings.text_field
    if field not in documents.column_names:
        raise ValueError(
            f"data.text_field={field!r}: {settings.source} has no such column; "
            f"it has {', '.join(documents.column_names)}"
        )
    _check_text(documents, field, settings)
    documents = documents.select_columns([field])
    if field != "text":
        documents = documents.rename_column(field, "text")
    if settings.max_documents is not None:
        documents = documents.select(range(min(settings.max_documents, len(documents))))
    documents = documents.filter(lambda text: bool(text and text.strip()), input_columns="text")
    if len(documents) < 2:
        raise ValueError(
            f"data.source={settings.source!r}: found {len(documents)} documents with text, and at least one to train "
            "on and one to hold out are needed"
        )
    return documents


def _load(settings: DataSettings, *args: Any, **kwargs: Any) -> Dataset:
    try:
        return cast("Dataset", load_dataset(*args, **kwargs))
    except StopIteration:
        raise ValueError(f"data.source={settings.source!r}: holds no document") from None
    except DatasetsError as error:
        reason = f"{error} ({error.__cause__})" if error.__cause__ else str(error)
        raise ValueError(f"data.source={settings.source!r}: cannot be read: {reason}") from error


def _check_text(documents: Dataset, field: str, settings: DataSettings) -> None:
    kind = documents.features[field]
    if not isinstance(kind, Value) or kind.dtype not in _TEXT_TYPES:
        raise ValueError(f"data.text_field={field!r}: in {settings.source} this column holds {kind}, not text")


def _read_texts(files: list[Path]) -> list[str]:
    """The files as text; bytes that are not UTF-8 become U+FFFD, with a warning."""
    texts: list[str] = []
    broken: list[Path] = []
    for path in files:
        content = path.read_bytes()
        try:
            texts.append(content.decode("utf-8"))
        except UnicodeDecodeError:
            broken.append(path)
            texts.append(content.decode("utf-8", errors="replace"))
    if broken:
        logger.warning(
            "%d of %d files are not UTF-8, the first is %s; their other bytes are read as U+FFFD. "
            "Narrow data.pattern where they are no text",
            len(broken), len(files), broken[0],
        )  # fmt: skip
    return texts


def is_held_out(text: str, share: float) -> bool:
    """Whether a document is held out: its SHA-256, as a number in [0, 1), lies below ``share``.

    The document alone decides, so neither order nor further documents move it, and copies of it stay on one side.
    """
    digest = hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < share


def split_documents(documents: Dataset, share: float) -> dict[str, Dataset]:
    """Splits documents into ``train`` and ``held_out``.

    Raises:
        ValueError: One side is empty.
    """
    held_out = [is_held_out(text, share) for text in documents["text"]]
    sides = {
        "train": documents.select([i for i, held in enumerate(held_out) if not held]),
        "held_out": documents.select([i for i, held in enumerate(held_out) if held]),
    }
    for side, chosen in sides.items():
        if len(chosen) == 0:
            raise ValueError(
                f"data.held_out_share={share:g}: of {len(documents)} documents none falls to the {side} side; "
                "give more documents or another share"
            )
    return sides


def stdlib_files() -> list[Path]:
    """Source files of the running interpreter's standard library, without tests and installed packages, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [
        path
        for path in root.rglob("*.py")
        if not any(part in _STDLIB_EXCLUDED or part.startswith("config-") for part in path.relative_to(root).parts)
    ]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _locate(settings: DataSettings) -> tuple[str, list[Path]]:
    """The source's format and files."""
    if settings.source == "stdlib" and settings.format == "auto":
        return "text", stdlib_files()
    if settings.format == "dataset":
        return "dataset", []
    path = Path(settings.source).expanduser()
    is_pattern = glob.has_magic(settings.source)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(found for found in path.glob(settings.pattern) if found.is_file())
    elif is_pattern:
        files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())  # noqa: PTH207  # may be absolute
    elif (
        settings.format == "auto" and not path.suffix and not path.is_absolute() and not settings.source.startswith(".")
    ):
        return "dataset", []
    else:
        raise FileNotFoundError(
            f"data.source={settings.source!r}: no such file or folder; "
            "for a Hugging Face dataset set data.format=dataset"
        )
    if not files:
        where = f"pattern {settings.pattern!r} in that folder" if path.is_dir() else "pattern"
        raise FileNotFoundError(f"data.source={settings.source!r}: no file matches the {where}")
    if settings.format != "auto":
        return settings.format, files
    formats = {_FORMAT_BY_SUFFIX.get(file.suffix, "text") for file in files}
    if len(formats) > 1:
        raise ValueError(
            f"data.source={settings.source!r}: mixes {' and '.join(sorted(formats))} files; narrow data.pattern or set "
            "data.format"
        )
    return formats.pop(), files
