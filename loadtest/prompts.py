"""What language models are asked: synthetic prompts of given lengths, conversations, or the user's own.

A tokenizer is the server's business. How many words make so many tokens is measured once, from the server's own usage
(``calibrate``); so a synthetic prompt is about as long as asked, and the figures count what the server counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from loadtest.errors import UsageError
from loadtest.llm_client import Ask
from loadtest.settings import Lengths, LlmSettings

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city community "
    "name president team minute idea body information back parent face others level office door health "
    "person art war history party result change morning reason research girl guy moment air teacher force "
    "education foot boy age policy music market sense nation plan college interest death experience "
    "effect use class control field development role effort rate heart drug show leader light voice wife "
    "police mind price report decision son view relation town road arm difference value building action "
    "model season society tax director position player record paper space ground form event official "
    "matter "
)
_WORDS = _TEXT.split()
_CALIBRATION_WORDS = (16, 272)


@dataclass(frozen=True, kw_only=True)
class WordsPerToken:
    """How words become tokens on one server.

    Attributes:
        tokens_per_word: Tokens that a further word adds.
        overhead: Tokens of a prompt without words, such as those of the chat template.
    """

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    def num_words(self, num_tokens: int) -> int:
        """Words of a prompt of about so many tokens; at least one."""
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_word))


def calibrate(count_tokens: Callable[[str], int | None]) -> WordsPerToken:
    """Measures how words become tokens.

    Args:
        count_tokens: Asks the server how many tokens a prompt with this text has; None when it does not say.

    Returns:
        A word a token where the server does not say.
    """
    generator = np.random.default_rng(0)
    few, many = _CALIBRATION_WORDS
    counts = [count_tokens(_text(number, generator)) for number in (few, many)]
    if counts[0] is None or counts[1] is None or counts[1] <= counts[0]:
        return WordsPerToken()
    tokens_per_word = (counts[1] - counts[0]) / (many - few)
    return WordsPerToken(tokens_per_word=tokens_per_word, overhead=max(counts[0] - few * tokens_per_word, 0.0))


def draw_length(lengths: Lengths, generator: np.random.Generator) -> int:
    """A length of this distribution, at least 1."""
    mean, width = lengths.mean, lengths.mean * lengths.spread
    if lengths.distribution == "uniform":
        drawn = generator.uniform(mean - width, mean + width)
    elif lengths.distribution == "normal":
        drawn = generator.normal(mean, width)
    elif lengths.distribution == "lognormal":
        variance = np.log1p(lengths.spread**2)
        drawn = generator.lognormal(np.log(mean) - variance / 2, np.sqrt(variance))
    else:
        drawn = mean
    return max(1, round(float(drawn)))


class PromptSource:
    """Makes the conversations of one generator process.

    Args:
        settings: What is asked for.
        words: How words become tokens.
        seed: The run's.
        process: Which process this is; each has other prompts.
        num_processes: How many there are; they share the user's lines.

    Raises:
        UsageError: The user's prompts cannot be read.
    """

    def __init__(
        self, settings: LlmSettings, words: WordsPerToken, *, seed: int, process: int = 0, num_processes: int = 1
    ) -> None:
        self._settings = settings
        self._words = words
        self._generator = np.random.default_rng((seed, process))
        shared = np.random.default_rng((seed, 0xFFFF))  # the same heads in every process
        num_words = round(settings.prefix_tokens / words.tokens_per_word)
        self._prefixes = [_text(num_words, shared) for _ in range(settings.num_prefixes)] if num_words else [""]
        self._own = read_prompts(settings.prompts, settings) if settings.prompts is not None else None
        self._next_own = process
        self._step = num_processes

    def conversation(self) -> Conversation:
        """A new one."""
        prefix = self._prefixes[int(self._generator.integers(len(self._prefixes)))]
        return Conversation(self, prefix, self._settings.turns if self._own is None else 1)

    def text(self, prefix: str, *, first: bool) -> str:
        """A synthetic prompt of a drawn length, behind its prefix."""
        length = draw_length(self._settings.input_tokens, self._generator)
        if not first:
            return _text(max(1, round(length / self._words.tokens_per_word)), self._generator)
        own = _text(self._words.num_words(length), self._generator)
        return f"{prefix} {own}" if prefix else own

    def max_tokens(self) -> int:
        """A drawn length of an answer."""
        return draw_length(self._settings.output_tokens, self._generator)

    def own(self) -> Ask | None:
        """The next of the user's prompts, if there are any."""
        if self._own is None:
            return None
        ask = self._own[self._next_own % len(self._own)]
        self._next_own += self._step
        return ask if ask.max_tokens else Ask(ask.prompt, self.max_tokens())

    @property
    def is_chat(self) -> bool:
        """Whether prompts are messages."""
        return self._settings.endpoint == "chat"


class Conversation:
    """What one user says, turn by turn; each turn sends what was said before."""

    def __init__(self, source: PromptSource, prefix: str, turns: int) -> None:
        self._source = source
        self._prefix = prefix
        self._turns = turns
        self._messages: list[dict[str, Any]] = []
        self._turn = 0

    @property
    def is_over(self) -> bool:
        """Whether every turn was taken."""
        return self._turn >= self._turns

    def next(self) -> Ask:
        """The next turn's request."""
        own = self._source.own()
        turn, self._turn = self._turn, self._turn + 1
        if own is not None:
            return own
        text = self._source.text(self._prefix, first=turn == 0)
        if not self._source.is_chat:
            return Ask(text, self._source.max_tokens())
        self._messages.append({"role": "user", "content": text})
        return Ask(list(self._messages), self._source.max_tokens(), turn)

    def heard(self, answer: str) -> None:
        """What it was answered; the next turn sends it along."""
        self._messages.append({"role": "assistant", "content": answer})


def read_prompts(path: Path, settings: LlmSettings) -> list[Ask]:
    """The user's prompts, a JSON object a line: ``prompt`` or ``messages``, and ``max_tokens`` if wanted.

    Raises:
        UsageError: The file cannot be read, or a line is not a prompt for the endpoint; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"prompts={str(path)!r}: cannot be read ({error})") from None
    asks = [
        _ask_of(line, settings, f"prompts={str(path)!r}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not asks:
        raise UsageError(f"prompts={str(path)!r}: holds no prompt; write a JSON object with 'prompt' on each line")
    return asks


def _ask_of(line: str, settings: LlmSettings, where: str) -> Ask:
    try:
        parsed: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: is not JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise UsageError(f"{where}: has to be an object with 'prompt' or 'messages'")
    content = cast("dict[str, Any]", parsed)
    max_tokens = content.get("max_tokens", 0)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 0:
        raise UsageError(f"{where}: max_tokens={max_tokens!r} has to be a whole number above 0")
    prompt, messages = content.get("prompt"), content.get("messages")
    if (prompt is None) == (messages is None):
        raise UsageError(f"{where}: has to hold either 'prompt' or 'messages'")
    if messages is not None:
        if settings.endpoint != "chat":
            raise UsageError(f"{where}: 'messages' are for the chat endpoint; ask with --endpoint chat")
        return Ask(_messages(messages, where), max_tokens)
    if not isinstance(prompt, str) or not prompt:
        raise UsageError(f"{where}: prompt={str(prompt)[:60]!r} has to be a text that is not empty")
    return Ask([{"role": "user", "content": prompt}] if settings.endpoint == "chat" else prompt, max_tokens)


def _messages(value: Any, where: str) -> Sequence[Mapping[str, Any]]:
    messages = cast("list[Any]", value) if isinstance(value, list) else []
    if not messages or not all(isinstance(message, dict) and "role" in message for message in messages):
        raise UsageError(f"{where}: messages have to be objects with 'role' and 'content', at least one")
    return messages


def _text(num_words: int, generator: np.random.Generator) -> str:
    return " ".join(_WORDS[index] for index in generator.integers(len(_WORDS), size=num_words))
