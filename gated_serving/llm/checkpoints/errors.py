"""What can be wrong with a checkpoint folder.

::

    CheckpointError                 whatever the user can mend; the message says where, what and how
    ├── UnreadableCheckpoint        config or tensor headers cannot be read
    │   ├── CheckpointNotFound      no such folder, and no such repository at hand
    │   ├── BrokenConfig            no config.json, broken JSON, a field that makes no sense
    │   ├── BrokenWeights           no weight files, a broken one, an index that does not fit them, too many of them
    │   └── PickledObjects          a .bin file with more than tensors in it; never unpickled
    └── ConversionError             a conversion that was refused or failed; nothing is left that looks whole
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Something about a checkpoint that its owner can mend."""


class UnreadableCheckpoint(CheckpointError):  # noqa: N818  # it says what is wrong, as its children do
    """The folder's config or tensor headers cannot be read."""


class CheckpointNotFound(UnreadableCheckpoint):
    """There is no such folder or repository."""


class BrokenConfig(UnreadableCheckpoint):
    """config.json is absent, not JSON, or holds a value that makes no sense."""


class BrokenWeights(UnreadableCheckpoint):
    """A weight file is absent, truncated or broken."""


class PickledObjects(UnreadableCheckpoint):
    """A .bin file holds objects other than tensors; they are not loaded, for they could run code."""


class ConversionError(CheckpointError):
    """A conversion was refused or failed."""
