"""Is the server there, is it the kind that was asked for, and what does it serve? Asked before any load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import orjson

from loadtest.errors import DeadServerError, UsageError
from loadtest.http_connection import HttpConnection, RequestFailedError
from loadtest.llm_client import Ask, LlmClient
from loadtest.observations import ObservationField, fields_of, read_observations
from loadtest.policy_client import message_of
from loadtest.prompts import WordsPerToken, calibrate, read_prompts
from loadtest.settings import LlmSettings, PolicySettings

_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class LlmTarget:
    """A language model that answered.

    Attributes:
        settings: As asked for, with the model's name.
        words: How words become tokens there.
    """

    settings: LlmSettings
    words: WordsPerToken


@dataclass(frozen=True, kw_only=True)
class PolicyTarget:
    """A policy that is live.

    Attributes:
        settings: As asked for, with the policy's name.
        fields: Its observation's.
    """

    settings: PolicySettings
    fields: tuple[ObservationField, ...]


def check_llm(settings: LlmSettings, *, timeout_s: float) -> LlmTarget:
    """Finds the model and asks it one short question.

    Raises:
        DeadServerError: The server does not answer, lets nobody in, or is no OpenAI-compatible one.
        UsageError: The model is not there, or the server does not stream.
    """
    content = _get(settings.url, "/v1/models", settings.headers, settings.api_key, "an OpenAI-compatible server")
    names = [str(model["id"]) for model in _list_of(content, "data") if "id" in model]
    if not names:
        raise DeadServerError(f"url={settings.url!r}: /v1/models lists no model; is it an OpenAI-compatible server?")
    model = settings.model or names[0]
    if model not in names:
        raise UsageError(f"model={model!r}: not served there; there are: {', '.join(names)}")
    settings = replace(settings, model=model)
    client = LlmClient(settings, timeout_s=timeout_s)

    def count_tokens(text: str) -> int | None:
        prompt: Any = [{"role": "user", "content": text}] if settings.endpoint == "chat" else text
        record = client.send(Ask(prompt, 2))
        if record.error == "not_streamed":
            raise UsageError(f"url={settings.url!r}: no streaming support: {record.message}")
        if record.error is not None and record.error.startswith("http_4"):
            raise UsageError(f"url={settings.url!r}: refuses a request ({record.error}): {record.message}")
        if record.error is not None:
            raise DeadServerError(f"url={settings.url!r}: a first request failed ({record.error}): {record.message}")
        return record.input_tokens

    try:
        if settings.prompts is not None:
            read_prompts(settings.prompts, settings)
            count_tokens("hello")
            return LlmTarget(settings=settings, words=WordsPerToken())
        return LlmTarget(settings=settings, words=calibrate(count_tokens))
    finally:
        client.close()


def check_policy(settings: PolicySettings) -> PolicyTarget:
    """Finds the policy and what it takes.

    Raises:
        DeadServerError: The server does not answer, lets nobody in, or is no policy server.
        UsageError: The policy is not live there, or the user's observations are not its.
    """
    content = _get(settings.url, "/v1/policies", settings.headers, settings.api_key, "a policy server")
    live = [str(policy["name"]) for policy in _list_of(content, "policies") if policy.get("state") == "live"]
    if not live:
        raise DeadServerError(f"url={settings.url!r}: no policy is live there")
    name = settings.policy or live[0]
    if name not in live:
        raise UsageError(f"policy={name!r}: not live there; there are: {', '.join(live)}")
    settings = replace(settings, policy=name)
    described = _get(settings.url, f"/v1/policies/{name}", settings.headers, settings.api_key, "a policy server")
    try:
        fields = fields_of(cast("Any", described)["manifest"])
    except (KeyError, TypeError) as error:
        raise DeadServerError(f"url={settings.url!r}: does not describe {name} ({error!r})") from None
    if settings.observations is not None:
        read_observations(settings.observations, fields, rows=settings.rows)
    return PolicyTarget(settings=settings, fields=fields)


def authorised(headers: tuple[tuple[str, str], ...], api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The headers with the key."""
    return headers if api_key is None else (*headers, ("Authorization", f"Bearer {api_key}"))


def _get(url: str, path: str, headers: tuple[tuple[str, str], ...], api_key: str | None, kind: str) -> object:
    connection = HttpConnection(url, timeout_s=_TIMEOUT_S, headers=authorised(headers, api_key))
    pieces: list[bytes] = []
    try:
        status = connection.request("GET", path, b"", lambda piece, _: pieces.append(piece))
    except RequestFailedError as error:
        hint = "start it, or correct the address" if error.kind == "connection" else "is it the right port?"
        raise DeadServerError(f"url={url!r}: no answer ({error}); {hint}") from None
    finally:
        connection.close()
    answer = b"".join(pieces)
    if status in (401, 403):
        raise DeadServerError(f"url={url!r}: lets nobody in without its key ({status}); give it with --api-key")
    if status == 503:
        raise DeadServerError(f"url={url!r}: not ready ({message_of(answer)}); try again when it is")
    try:
        if status == 200:
            return orjson.loads(answer)
    except orjson.JSONDecodeError:
        pass
    raise DeadServerError(f"url={url!r}: is not {kind} ({path} answers {status}: {message_of(answer)[:120]})")


def _list_of(content: object, name: str) -> list[dict[str, Any]]:
    value: Any = cast("dict[str, Any]", content).get(name) if isinstance(content, dict) else None
    items = cast("list[Any]", value) if isinstance(value, list) else []
    return [item for item in items if isinstance(item, dict)]
