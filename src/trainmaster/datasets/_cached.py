"""Raw local files as a source: tokenised once into a cache, then read as prepared tokens.

The cache key is the content of the files, the tokenizer and the settings: a changed file makes a new entry. Entries are
never deleted here; to free the space, remove the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from trainmaster.core import schema
from trainmaster.core.config.data import DataConfig
from trainmaster.core.errors import DataError, UsageError
from trainmaster.datasets import Shape, Source
from trainmaster.datasets.corpus import files as _files
from trainmaster.datasets.corpus import index
from trainmaster.datasets.corpus import tokenizer as _tokenizer
from trainmaster.datasets.corpus.prepare import Recipe, prepare


def create(config: DataConfig, shape: Shape) -> Source:
    from trainmaster.datasets.prepared import Prepared  # it needs torch; preparing does not

    assert config.path is not None
    folder = tokenised(config, config.path, held_out_share=0 if config.held_out_path else config.held_out_share)
    other = tokenised(config, config.held_out_path, held_out_share=0) if config.held_out_path else None
    try:
        return Prepared(config, shape, folder, other)
    except DataError as error:
        # The files that the user wrote, not their entries in the cache.
        text = str(error).replace(str(other), str(config.held_out_path)).replace(str(folder), config.path)
        raise DataError(text) from error


def tokenised(config: DataConfig, pattern: str, *, held_out_share: float) -> Path:
    """Cache folder with the tokens of these files; created if it is missing."""
    files = _files.find(pattern, wanted=config.source)
    recipe = Recipe(
        tokenizer=config.tokenizer,
        end_token=config.end_token,
        manner=_files.TextLocation(text_field=config.text_field, text_unit=config.text_unit),
        held_out_share=held_out_share,
    )
    cache = _files.cache_folder(config.cache)
    tokenizer = _tokenizer.load(recipe.tokenizer, end_token=recipe.end_token)
    hashes = _hashes(cache, files)
    settings = {**schema.to_plain(recipe), "tokenizer": tokenizer.sha256, "format": config.source}
    key = hashlib.sha256(json.dumps([settings, hashes], sort_keys=True).encode()).hexdigest()[:32]
    folder = cache / "tokens" / key
    if not (folder / index.INDEX).exists():
        source = {"files": [{"name": path.name, "sha256": sha} for path, sha in zip(files, hashes, strict=True)]}
        prepare(files, folder, recipe, processes=len(os.sched_getaffinity(0)), source=source, stamps=hashes)
    return folder


def _hashes(cache: Path, files: list[Path]) -> list[str]:
    """SHA-256 of each file. A file with unchanged size and time is not read again."""
    known_at = cache / "hashes.json"
    try:
        known = json.loads(known_at.read_bytes())
    except (OSError, ValueError):
        known = {}
    hashes, new = [], False
    for path in files:
        stat = path.stat()
        name = f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
        if name not in known:
            known[name], new = index.hash_file(path), True
        hashes.append(known[name])
    if new:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            index.write_json(known_at, known)
        except OSError as error:
            raise UsageError(f"the cache folder {cache} cannot be written: {error.strerror}; set data.cache") from None
    return hashes
