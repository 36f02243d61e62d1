"""Settings of a run: dataclasses of sections, each of fields; their checks, and how they are read from text.

Text is either an override ``section.field=value`` of the command line, or a run's own ``run.json``.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from gated_serving.run_folder import RUN_SETTINGS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Run = TypeVar("Run", bound="DataclassInstance")


def require(ok: bool, name: str, value: object, requirement: str) -> None:
    """Raises the ValueError that names a field, its value and what it must be, unless ``ok``."""
    if not ok:
        raise ValueError(f"{name}={value!r}: must be {requirement}")


def require_at_least(section: object, least: int, *names: str) -> None:
    """Requires each of these fields of a section to be None or at least ``least``."""
    for name in names:
        value = getattr(section, name)
        require(value is None or value >= least, name, value, f"at least {least}")


def require_above_0(section: object, *names: str) -> None:
    """Requires each of these fields of a section to be a finite number above 0."""
    for name in names:
        value = getattr(section, name)
        require(0 < value < math.inf, name, value, "a finite number above 0")


def apply_overrides(run: Run, overrides: Iterable[str]) -> Run:
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
        values = changes.setdefault(_known(section, sections(run), "section", path), {})
        values[name] = _value(run, section, name, text, path)
    replaced = {section: _replace_section(run, section, values) for section, values in changes.items()}
    return dataclasses.replace(run, **replaced)


def read_settings(folder: Path, kind: type[Run]) -> Run | None:
    """The settings that a run's folder was started with, or None where it holds no run.

    Raises:
        ValueError: Its ``run.json`` cannot be read.
    """
    path = folder / RUN_SETTINGS
    if not path.is_file():
        return None
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: {where}: {first['msg']}; give another --output") from None


def sections(run: DataclassInstance | type[DataclassInstance]) -> list[str]:
    """Names of a run's sections: the fields that are dataclasses themselves."""
    hints = get_type_hints(run if isinstance(run, type) else type(run))
    return [field.name for field in dataclasses.fields(run) if dataclasses.is_dataclass(hints[field.name])]


def _known(name: str, names: list[str], kind: str, path: str) -> str:
    if name in names:
        return name
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}"
    raise ValueError(f"{path}: there is no {kind} {name!r}; {hint}")


def _value(run: DataclassInstance, section: str, name: str, text: str, path: str) -> Any:
    settings = type(getattr(run, section))
    hints = get_type_hints(settings)
    _known(name, list(hints), "field", path)
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        value = text
    # Strict, so that 8.0 or "8" is not taken for the whole number 8; from JSON, because strict Python values must be
    # members of an enumeration already. Text stays text where text is asked.
    adapter = TypeAdapter(hints[name], config=ConfigDict(strict=True))
    errors: list[str] = []
    for candidate in (value, text):
        try:
            return adapter.validate_json(json.dumps(candidate))
        except ValidationError as error:
            errors.append(error.errors()[0]["msg"])
    raise ValueError(f"{path}={text!r}: {errors[0][0].lower()}{errors[0][1:]}")


def _replace_section(run: DataclassInstance, section: str, values: dict[str, Any]) -> Any:
    try:
        return dataclasses.replace(getattr(run, section), **values)
    except ValueError as error:
        raise ValueError(f"{section}.{error}") from None
