"""A tiny gated model folder with a tokenizer, and one server of it for the module."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer with an end token and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def save_tiny_model(folder: Path) -> Path:
    """A gated checkpoint of two layers with its tokenizer."""
    model = tiny_model(vocab_size=512, eos_token_id=0, bos_token_id=None, pad_token_id=0, tie_word_embeddings=True)
    model.save_pretrained(folder)
    save_tokenizer(folder, vocab_size=512)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-gated")
