"""The command's options as they are written, turned into settings."""

from __future__ import annotations

from loadtest.errors import UsageError
from loadtest.settings import Lengths


def parse_lengths(name: str, text: str) -> Lengths:
    """``MEAN``, ``MEAN:DISTRIBUTION`` or ``MEAN:DISTRIBUTION:SPREAD``, such as ``128:normal:0.3``.

    Raises:
        UsageError: It is none of these.
    """
    parts = text.split(":")
    try:
        mean = int(parts[0])
        spread = float(parts[2]) if len(parts) > 2 else 0.3 if len(parts) > 1 and parts[1] != "fixed" else 0.0
        if len(parts) > 3:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"{name}={text!r}: write MEAN, or MEAN:DISTRIBUTION:SPREAD such as 128:normal:0.3 (fixed, uniform, normal, "
            "lognormal)"
        ) from None
    try:
        return Lengths(mean=mean, distribution=parts[1] if len(parts) > 1 else "fixed", spread=spread)  # pyright: ignore[reportArgumentType]  # checked there
    except UsageError as error:
        raise UsageError(f"{name}={text!r}: {error}") from None


def parse_headers(texts: list[str]) -> tuple[tuple[str, str], ...]:
    """``Name: value`` lines.

    Raises:
        UsageError: One is no header.
    """
    headers: list[tuple[str, str]] = []
    for text in texts:
        name, separator, value = text.partition(":")
        name, value = name.strip(), value.strip()
        if not separator or not name or not (name + value).isprintable() or not name.isascii() or " " in name:
            raise UsageError(f"header={text!r}: write NAME: VALUE, such as 'X-Tenant: blue'")
        headers.append((name, value))
    return tuple(headers)


def parse_address(text: str) -> tuple[str, int]:
    """``HOST:PORT``.

    Raises:
        UsageError: It is not.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise UsageError(f"address={text!r}: write HOST:PORT, such as 10.0.0.5:5557")
    return host, int(port)
