"""What can go wrong in an export; every message names the file, tensor or option and says what to do."""

from __future__ import annotations


class ExportError(Exception):
    """The policy cannot be exported; nothing was written."""


class UnreadableSourceError(ExportError):
    """What was given is no policy that can be read: missing, damaged, or of a kind that is not known."""


class ParityError(ExportError):
    """The exported file computes something else than its source."""
