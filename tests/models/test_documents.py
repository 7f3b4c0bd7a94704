"""Tokens of one row that belong to several documents: each sees its own alone."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from trainmaster.core.config.train import ModelConfig
from trainmaster.models import family
from trainmaster.models.attend import attend, look_back
from trainmaster.models.decoder import Decoder

TINY = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, ffn_width=64)
# Two rows with other borders: 0 to 4, 5 to 11; 0 to 8, 9 to 11.
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3], dtype=torch.int32)
TOKENS = torch.arange(24).view(2, 12)


def born(config: ModelConfig = TINY) -> Decoder:
    model = family.build(config, max_tokens=12)
    model.init_weights(0)
    return model


def test_a_change_in_one_document_is_not_seen_in_the_next() -> None:
    model, changed = born(), TOKENS.clone()
    changed[:, 2] = 200
    differs = (model(TOKENS, documents=DOCUMENTS) != model(changed, documents=DOCUMENTS)).any(dim=-1)
    assert differs[0].nonzero().flatten().tolist() == [2, 3, 4]
    assert differs[1].nonzero().flatten().tolist() == [2, 3, 4, 5, 6, 7, 8]


def test_a_document_is_predicted_as_if_it_were_alone() -> None:
    """Positions count on through the row; the rotary embedding tells distances only, so nothing changes."""
    model = born()
    packed = model(TOKENS, documents=DOCUMENTS)
    torch.testing.assert_close(packed[0, 5:], model(TOKENS[:1, 5:])[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(packed[1, 9:], model(TOKENS[1:, 9:])[0], atol=1e-5, rtol=1e-4)


def test_one_document_a_row_is_plain_attention() -> None:
    model = born()
    one = model(TOKENS, documents=torch.zeros_like(DOCUMENTS))
    torch.testing.assert_close(one, model(TOKENS), atol=1e-5, rtol=1e-4)


@pytest.mark.proof
@pytest.mark.slow
def test_masks_in_blocks_hide_what_whole_ones_hide() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 12, 16, generator=generator)
    key, value = (torch.randn(2, 2, 12, 16, generator=generator) for _ in range(2))
    for window in (None, 3):
        whole = look_back(TOKENS, DOCUMENTS, window=window, in_blocks=False)
        blocks = look_back(TOKENS, DOCUMENTS, window=window, in_blocks=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is slow when not compiled
            mixed = flex_attention(query, key, value, block_mask=blocks, enable_gqa=True)
        torch.testing.assert_close(attend(query, key, value, whole), mixed, atol=1e-5, rtol=1e-4)
