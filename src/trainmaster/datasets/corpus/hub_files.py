"""Whole files of the Hub: listed, downloaded into the Hub's own cache with resume, verified by checksum.

The cache is huggingface_hub's (HF_HOME or HF_HUB_CACHE): what another program has downloaded is not fetched again.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainmaster.core.errors import DataError, MissingExtra, UsageError
from trainmaster.datasets.corpus import files as _files
from trainmaster.datasets.corpus.index import hash_file
from trainmaster.datasets.corpus.retry import Retry, brief, is_final

_TRIES = 8  # about a minute of pauses in all
_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a dataset as the Hub lists it."""

    name: str
    size_bytes: int
    sha256: str | None  # of large files; small ones have the hash that git gives them
    git_sha1: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A dataset at one commit."""

    dataset: str
    commit: str
    files: tuple[HubFile, ...]


def commit_of(dataset: str, revision: str) -> str:
    """The commit that a branch or tag stands for now."""
    return str(_info(dataset, revision, files=False).sha)


def listing(dataset: str, revision: str, *, pattern: str | None, subset: str | None, split: str) -> Listing:
    """Files of a dataset: those that match `pattern`, or those of the subset and split by their names."""
    info = _info(dataset, revision, files=True)
    every = [
        HubFile(
            name=item.rfilename,
            size_bytes=item.size or 0,
            sha256=item.lfs.sha256 if item.lfs else None,
            git_sha1=None if item.lfs else item.blob_id,
        )
        for item in info.siblings or ()
    ]
    chosen = [file for file in every if _wanted(file.name, pattern, subset, split)]
    if not chosen:
        shown = ", ".join(file.name for file in every[:8])
        what = f"matches {pattern!r}" if pattern else f"looks like {'/'.join(filter(None, (subset, split)))}"
        raise UsageError(f"hub:{dataset}: none of its {len(every)} files {what} ({shown} …); name them with --files")
    return Listing(dataset=dataset, commit=str(info.sha), files=tuple(sorted(chosen, key=lambda file: file.name)))


def fetch(listing: Listing, advance: Callable[[int], None]) -> list[Path]:
    """Download every file of the listing and verify it; `advance` is called with the bytes done."""

    def fetch_file(file: HubFile) -> Path:
        path = download(listing.dataset, file.name, kind="dataset", revision=listing.commit)
        assert path is not None
        if not _is(path, file):
            # The cache is damaged on disk: download once more. A second mismatch is the Hub's fault.
            path = download(listing.dataset, file.name, kind="dataset", revision=listing.commit, again=True)
            assert path is not None
            if not _is(path, file):
                raise DataError(f"hub:{listing.dataset}/{file.name} does not match its checksum after two downloads")
        advance(file.size_bytes)
        return path

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(fetch_file, listing.files))


def download(
    name: str,
    file: str,
    *,
    kind: Literal["model", "dataset"],
    revision: str | None = None,
    missing_ok: bool = False,
    again: bool = False,
) -> Path | None:
    """One file, from the cache or the Hub; an interrupted download is resumed."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise MissingExtra("the Hub", "data") from None

    def fetch_it() -> str:
        return str(hf_hub_download(name, file, repo_type=kind, revision=revision, force_download=again))

    try:
        return Path(Retry(f"hub:{name}/{file}", tries=_TRIES).call(fetch_it))
    except Exception as error:
        if missing_ok and is_final(error):
            return None
        raise _plain(name, error) from error


def _info(dataset: str, revision: str, *, files: bool) -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise MissingExtra("the Hub", "data") from None
    retry = Retry(f"hub:{dataset}", tries=_TRIES)
    try:
        return retry.call(lambda: HfApi().dataset_info(dataset, revision=revision, files_metadata=files))
    except Exception as error:
        raise _plain(dataset, error) from error


def _plain(name: str, error: Exception) -> Exception:
    if is_final(error):
        return DataError(f"hub:{name}: {brief(error)}; look at its name, and at HF_TOKEN if it is private or gated")
    if isinstance(error, (DataError, MissingExtra)):
        return error
    return DataError(f"hub:{name} cannot be reached: {brief(error)}; run it again, it goes on where it was")


def _wanted(name: str, pattern: str | None, subset: str | None, split: str) -> bool:
    if pattern is not None:
        return fnmatch.fnmatch(name, pattern)
    if _files.guess(name) in (None, "text"):  # a README is no data
        return False
    words = list(_words(name))
    return split in words and (subset is None or subset in words)


def _words(name: str) -> Iterator[str]:
    """`en/c4-train.00000-of-01024.json.gz` → en, c4, train, …"""
    for part in Path(name).parts:
        yield part
        word = part
        for mark in "-_.":
            word = word.replace(mark, " ")
        yield from word.split()


def _is(path: Path, file: HubFile) -> bool:
    if file.size_bytes and path.stat().st_size != file.size_bytes:
        return False
    if file.sha256 is not None:
        return hash_file(path) == file.sha256
    if file.git_sha1 is not None:
        content = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == file.git_sha1  # noqa: S324 (git's)
    return True
