"""A run's settings from text: overrides ``section.field=value`` of the command line, and a run's own ``run.json``."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from gated_serving.llm.training.settings import TrainingRun

RUN_SETTINGS = "run.json"
"""Where a run's folder keeps its settings."""


def apply_overrides(run: TrainingRun, overrides: Iterable[str]) -> TrainingRun:
    """The run with some fields exchanged.

    Args:
        run: What the recipe says.
        overrides: Each ``section.field=value``. The value is read as JSON where it is that (numbers, ``true``,
            ``null``, objects), else as text.

    Raises:
        ValueError: An override is malformed, its field does not exist, or its value is refused; the message names it.
    """
    changes: dict[str, dict[str, Any]] = {}
    for override in overrides:
        path, separator, text = override.partition("=")
        section, dot, name = path.partition(".")
        if not separator or not dot:
            raise ValueError(f"{override!r}: an override is written section.field=value")
        values = changes.setdefault(_known(section, _sections(run), "section", path), {})
        values[name] = _value(run, section, name, text, path)
    replaced = {section: _replace_section(run, section, values) for section, values in changes.items()}
    return dataclasses.replace(run, **replaced)


def read_settings(folder: Path) -> TrainingRun | None:
    """The settings that a run's folder was started with, or None where it holds no run.

    Raises:
        ValueError: Its ``run.json`` cannot be read.
    """
    path = folder / RUN_SETTINGS
    if not path.is_file():
        return None
    try:
        return TypeAdapter(TrainingRun).validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: {where}: {first['msg']}; give another --output") from None


def _sections(run: TrainingRun) -> list[str]:
    return [field.name for field in dataclasses.fields(run) if dataclasses.is_dataclass(getattr(run, field.name))]


def _known(name: str, names: list[str], kind: str, path: str) -> str:
    if name in names:
        return name
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}"
    raise ValueError(f"{path}: there is no {kind} {name!r}; {hint}")


def _value(run: TrainingRun, section: str, name: str, text: str, path: str) -> Any:
    settings = type(getattr(run, section))
    hints = get_type_hints(settings)
    _known(name, list(hints), "field", path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    # Strict after JSON, so that 8.0 or "8" is not taken for the whole number 8; text stays text where text is asked.
    adapter = TypeAdapter(hints[name], config=ConfigDict(strict=True))
    errors: list[str] = []
    for candidate in (value, text):
        try:
            return adapter.validate_python(candidate)
        except ValidationError as error:
            errors.append(error.errors()[0]["msg"])
    raise ValueError(f"{path}={text!r}: {errors[0][0].lower()}{errors[0][1:]}")


def _replace_section(run: TrainingRun, section: str, values: dict[str, Any]) -> Any:
    try:
        return dataclasses.replace(getattr(run, section), **values)
    except ValueError as error:
        raise ValueError(f"{section}.{error}") from None
