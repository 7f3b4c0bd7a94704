"""A dataset streamed from the Hub with the `datasets` library: nothing is on the disk, training starts at once.

A run keeps the commit it began with: a dataset that changes on the Hub does not change under a run that is resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainmaster.core.config.data import DataConfig
from trainmaster.core.errors import DataError, MissingExtra
from trainmaster.datasets import Shape
from trainmaster.datasets._stream_shards import Stream
from trainmaster.datasets.corpus import tokenizer as tokenizers
from trainmaster.datasets.corpus.hub_files import commit_of
from trainmaster.datasets.corpus.retry import Retry, brief, is_final


class HubDocuments:
    """One split of a dataset at one commit."""

    def __init__(self, config: DataConfig, split: str, commit: str) -> None:
        self._config, self._split, self._commit = config, split, commit
        self.fingerprint = f"hub:{config.dataset} {config.subset or ''} {split} {commit}"
        self._stream: Any = Retry(self.fingerprint, tries=8).call(self._open)
        self.files: int = self._stream.num_shards

    def read(self, file: int, skip: int) -> Iterator[str]:
        field = self._config.text_field
        part = self._stream.shard(num_shards=self.files, index=file)
        for document in part.skip(skip) if skip else part:
            text = document.get(field)
            if not isinstance(text, str):
                names = ", ".join(list(document)[:8])
                raise DataError(f"{self.fingerprint}: a document has no text in field {field!r}; it has {names}")
            yield text

    def at(self, fingerprint: str) -> HubDocuments:
        return HubDocuments(self._config, self._split, fingerprint.rpartition(" ")[2])

    def _open(self) -> Any:
        try:
            from datasets import load_dataset  # type: ignore[import-untyped]
        except ImportError:
            raise MissingExtra("streaming from the Hub", "data") from None
        config = self._config
        assert config.dataset is not None
        try:
            return load_dataset(config.dataset, config.subset, split=self._split, revision=self._commit, streaming=True)
        except (ValueError, FileNotFoundError) as error:  # an unknown subset or split
            if is_final(error) or isinstance(error, ValueError):
                raise DataError(f"hub:{config.dataset}: {brief(error)}") from None
            raise


def create(config: DataConfig, shape: Shape) -> Stream:
    assert config.dataset is not None
    commit = commit_of(config.dataset, config.revision)
    documents = HubDocuments(config, config.split, commit)
    held_out = HubDocuments(config, config.held_out_split, commit) if config.held_out_split is not None else None
    tokenizer = tokenizers.load(config.tokenizer, end_token=config.end_token)
    return Stream(documents, tokenizer, config, shape, name=f"hub:{config.dataset}", held_out=held_out)
