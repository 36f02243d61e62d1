"""Which options the installed vLLM knows, remembered between runs.

vLLM's parser takes some ten seconds of imports to build. The server process writes down what it holds, so that from
the second run on a mistyped option is told at once. The table belongs to one vLLM version.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from gated_serving.llm.serving.errors import UsageError

OptionTable = Mapping[str, bool]
"""Option string (``--max-model-len``) to whether it takes a value."""

_MIN_LIKENESS = 0.8  # a letter or two wrong, missing or exchanged; options that share a word only are at 0.6 to 0.75
_LIKENESS_MARGIN = 0.05
_MAX_HINTS = 3


def table_path(vllm_version: str) -> Path:
    """Where the table of one vLLM version lies: under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "gated-serving" / f"vllm-{vllm_version}-options.json"


def read_table(vllm_version: str) -> OptionTable | None:
    """The remembered table, or None before the first run with this version."""
    try:
        table = json.loads(table_path(vllm_version).read_text())
    except (OSError, ValueError):
        return None
    if isinstance(table, dict) and table and all(isinstance(takes, bool) for takes in table.values()):
        return table
    return None


def write_table(vllm_version: str, parser: argparse.ArgumentParser) -> None:
    """Remember ``parser``'s options; a cache that cannot be written is left unwritten."""
    table = {name: action.nargs != 0 for action in parser._actions for name in action.option_strings}
    path = table_path(vllm_version)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(table, file)
        Path(file.name).replace(path)
    except OSError:
        return


def option_name(token: str) -> str:
    """The option a token names: ``--max_model_len=5`` and ``--max-model-len`` are one; so are ``--a.b`` and ``--a``."""
    name = token.split("=", 1)[0].split(".", 1)[0]
    return name.rstrip("+").replace("_", "-") if name.startswith("--") else name


def is_option(token: str) -> bool:
    """Whether a token is an option and not a value such as ``-1`` or a single dash."""
    return token.startswith("-") and len(token) > 1 and not token[1].isdigit()


def check_options(tokens: Iterable[str], table: OptionTable) -> None:
    """Refuse a long option that vLLM does not know.

    Args:
        tokens: The options as typed.
        table: What the installed vLLM knows.

    Raises:
        UsageError: Naming the option and the nearest known ones.
    """
    for token in tokens:
        if not token.startswith("--"):
            continue
        name = option_name(token)
        if name in table or sum(known.startswith(name) for known in table) == 1:  # argparse takes unique prefixes
            continue
        near = [f"--{known}" for known in _closest(name[2:], [known[2:] for known in table if known.startswith("--")])]
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(f"no such option: {name}{hint}")


def _closest(name: str, known: list[str]) -> list[str]:
    """The known names that ``name`` may be a slip of: most of their letters agree, and hardly less than the best's."""
    best = difflib.get_close_matches(name, known, n=1, cutoff=_MIN_LIKENESS)
    if not best:
        return []
    likeness = difflib.SequenceMatcher(None, best[0], name).ratio()
    return difflib.get_close_matches(name, known, n=_MAX_HINTS, cutoff=max(likeness - _LIKENESS_MARGIN, _MIN_LIKENESS))
