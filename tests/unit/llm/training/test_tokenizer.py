from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from gated_serving.llm.training.settings import TokenizerSettings
from gated_serving.llm.training.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer

CODE = 'def f(x):\n    """Say."""\n    if x:\n        return x + 10\n\n\nclass A:\n    pass\n'


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([CODE] * 20, TokenizerSettings(vocab_size=320), max_length=128)


@pytest.mark.parametrize("text", [CODE, "ünï 漢字 🙂\t\r\n  x \n", " leading", "a  b   c\n\n", "\x00\x7f"])
def test_every_text_comes_back_as_it_was(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("end", ["def f(x):", "def f(x):\n", "def f(x):\n    ", CODE[: CODE.index("return")]])
def test_a_prompt_may_end_where_lines_and_indentations_do(tokenizer: PreTrainedTokenizerFast, end: str) -> None:
    prompt, whole = tokenizer(end)["input_ids"], tokenizer(CODE)["input_ids"]
    assert whole[: len(prompt)] == prompt


def test_chat_joins_the_contents(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "# python"}, {"role": "user", "content": "import os"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "# python\nimport os\n"


def test_saved_and_loaded_it_is_the_same(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded(CODE)["input_ids"] == tokenizer(CODE)["input_ids"]
    assert loaded.eos_token == END_OF_TEXT
    assert len(loaded) <= 320


def test_a_given_tokenizer_without_an_end_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no eos_token"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "~/no_such_folder", "a/b/c"])
def test_a_folder_that_does_not_exist_is_named(path: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"tokenizer.path='{path}': there is no such folder"):
        load_tokenizer(path)
