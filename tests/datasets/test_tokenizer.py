"""Tokenizers: bytes need nothing; a tokenizer.json says which token ends a document, or must be told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainmaster.core.errors import DataError, UsageError
from trainmaster.datasets.corpus import tokenizer as _tokenizer


def train_one(folder: Path, *, end: str) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[end, "<s>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    library.train_from_iterator(["the cat and the hat and the bat"] * 3, trainer)
    # As Llama has it: a beginning before every text, which would otherwise stand in the middle of rows.
    library.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("text", ["", "plain", "Ünïcödé – 漢字 🙂", "\x00 and \x7f"])
def test_bytes_come_back_and_the_end_is_no_byte_of_text(text: str) -> None:
    tokenizer = _tokenizer.load("bytes")
    (tokens,) = tokenizer.encode_many([text])
    assert tokenizer.decode([*tokens, tokenizer.end]) == text
    assert tokenizer.end not in tokens and max([*tokens, tokenizer.end]) < tokenizer.vocab


def test_a_lone_surrogate_does_not_end_a_preparation() -> None:
    assert _tokenizer.load("bytes").encode_many(["a\ud800b"]) == [list(b"a?b")]


def test_a_tokenizer_file_gives_its_tokens_without_special_ones(tmp_path: Path) -> None:
    folder = train_one(tmp_path / "tok", end="</s>")
    tokenizer = _tokenizer.load(str(folder))
    assert tokenizer.sha256 == _tokenizer.load(str(folder / "tokenizer.json")).sha256
    (tokens,) = tokenizer.encode_many(["the cat"])
    assert 1 not in tokens and len(tokens) < 7 and tokenizer.decode(tokens) == "the cat"
    assert tokenizer.end == 0 and 258 < tokenizer.vocab < 300


def test_the_end_is_found_named_or_asked_for(tmp_path: Path) -> None:
    folder = train_one(tmp_path / "tok", end="<stop>")
    with pytest.raises(UsageError, match="does not say which token ends a document; name one with end_token"):
        _tokenizer.load(str(folder))
    assert _tokenizer.load(str(folder), end_token="<stop>").end == 0
    with pytest.raises(UsageError, match="has no token '<halt>'"):
        _tokenizer.load(str(folder), end_token="<halt>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    assert _tokenizer.load(str(folder)).end == 0


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not there; write bytes, the path of a tokenizer\.json, or hub:NAME"):
        _tokenizer.load(str(tmp_path / "nothing"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        _tokenizer.load(str(tmp_path))
