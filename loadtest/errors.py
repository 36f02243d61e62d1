"""What ends a load test before it begins."""

from __future__ import annotations


class UsageError(ValueError):
    """What was asked for cannot be done; the message names the option, its value and what to do (exit code 2)."""


class DeadServerError(RuntimeError):
    """The server does not answer, or is not the kind that was asked for; the message says what it did (exit code 2)."""
