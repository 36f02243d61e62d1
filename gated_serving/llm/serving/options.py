"""The command line of ``serve``, taken apart: the model, our own settings, and vLLM's options as typed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gated_serving.llm.serving.errors import UsageError
from gated_serving.llm.serving.option_table import OptionTable, is_option, option_name

MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What to serve and where.

    Args:
        model: A checkpoint folder or a shipped model's short name.
        host: Address to listen on.
        port: TCP port; 0 picks a free one.
        api_keys: Keys of which a request must carry one; none lets everybody in.
        vllm_options: vLLM's own options as tokens, such as ``("--max-model-len", "512")``.
        verbose: Whether vLLM's whole log is shown.

    Raises:
        UsageError: The port is outside 0..65535.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    vllm_options: tuple[str, ...] = ()
    verbose: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= MAX_PORT:
            raise UsageError(f"--port {self.port}: must be between 0 and {MAX_PORT} (0 picks a free one)")
        if any(not key for key in self.api_keys):
            raise UsageError("--api-key: must not be empty")

    def value(self, *names: str) -> str | None:
        """The last value given for an option under any of its names; ``""`` for a flag; None when absent."""
        found: str | None = None
        tokens = self.vllm_options
        for index, token in enumerate(tokens):
            if not is_option(token) or option_name(token) not in names:
                continue
            following = tokens[index + 1] if index + 1 < len(tokens) else ""
            found = token.split("=", 1)[1] if "=" in token else "" if is_option(following) else following
        return found

    def has(self, *names: str) -> bool:
        """Whether the user gave an option, under any of its names."""
        return self.value(*names) is not None

    def has_prefix(self, *prefixes: str) -> bool:
        """Whether an option starts with one of these, as ``-O3`` or ``--data-parallel-size`` do."""
        names = [option_name(token) for token in self.vllm_options if is_option(token)]
        return any(name.startswith(prefix) for name in names for prefix in prefixes)


def split_model(tokens: Sequence[str], table: OptionTable | None) -> tuple[str | None, tuple[str, ...]]:
    """Find MODEL among the tokens that are not our own options.

    Args:
        tokens: In the order typed.
        table: What vLLM's options take; without it, an option is thought to take the token behind it.

    Returns:
        The model or None, and vLLM's tokens.

    Raises:
        UsageError: Two models are named.
    """
    model: str | None = None
    rest: list[str] = []
    previous: str | None = None  # the option that may still take a value
    for token in tokens:
        if is_option(token):
            previous = None if "=" in token else token
            rest.append(token)
            continue
        takes_value = previous is not None and (table is None or table.get(option_name(previous), True))
        if takes_value:
            rest.append(token)
            previous = previous if table is not None and option_name(previous or "") in _MANY_VALUES else None
        elif model is None:
            model, previous = token, None
        else:
            raise UsageError(f"two models named, {model!r} and {token!r}; serve takes one")
    return _model_option(model, rest)


# Options that take any number of values; MODEL has to stand before them.
_MANY_VALUES = {"--served-model-name", "--lora-modules", "--middleware", "--allowed-origins"}


def take_option(tokens: Sequence[str], name: str) -> tuple[str | None, tuple[str, ...]]:
    """Take an option of one value out of ``tokens``: its last value, or None, and the other tokens.

    Raises:
        UsageError: It stands there without a value.
    """
    value: str | None = None
    rest: list[str] = []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        index += 1
        if option_name(token) != name:
            rest.append(token)
            continue
        if "=" in token:
            value = token.split("=", 1)[1]
        elif index < len(tokens) and not is_option(tokens[index]):
            value = tokens[index]
            index += 1
        else:
            raise UsageError(f"{name}: a value is missing")
    return value, tuple(rest)


def _model_option(model: str | None, tokens: list[str]) -> tuple[str | None, tuple[str, ...]]:
    """Take ``--model X``, vLLM's spelling, for MODEL."""
    named, rest = take_option(tokens, "--model")
    if named is not None and model is not None and model != named:
        raise UsageError(f"two models named, {model!r} and {named!r}; serve takes one")
    return named or model, rest


def expand_config(tokens: Sequence[str], table: OptionTable | None) -> tuple[str, ...]:
    """Put the settings of ``--config FILE.yaml`` in place of it, so that none of them is overruled by a default.

    Args:
        tokens: Options as typed.
        table: vLLM's options; tells whether ``x: false`` has a ``--no-x`` or is said by leaving ``--x`` out.

    Raises:
        UsageError: The file cannot be read, or is not a mapping.
    """
    path, typed = take_option(tokens, "--config")
    return typed if path is None else (*_config_tokens(Path(path), table), *typed)  # what is typed comes last and wins


def _config_tokens(path: Path, table: OptionTable | None) -> list[str]:
    import yaml

    try:
        settings = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"--config {path}: must hold a mapping of options to values")
    tokens: list[str] = []
    for name, value in settings.items():
        tokens += _option_tokens("--" + str(name).replace("_", "-"), value, table)
    return tokens


def _option_tokens(name: str, value: Any, table: OptionTable | None) -> list[str]:
    if value is True:
        return [name]
    if value is False:
        negation = f"--no-{name[2:]}"
        return [negation] if table is None or negation in table else []
    if value is None:
        return []
    if isinstance(value, list):
        return [name, *(json.dumps(item) if isinstance(item, dict | list) else str(item) for item in value)]
    return [name, json.dumps(value) if isinstance(value, dict) else str(value)]


def read_command(
    tokens: Sequence[str],
    *,
    host: str | None,
    port: int | None,
    api_keys: Sequence[str],
    verbose: bool,
    default_model: str,
    table: OptionTable | None,
) -> ServeSettings:
    """Make the settings of a command line.

    Args:
        tokens: MODEL and vLLM's options, in the order typed.
        host: As typed, or None.
        port: As typed, or None.
        api_keys: As typed.
        verbose: As typed.
        default_model: What to serve when none is named.
        table: vLLM's options when they are known.

    Raises:
        UsageError: Naming the option that is wrong.
    """
    model, options = split_model(tokens, table)
    options = expand_config(options, table)
    model_in_file, options = take_option(options, "--model")
    host_in_file, options = take_option(options, "--host")
    port_in_file, options = take_option(options, "--port")
    key_in_file, options = take_option(options, "--api-key")
    if port_in_file is not None and not port_in_file.isdigit():
        raise UsageError(f"--port {port_in_file}: must be a number")
    return ServeSettings(
        model=model or model_in_file or default_model,
        host=host or host_in_file or ServeSettings.host,
        port=port if port is not None else int(port_in_file or ServeSettings.port),
        api_keys=tuple(api_keys) or ((key_in_file,) if key_in_file is not None else ()),
        vllm_options=options,
        verbose=verbose,
    )
