"""What lies in a repository of policies; looks at names and times only, and imports no engine."""

from __future__ import annotations

import logging
from pathlib import Path

from policy_server.manifest import is_policy_name
from policy_server.settings import OVERRIDES_FILE

logger = logging.getLogger(__name__)


class LoadError(Exception):
    """A version cannot be served; the message names file and field and says what to do."""


def scan(repository: Path) -> dict[str, dict[int, Path]]:
    """Every version folder by name and number; other names, and what begins with a dot, are left out.

    Raises:
        LoadError: The repository cannot be read.
    """
    found: dict[str, dict[int, Path]] = {}
    try:
        names = [path for path in repository.iterdir() if is_policy_name(path.name) and path.is_dir()]
    except OSError as error:
        raise LoadError(f"{repository}: cannot be read ({error.strerror})") from error
    for path in sorted(names):
        try:
            entries = list(path.iterdir())
        except OSError as error:
            logger.warning("%s: cannot be read (%s)", path, error.strerror)
            continue
        versions = {int(entry.name): entry for entry in entries if is_version(entry.name) and entry.is_dir()}
        if versions:
            found[path.name] = dict(sorted(versions.items()))
    return found


def is_version(text: str) -> bool:
    """Whether a folder's name is a version: a whole number from 1, written plainly."""
    return text.isascii() and text.isdecimal() and not text.startswith("0") and len(text) <= 18


def fingerprint(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of a version's files and of its policy's settings; changes when they do."""
    entries: list[tuple[str, int, int]] = []
    try:
        for path in [*folder.iterdir(), folder.parent / OVERRIDES_FILE]:
            try:
                status = path.stat()
            except OSError:
                continue
            entries.append((path.name, status.st_size, status.st_mtime_ns))
    except OSError:
        return ()
    return tuple(sorted(entries))
