from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import SIZES, tiny_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from gated_serving.llm.training.packing import IGNORED_LABEL, pack_one_document, pack_packed

END = 0
DOCUMENTS = [[11, 12, 13, 14, END], [21, 22, END], [31, 32, 33, 34, 35, 36, 37, 38, 39, END], [41, END]]


def test_packing_keeps_every_token_in_order() -> None:
    columns = pack_packed(DOCUMENTS, 8, END)
    flat = [token for row in columns["input_ids"] for token in row]
    tokens = [token for document in DOCUMENTS for token in document]
    assert flat[: len(tokens)] == tokens
    assert all(len(row) == 8 for name in columns for row in columns[name])
    assert len(columns["input_ids"]) == 3


def test_positions_start_again_at_every_document_and_every_sequence() -> None:
    positions = pack_packed(DOCUMENTS, 8, END)["position_ids"]
    assert positions[0] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert positions[1] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert positions[2] == [0, 1, 0, 1, 0, 1, 2, 3]  # the end of the long one, the last one, padding


def test_nothing_is_learned_across_documents_or_from_padding() -> None:
    columns = pack_packed(DOCUMENTS, 8, END)
    assert columns["labels"][0] == [IGNORED_LABEL, 12, 13, 14, END, IGNORED_LABEL, 22, END]
    assert columns["labels"][2] == [IGNORED_LABEL, END, IGNORED_LABEL, END, *[IGNORED_LABEL] * 4]


def test_one_document_layout_never_mixes_documents() -> None:
    columns = pack_one_document(DOCUMENTS, 8, END)
    assert columns["input_ids"][1] == [21, 22, END, END, END, END, END, END]
    assert columns["labels"][1] == [IGNORED_LABEL, 22, END, *[IGNORED_LABEL] * 5]
    assert [row[0] for row in columns["input_ids"]] == [11, 21, 31, 39, 41]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("gate", [{}, {"gate_position": "G2"}, None], ids=["G1", "G2", "ungated"])
@torch.no_grad()
def test_a_packed_document_gets_the_logits_it_gets_alone(gate: dict[str, Any] | None, attention: str) -> None:
    if gate is None:
        torch.manual_seed(0)
        sizes: dict[str, Any] = dict(SIZES)
        model = Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()
    else:
        model = tiny_model(**gate).eval()
    model.set_attn_implementation(attention)
    columns = pack_packed(DOCUMENTS, sum(map(len, DOCUMENTS)), END)
    packed = model(
        input_ids=torch.tensor(columns["input_ids"]),
        position_ids=torch.tensor(columns["position_ids"]),
        use_cache=False,
    ).logits[0]
    start = 0
    for document in DOCUMENTS:
        alone = model(input_ids=torch.tensor([document]), use_cache=False).logits[0]
        torch.testing.assert_close(packed[start : start + len(document)], alone, rtol=1e-4, atol=1e-5)
        start += len(document)
