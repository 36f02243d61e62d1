"""Documents into sequences of one length, without one document seeing another.

Legend: S sequences, T tokens of a sequence.

A sequence's ``position_ids`` start again at 0 where a document starts. transformers reads the document boundaries from
them and masks attention across (``masking_utils.find_packed_sequence_indices``), as long as no attention mask and no
cache is given. A document's first token has no label: nothing before it could tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gated_serving.llm.training.settings import DataSettings

IGNORED_LABEL = -100


def pack_packed(documents: Sequence[Sequence[int]], sequence_length: int, pad_id: int) -> dict[str, list[list[int]]]:
    """Lays documents end to end and cuts every ``sequence_length`` tokens; only the last sequence is padded.

    Args:
        documents: Token ids of each, with its end-of-text token.
        sequence_length: T.
        pad_id: Fills the last sequence; padding has no labels.

    Returns:
        ``input_ids``, ``position_ids`` and ``labels``, each ``[S, T]``.
    """
    ids: list[int] = []
    positions: list[int] = []
    for document in documents:
        ids.extend(document)
        positions.extend(range(len(document)))
    columns: dict[str, list[list[int]]] = {"input_ids": [], "position_ids": [], "labels": []}
    for start in range(0, len(ids), sequence_length):
        piece = positions[start : start + sequence_length]
        # A document that is cut goes on at position 0: its beginning is out of sight in any case.
        cut = next((i for i, position in enumerate(piece) if position == 0), len(piece))
        _append(columns, ids[start : start + sequence_length], [*range(cut), *piece[cut:]], sequence_length, pad_id)
    return columns


def pack_one_document(
    documents: Sequence[Sequence[int]], sequence_length: int, pad_id: int
) -> dict[str, list[list[int]]]:
    """Gives every document sequences of its own, padded at the end; arguments and result as ``pack_packed``."""
    columns: dict[str, list[list[int]]] = {"input_ids": [], "position_ids": [], "labels": []}
    for document in documents:
        for start in range(0, len(document), sequence_length):
            piece = list(document[start : start + sequence_length])
            _append(columns, piece, list(range(len(piece))), sequence_length, pad_id)
    return columns


def _append(
    columns: dict[str, list[list[int]]], ids: list[int], positions: list[int], sequence_length: int, pad_id: int
) -> None:
    missing = sequence_length - len(ids)
    labels = [IGNORED_LABEL if position == 0 else token for token, position in zip(ids, positions, strict=True)]
    columns["input_ids"].append(ids + [pad_id] * missing)
    columns["position_ids"].append(positions + list(range(missing)))
    columns["labels"].append(labels + [IGNORED_LABEL] * missing)


def make_sequences(documents: Dataset, tokenizer: PreTrainedTokenizerBase, settings: DataSettings) -> Dataset:
    """Tokenises and packs documents; batches of 1,000 are packed on their own, so that memory stays bounded.

    Returns:
        A dataset with ``input_ids``, ``position_ids`` and ``labels``, each of ``settings.sequence_length``.
    """
    pack = pack_packed if settings.layout == "packed" else pack_one_document
    end = int(tokenizer.eos_token_id)  # pyright: ignore[reportArgumentType]  # checked when the tokenizer was loaded

    def tokenize_and_pack(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded: Any = tokenizer(batch["text"], add_special_tokens=False, verbose=False)["input_ids"]
        return pack([[*ids, end] for ids in encoded], settings.sequence_length, end)

    sequences = documents.map(
        tokenize_and_pack,
        batched=True,
        remove_columns=documents.column_names,
        num_proc=settings.num_processes,
        load_from_cache_file=False,
        desc="tokenise and pack",
    )
    return sequences.with_format("torch")


def collate(sequences: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stacks sequences to ``[B, T]``."""
    return {name: torch.stack([sequence[name] for sequence in sequences]).long() for name in sequences[0]}
