"""Text to tokens: the built-in bytes, a tokenizer.json, or one from the Hub. No torch here."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from trainmaster.core.errors import DataError, MissingExtra, UsageError

_FILE, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_HUB = "hub:"
# What ends a document in the families we know, for a tokenizer.json without its tokenizer_config.json.
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """Tokenizer interface."""

    name: str
    vocab: int  # every token is below this
    end: int  # put after every document
    sha256: str  # two tokenizers of one hash give the same tokens

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Bytes:
    """Each byte of UTF-8 is a token. 255 never occurs in UTF-8, so it ends a document."""

    name, vocab, end = "bytes", 256, 255
    sha256 = hashlib.sha256(b"bytes, 255 ends").hexdigest()

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        # A lone surrogate, which JSON can carry, has no UTF-8; it becomes a question mark.
        return [list(text.encode("utf-8", "replace")) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).replace(b"\xff", b"").decode("utf-8", "replace")


class Trained:
    """A tokenizer.json, read by the `tokenizers` library."""

    def __init__(self, path: Path, *, name: str, end_token: str | None) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise MissingExtra("a tokenizer.json", "data") from None
        try:
            raw = path.read_bytes()
            self._library = Library.from_str(raw.decode())
        except OSError as error:
            raise UsageError(f"tokenizer {name}: {path} cannot be read: {error.strerror}") from None
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"tokenizer {name}: {path} is not a tokenizer.json: {error}") from None
        self.name, self.path = name, path
        self.vocab = self._library.get_vocab_size(with_added_tokens=True)
        self.end = self._find_end(path, end_token)
        self.end_text = str(self._library.id_to_token(self.end))
        self.sha256 = hashlib.sha256(raw + f" {self.end}".encode()).hexdigest()

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        # Without special tokens: the end is ours to put, once, and a beginning would stand in the middle of rows.
        return [encoding.ids for encoding in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._library.decode(list(tokens), skip_special_tokens=False)
        return text

    def _find_end(self, path: Path, wanted: str | None) -> int:
        words = [wanted] if wanted is not None else [_configured(path.with_name(_SETTINGS)), *_ENDS]
        token = next(
            (self._library.token_to_id(word) for word in words if word is not None and self._knows(word)), None
        )
        if token is None:
            asked = (
                f"it has no token {wanted!r}" if wanted is not None else "it does not say which token ends a document"
            )
            raise UsageError(f"tokenizer {self.name}: {asked}; name one with end_token, for example </s>")
        return int(token)

    def _knows(self, word: str) -> bool:
        return self._library.token_to_id(word) is not None


def load(name: str, *, end_token: str | None = None) -> Tokenizer:
    """`bytes`, the path of a tokenizer.json or of its folder, or `hub:NAME`."""
    if name == "bytes":
        return Bytes()
    if name.startswith(_HUB):
        return Trained(_from_hub(name.removeprefix(_HUB)), name=name, end_token=end_token)
    path = Path(name).expanduser()
    path = path / _FILE if path.is_dir() else path
    if not path.exists():
        raise UsageError(f"tokenizer {name}: not there; write bytes, the path of a tokenizer.json, or hub:NAME")
    return Trained(path, name=name, end_token=end_token)


def _configured(path: Path) -> str | None:
    """End token from tokenizer_config.json, given as text or as an object."""
    try:
        token: Any = json.loads(path.read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _from_hub(name: str) -> Path:
    from trainmaster.datasets.corpus.hub_files import download

    # The small file beside it says which token ends a document; not every repository has one.
    download(name, _SETTINGS, kind="model", missing_ok=True)
    path = download(name, _FILE, kind="model")
    assert path is not None
    return path


def keep_threads_apart() -> None:
    """Disable the library's own threads in a worker process: each would start one per core."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
