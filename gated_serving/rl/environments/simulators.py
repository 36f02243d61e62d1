"""Importing the simulators' packages without what they print, and naming the extra that brings them."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from types import ModuleType

from gated_serving.rl.environments.errors import UnusableEnvironmentError

logger = logging.getLogger(__name__)


def import_simulator(name: str) -> ModuleType:
    """Imports a package; its notices go to the debug log, its errors are raised.

    Args:
        name: ``gymnasium_robotics`` or ``metaworld``.

    Raises:
        UnusableEnvironmentError: It is not installed, or cannot be imported.
    """
    notices = io.StringIO()
    try:
        with contextlib.redirect_stderr(notices), contextlib.redirect_stdout(notices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(name)
    except ImportError as error:
        raise UnusableEnvironmentError(
            f"{name} cannot be imported ({error}); install it with: pip install 'gated-serving[train]'"
        ) from error
    if said := notices.getvalue().strip():
        logger.debug("%s: %s", name, said)
    return module
