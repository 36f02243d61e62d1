"""Puts ``NAME/VERSION/`` into a model repository: whole or not at all, and never over what is there.

Everything is made in a folder beside it whose name begins with a dot, and renamed when it is complete; a server that
watches the repository never sees half a policy. A killed export leaves only such a dotted folder behind.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

from policy_server.export.errors import ExportError
from policy_server.manifest import MANIFEST_FILE, Manifest, is_policy_name

STAGING_PREFIX = ".export-"


@contextlib.contextmanager
def staging_folder(repository: Path) -> Generator[Path]:
    """A folder inside the repository for the files of one export; removed again unless ``publish`` took it.

    Args:
        repository: Made if need be, and removed again if it stays empty.

    Raises:
        ExportError: The repository cannot be written to.
    """
    missing = [folder for folder in (repository, *repository.parents) if not folder.exists()]
    try:
        repository.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=repository))
    except OSError as error:
        raise ExportError(f"{repository}: cannot be written to ({error.strerror}); give another DST") from error
    folder.chmod(0o755)  # mkdtemp's are for their owner alone, and the server may be somebody else
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for made in missing:
            with contextlib.suppress(OSError):  # it holds something by now
                made.rmdir()


def check_target(repository: Path, name: str, version: int | None) -> None:
    """Refuses a target before the work begins.

    Raises:
        ExportError: The name cannot be one, or the version is there already.
    """
    if not is_policy_name(name):
        raise ExportError(
            f"--name {name!r}: letters, digits, '.', '_' and '-' only, at most 128, first a letter or digit"
        )
    if version is None:
        return
    if version < 1:
        raise ExportError(f"--policy-version {version}: versions count from 1")
    if (folder := repository / name / str(version)).exists():
        raise _taken(folder)


def publish(
    staging: Path, repository: Path, name: str, version: int | None, describe: Callable[[int], Manifest]
) -> tuple[Path, Manifest]:
    """Adds the manifest and renames the staging folder to ``NAME/VERSION/``.

    Args:
        staging: Holds all files but the manifest.
        repository: Where ``NAME/`` is or will be.
        name: The policy's name.
        version: Its version; one more than the highest there is if None.
        describe: Makes the manifest once the version is known.

    Returns:
        The folder and its manifest.

    Raises:
        ExportError: The version is there already, or the folder cannot be written.
    """
    parent = repository / name
    made = not parent.exists()
    try:
        parent.mkdir(exist_ok=True)
        while True:
            number = version if version is not None else next_version(parent)
            manifest = describe(number)
            (staging / MANIFEST_FILE).write_text(manifest.to_json())
            folder = parent / str(number)
            try:
                if folder.exists():  # an empty folder would be replaced without a word
                    raise FileExistsError(errno.EEXIST, "exists")
                staging.rename(folder)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                if version is not None:
                    raise _taken(folder) from None
                continue  # another export took the number just now
            return folder, manifest
    except OSError as error:
        if made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise ExportError(f"{parent}: cannot be written to ({error.strerror}); give another DST") from error


def next_version(parent: Path) -> int:
    """One more than the highest version in ``NAME/``, 1 if there is none."""
    numbers = [int(entry.name) for entry in parent.iterdir() if entry.name.isascii() and entry.name.isdigit()]
    return max(numbers, default=0) + 1


def _taken(folder: Path) -> ExportError:
    return ExportError(
        f"{folder} exists, and a version is never overwritten; leave out --policy-version to get the next number"
    )
