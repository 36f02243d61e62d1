"""Prompts: as long as asked, alike where they share a head, and the user's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from loadtest.errors import UsageError
from loadtest.prompts import PromptSource, WordsPerToken, calibrate, draw_length, read_prompts
from loadtest.settings import Lengths, LlmSettings

URL = "http://127.0.0.1:8000"


def source_of(
    *, process: int = 0, num_processes: int = 1, words: WordsPerToken | None = None, **fields: Any
) -> PromptSource:
    settings = LlmSettings(url=URL, model="m", **fields)
    return PromptSource(settings, words or WordsPerToken(), seed=1, process=process, num_processes=num_processes)


def text_of(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else cast("str", prompt[-1]["content"])


@pytest.mark.parametrize(("tokens_per_word", "overhead"), [(1.0, 0.0), (1.7, 12.0), (4.25, 3.0)])
def test_prompts_have_the_tokens_that_were_asked_for(tokens_per_word: float, overhead: float) -> None:
    def count_tokens(text: str) -> int:
        return round(len(text.split()) * tokens_per_word + overhead)

    words = calibrate(count_tokens)
    source = source_of(words=words, input_tokens=Lengths(mean=200, distribution="uniform", spread=0.5))
    counts = [count_tokens(text_of(source.conversation().next().prompt)) for _ in range(300)]
    assert abs(np.mean(counts) - 200) < 10
    assert min(counts) >= 100 - tokens_per_word - 1
    assert max(counts) <= 300 + tokens_per_word + 1


def test_a_server_that_does_not_count_gets_a_word_a_token() -> None:
    assert calibrate(lambda _: None) == WordsPerToken()
    assert calibrate(lambda _: 5) == WordsPerToken()


@pytest.mark.parametrize("distribution", ["fixed", "uniform", "normal", "lognormal"])
def test_lengths_have_their_mean_and_width(distribution: Any) -> None:
    generator = np.random.default_rng(0)
    lengths = Lengths(mean=400, distribution=distribution, spread=0.25)
    drawn = np.array([draw_length(lengths, generator) for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(400, rel=0.01)
    width = {"fixed": 0.0, "uniform": 0.25 / np.sqrt(3), "normal": 0.25, "lognormal": 0.25}[distribution]
    assert drawn.std() == pytest.approx(400 * width, rel=0.05, abs=0.5)


def test_lengths_are_at_least_one() -> None:
    generator = np.random.default_rng(0)
    wide = Lengths(mean=2, distribution="normal", spread=5.0)
    assert min(draw_length(wide, generator) for _ in range(1000)) == 1


def test_prompts_repeat_with_the_seed_and_differ_between_processes() -> None:
    first, again, other = (source_of(process=process) for process in (0, 0, 1))
    texts = [[text_of(source.conversation().next().prompt) for _ in range(5)] for source in (first, again, other)]
    assert texts[0] == texts[1]
    assert not set(texts[0]) & set(texts[2])
    assert len(set(texts[0])) == 5


def test_prefixes_are_shared_by_all_processes() -> None:
    fields = {"prefix_tokens": 30, "num_prefixes": 2, "input_tokens": Lengths(mean=10)}
    heads = [
        " ".join(text_of(source.conversation().next().prompt).split()[:30])
        for source in (source_of(process=process, **fields) for process in (0, 1))
        for _ in range(20)
    ]
    assert len(set(heads)) == 2


def test_a_conversation_says_what_was_said_before() -> None:
    conversation = source_of(turns=3).conversation()
    for turn in range(3):
        assert not conversation.is_over
        ask = conversation.next()
        assert ask.turn == turn
        messages = cast("list[dict[str, str]]", ask.prompt)
        assert [message["role"] for message in messages] == ["user", "assistant"] * turn + ["user"]
        conversation.heard(f"answer {turn}")
    assert conversation.is_over
    assert messages[1]["content"] == "answer 0"


def test_completions_get_text() -> None:
    assert isinstance(source_of(endpoint="completions").conversation().next().prompt, str)


def test_the_users_prompts_are_dealt_out(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"number {index}", "max_tokens": 3} for index in range(5)]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    sources = [source_of(process=process, num_processes=2, prompts=path) for process in (0, 1)]
    texts = [[text_of(source.conversation().next().prompt) for _ in range(5)] for source in sources]
    assert texts == [[f"number {index}" for index in order] for order in ([0, 2, 4, 1, 3], [1, 3, 0, 2, 4])]


def test_messages_and_lengths_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    ask = source_of(prompts=path, output_tokens=Lengths(mean=9)).conversation().next()
    assert (ask.prompt, ask.max_tokens) == (messages, 9)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: is not JSON"),
        ("[]", "line 2: has to be an object"),
        ("{}", "line 2: has to hold either 'prompt' or 'messages'"),
        ('{"prompt": "a", "messages": []}', "either 'prompt' or 'messages'"),
        ('{"prompt": ""}', "a text that is not empty"),
        ('{"prompt": 5}', "a text that is not empty"),
        ('{"messages": []}', "objects with 'role' and 'content'"),
        ('{"prompt": "a", "max_tokens": -1}', "max_tokens=-1"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens=True"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(UsageError, match=message):
        read_prompts(path, LlmSettings(url=URL))


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl", LlmSettings(url=URL))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(UsageError, match="holds no prompt"):
        read_prompts(tmp_path / "empty.jsonl", LlmSettings(url=URL))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts(tmp_path / "binary.jsonl", LlmSettings(url=URL))
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(UsageError, match="ask with --endpoint chat"):
        read_prompts(tmp_path / "chat.jsonl", LlmSettings(url=URL, endpoint="completions"))
