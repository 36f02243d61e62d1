"""What can keep a server from running, each with the exit code of ``gated-serving serve``.

* 0: stopped by Ctrl-C or SIGTERM.
* 1: the model cannot be served right (``ModelRefusedError``).
* 2: the command or the model's folder cannot be understood (``UsageError``).
* 3: this machine lacks something: a free port, memory, vLLM itself (``MachineError``).
* 4: vLLM failed to start, or died (``VllmError``).
"""

from __future__ import annotations


class ServeError(Exception):
    """Base of all of these; the message is meant for the person who typed the command.

    Attributes:
        exit_code: What the command exits with.
    """

    exit_code = 4


class ModelRefusedError(ServeError):
    """The checkpoint is readable, but would not be served right."""

    exit_code = 1


class UsageError(ServeError):
    """A wrong option, or a folder that cannot be read as a checkpoint."""

    exit_code = 2


class MachineError(ServeError):
    """The command is right, but this machine cannot do it now."""

    exit_code = 3


class VllmError(ServeError):
    """vLLM stopped on its own, before or after it was ready."""

    exit_code = 4
