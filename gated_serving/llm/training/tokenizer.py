"""A byte-level BPE tokenizer trained on the documents, or one that is given."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gated_serving.llm.training.settings import TokenizerSettings

END_OF_TEXT = "<|endoftext|>"

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
"""A base model knows no roles: the messages' texts follow each other, each on a line of its own."""

# Newlines stand alone and indentation is a piece of its own, so that a prompt may end at any of them and still be cut
# as in training. Words take one space before them along; digits go one by one.
_PIECES = r"\n|[ ]{2,}|[ ]?[^\W\d]+|[ ]?\d|[ ]?[^\s\w]+|\s"


def train_tokenizer(texts: Iterable[str], settings: TokenizerSettings, *, max_length: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer; every text can be encoded, and decodes to itself.

    Args:
        texts: Training documents.
        settings: Vocabulary size.
        max_length: Longest context of the model, in tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Loads a given tokenizer.

    Raises:
        FileNotFoundError: The path is one of a folder that does not exist.
        ValueError: It has no end-of-text token, which must stand between documents.
    """
    # A model hub's names have at most one slash; anything else with slashes can only be a folder.
    if (path.startswith((".", "/", "~")) or path.count("/") > 1) and not Path(path).expanduser().is_dir():
        raise FileNotFoundError(f"tokenizer.path={path!r}: there is no such folder")
    tokenizer = AutoTokenizer.from_pretrained(str(Path(path).expanduser()) if path.startswith("~") else path)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer.path={path!r}: the tokenizer has no eos_token, which must stand between documents")
    return tokenizer
