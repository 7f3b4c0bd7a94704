"""Tokenizer files of an exported model: what `transformers` needs to encode a prompt and to stop generating."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainmaster.core.config.data import RAW
from trainmaster.datasets.corpus.tokenizer import Bytes, Tokenizer, Trained

TOKENIZER, SETTINGS, CHAT = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_END_OF_BYTES = "<|end|>"  # 255 has no text of its own


def tokenizer_of(data: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """Name and end token of the tokenizer of a run's data settings; None where only the data itself states them."""
    parts = data.get("parts") or [data]
    sources = {str(part.get("source", "tales")) for part in parts}
    if sources == {"tales"}:
        return "bytes", None
    # Prepared data was tokenised before: its index.json has the name, and `data.tokenizer` says nothing about it.
    if sources <= {*RAW, "hub"}:
        return str(data.get("tokenizer", "bytes")), data.get("end_token")
    return None


def files_of(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Files to write beside the weights, by name; the end token is the one that training put after documents."""
    if isinstance(tokenizer, Bytes):
        return {TOKENIZER: _text(_byte_level(tokenizer)), SETTINGS: _text(_settings({}, _END_OF_BYTES))}
    assert isinstance(tokenizer, Trained)
    folder = tokenizer.path.parent
    known = json.loads((folder / SETTINGS).read_bytes()) if (folder / SETTINGS).is_file() else {}
    files = {TOKENIZER: tokenizer.path.read_bytes(), SETTINGS: _text(_settings(known, tokenizer.end_text))}
    if (folder / CHAT).is_file():
        files[CHAT] = (folder / CHAT).read_bytes()
    return files


def _settings(known: Mapping[str, Any], end: str) -> dict[str, Any]:
    # The class reads any tokenizer.json; a stated one may need files that are not there.
    return {
        "clean_up_tokenization_spaces": False,
        **known,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
    }


def _byte_level(tokenizer: Bytes) -> dict[str, Any]:
    """The byte tokenizer as a tokenizer.json: BPE over bytes without merges; a token is its byte's value."""
    ends = {"id": tokenizer.end, "content": _END_OF_BYTES, "special": True, "normalized": False}
    ends |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {letter: byte for byte, letter in enumerate(_letters()) if byte != tokenizer.end}
    return {
        "version": "1.0",
        "added_tokens": [ends],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {**vocab, _END_OF_BYTES: tokenizer.end}, "merges": []},
    }


def _letters() -> list[str]:
    """The visible letter by which byte-level tokenizers write each byte."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


def _text(plain: Mapping[str, Any]) -> bytes:
    return (json.dumps(plain, indent=2, ensure_ascii=False) + "\n").encode()
