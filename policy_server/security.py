"""Who is let in, and how much may be sent: API keys and the limit of bodies.

Open to everyone are ``/healthz`` and ``/readyz`` (a load balancer has no key), ``/`` (a page without data) and
``/docs`` with its schema. Everything else, ``/metrics`` too, asks for a key when keys are set.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from pydantic import SecretStr

from policy_server.errors import PayloadTooLargeError, UnauthorizedError

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"})
OPEN_PREFIXES = ("/page/",)
PROTOCOL_PREFIX = "api-key."
"""A browser cannot set headers on a WebSocket; it sends the key as a subprotocol of this beginning."""
_SCHEMES = ("bearer ", "api-key ")


class ApiKeys:
    """The keys that are let in; none means that everyone is."""

    def __init__(self, keys: Sequence[SecretStr]) -> None:
        # Digests, so that comparing takes as long whatever the key's length.
        self._digests = [_digest(key.get_secret_value()) for key in keys]

    @property
    def required(self) -> bool:
        """Whether any key is asked for."""
        return bool(self._digests)

    def check(self, headers: Mapping[str, str]) -> None:
        """Lets a request in, or not.

        Args:
            headers: Names in lower case; ``authorization: Bearer KEY``, ``authorization: Api-Key KEY`` or
                ``x-api-key: KEY``.

        Raises:
            UnauthorizedError: No key, or none of these.
        """
        if not self._digests:
            return
        given = key_of(headers)
        if given is None:
            raise UnauthorizedError("this server asks for an API key; send it as 'Authorization: Bearer KEY'")
        digest = _digest(given)
        known = [hmac.compare_digest(digest, key) for key in self._digests]  # all of them: no early end to measure
        if not any(known):
            raise UnauthorizedError("this API key is not let in")


def key_of(headers: Mapping[str, str]) -> str | None:
    """The key that a request carries."""
    authorization = headers.get("authorization", "")
    for scheme in _SCHEMES:
        if authorization.lower().startswith(scheme):
            return authorization[len(scheme) :].strip()
    for protocol in headers.get("sec-websocket-protocol", "").split(","):
        if protocol.strip().startswith(PROTOCOL_PREFIX):
            return protocol.strip()[len(PROTOCOL_PREFIX) :]
    return headers.get("x-api-key")


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIXES)


def too_large(num_bytes: int | None, limit: int) -> PayloadTooLargeError:
    """The error for a body above the limit."""
    size = "the body is" if num_bytes is None else f"the body has {num_bytes} bytes,"
    return PayloadTooLargeError(
        f"{size} above the limit of {limit} (max_body_bytes); send smaller batches", field="body"
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
