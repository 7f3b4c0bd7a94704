"""Upload of a working folder: scan it, ask which chunks the receiver lacks, send those.

    snapshot = scan(Path("project"))
    workdir = upload(snapshot, receiver)      "sha256:…", for the `workdir` of a spec

Left out: what `.trainmasterignore` in the folder names (else its `.gitignore`), what IGNORED names, and keys and tokens
(client/secret_files.py), which are listed; a rule `!name` brings them back. A link inside the folder stays a link; one
that leads out of it is refused. Sockets, pipes and devices are left out and listed. Empty folders are not kept.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainmaster.client.secret_files import KEY_NAMES, find_secret
from trainmaster.core.errors import UsageError
from trainmaster.core.spec import GLOBAL_FILE
from trainmaster.core.workdir import (
    CHUNK_BYTES,
    HOME_ID_FILE,
    MOST_BYTES,
    MOST_FILES,
    PREFIX,
    Manifest,
    WorkdirFile,
    WorkdirLink,
    digest_of,
    is_inside,
)

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILES = (".trainmasterignore", ".gitignore")  # the first that is there counts
# Caches and environments, and files of keys: a server must not get them by accident.
IGNORED = (
    ".git/", ".hg/", ".svn/", "__pycache__/", "*.pyc", ".venv/", "venv/", "node_modules/", ".mypy_cache/",
    ".pytest_cache/", ".ruff_cache/", ".ipynb_checkpoints/", ".trainmaster/", f"/{GLOBAL_FILE}",
    *KEY_NAMES,
)  # fmt: skip
_ASKED = 5_000  # chunks in one question
_TURNS = 3  # of an upload whose chunks a sweep removes meanwhile
_SHOWN = 5


class TooLarge(UsageError):
    """The folder has more files or bytes than a snapshot may have."""


class Receiver(Protocol):
    """Where a snapshot goes: a server, or the storage of a home folder."""

    def find_missing(self, digests: Sequence[str]) -> Sequence[str]:
        """The chunks among these that it lacks."""

    def put_chunk(self, sha256: str, data: bytes) -> None: ...

    def put_workdir(self, sha256: str, chunks: Sequence[str]) -> Sequence[str]:
        """Record the snapshot by the chunks of its manifest; chunks that are missing, and then it is not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A folder as it was read."""

    folder: Path
    manifest: Manifest
    left_out: tuple[str, ...] = ()  # entries that are no files, with the reason
    secrets: tuple[str, ...] = ()  # files of keys and tokens that no rule of the folder names, with the reason


def scan(folder: Path, *, apart: Sequence[Path] = (), most_files: int = MOST_FILES) -> Snapshot:
    """Read a folder, without the places in `apart`; UsageError where it cannot become a snapshot."""
    folder = folder.absolute()
    if not folder.is_dir():
        raise UsageError(f"workdir: {folder} is not a folder")
    left = frozenset(path.resolve() for path in apart)
    own = _read_rules(folder)
    state = _Scan(
        folder=folder,
        ignore=compile_rules([*IGNORED, *own]),
        own=compile_rules(own),
        key_names=compile_rules(KEY_NAMES),
        apart=left,
        apart_names=frozenset(path.name for path in left),
        most_files=most_files,
    )
    try:
        _scan_folder(state, "")
    except OSError as error:
        raise UsageError(f"workdir: {error.filename or folder}: {error.strerror or error}") from error
    manifest = Manifest(files=tuple(state.files), links=tuple(state.links))
    return Snapshot(folder=folder, manifest=manifest, left_out=tuple(state.left_out), secrets=tuple(state.secrets))


def _read_rules(folder: Path) -> list[str]:
    """The rules of a folder."""
    file = _find_rules(folder)
    return file.read_text(errors="replace").splitlines() if file is not None else []


def _find_rules(folder: Path) -> Path | None:
    return next((folder / name for name in IGNORE_FILES if (folder / name).is_file()), None)


def compile_rules(lines: Iterable[str]) -> GitIgnoreSpec:
    """Rules in the form of .gitignore. One that makes no sense, such as the class [z-a], matches nothing."""
    from pathspec import GitIgnoreSpec

    patterns: list[Any] = []
    for line in lines:
        with contextlib.suppress(re.error, ValueError):
            patterns += GitIgnoreSpec.from_lines([line]).patterns
    return GitIgnoreSpec(patterns)


@dataclass(slots=True, kw_only=True)
class _Scan:
    """What was found so far."""

    folder: Path
    ignore: GitIgnoreSpec
    own: GitIgnoreSpec  # the rules of the folder alone
    key_names: GitIgnoreSpec
    apart: frozenset[Path]
    apart_names: frozenset[str]  # without resolving every path
    most_files: int
    files: list[WorkdirFile] = field(default_factory=list)
    links: list[WorkdirLink] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    size_bytes: int = 0


def _scan_folder(state: _Scan, prefix: str) -> None:
    for entry in sorted(os.scandir(state.folder / prefix), key=lambda entry: entry.name):
        path, is_folder = f"{prefix}{entry.name}", entry.is_dir(follow_symlinks=False)
        rule_path = f"{path}/" if is_folder else path
        if state.ignore.match_file(rule_path):
            if state.key_names.match_file(rule_path) and not state.own.match_file(rule_path):
                state.secrets.append(f"{rule_path} (the name of a key)")
            continue
        if entry.name in state.apart_names and Path(entry.path).resolve() in state.apart:
            continue
        if any("\ud800" <= letter <= "\udfff" or ord(letter) < 32 for letter in entry.name):
            state.left_out.append(f"{path!a}: its name is not UTF-8 or has a control character")
        elif entry.is_symlink():
            _count(state, 0)
            state.links.append(_read_link(path, Path(entry.path)))
        elif is_folder and (Path(entry.path) / HOME_ID_FILE).is_file():
            state.left_out.append(f"{path}: a home folder of Trainmaster, with its keys")
        elif is_folder:
            _scan_folder(state, f"{path}/")
        elif entry.is_file(follow_symlinks=False):
            _count(state, entry.stat(follow_symlinks=False).st_size)
            file, secret = _read_file(path, Path(entry.path))
            if secret is None or state.own.check_file(path).include is False:  # a rule `!name`
                state.files.append(file)
            else:
                state.secrets.append(f"{path} ({secret})")
        else:
            state.left_out.append(f"{path}: no file but a socket, a pipe or a device")


def _count(state: _Scan, size_bytes: int) -> None:
    """Count an entry before it is read: a folder that is too large must not be read for an hour first."""
    state.size_bytes += size_bytes
    if len(state.files) + len(state.links) >= state.most_files or state.size_bytes > MOST_BYTES:
        raise TooLarge(
            f"workdir: {state.folder} has more than {state.most_files:,} files or {MOST_BYTES / 2**30:g} GiB; name "
            f"what the job does not need in {IGNORE_FILES[0]} there, or state a smaller folder: --workdir FOLDER"
        )


def _read_link(path: str, place: Path) -> WorkdirLink:
    target = str(place.readlink())
    if not is_inside(path, target):
        raise UsageError(
            f"workdir: {place} is a link to {target}, outside of the folder; replace it by what it names, or list it "
            f"in {IGNORE_FILES[0]}"
        )
    return WorkdirLink(path=path, target=target)


def _read_file(path: str, place: Path) -> tuple[WorkdirFile, str | None]:
    """The file, and what secret it holds."""
    fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # it may have become a pipe
    with os.fdopen(fd, "rb") as file:
        before = os.fstat(file.fileno())
        chunks: list[str] = []
        size_bytes, secret = 0, None
        while data := file.read(CHUNK_BYTES):
            secret = secret if chunks else find_secret(data, before.st_size)
            chunks.append(digest_of(data))
            size_bytes += len(data)
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or size_bytes != after.st_size:
        raise _changed(place)
    executable = bool(before.st_mode & stat.S_IXUSR)
    return WorkdirFile(path=path, size_bytes=size_bytes, chunks=tuple(chunks), executable=executable), secret


def _changed(place: Path) -> UsageError:
    return UsageError(
        f"workdir: {place} changed while it was read; submit again, or list it in {IGNORE_FILES[0]} if it always does"
    )


def upload(snapshot: Snapshot, receiver: Receiver, *, on_progress: Callable[[int, int], None] | None = None) -> str:
    """Send what the receiver lacks; the snapshot's name. `on_progress` gets the bytes sent and those to send."""
    raw = snapshot.manifest.to_bytes()
    parts = [raw[first : first + CHUNK_BYTES] for first in range(0, len(raw), CHUNK_BYTES)]
    sha256, own = digest_of(raw), {digest_of(part): part for part in parts}
    chunks, sizes = [digest_of(part) for part in parts], snapshot.manifest.chunks()
    for _ in range(_TURNS):
        missing = set(_find_missing(receiver, sorted({*sizes, *own})))
        total, sent = sum(sizes.get(digest, 0) for digest in missing), 0
        for digest, data in _read_chunks(snapshot, missing):
            receiver.put_chunk(digest, data)
            sent += len(data)
            if on_progress is not None:
                on_progress(sent, total)
        for digest in missing & own.keys():
            receiver.put_chunk(digest, own[digest])
        if not receiver.put_workdir(sha256, chunks):
            return f"{PREFIX}{sha256}"
    raise UsageError("workdir: chunks were removed while others were sent; submit again")


def _find_missing(receiver: Receiver, digests: Sequence[str]) -> Iterator[str]:
    for first in range(0, len(digests), _ASKED):
        yield from receiver.find_missing(digests[first : first + _ASKED])


def _read_chunks(snapshot: Snapshot, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    """The wanted chunks, each once, read again from their files and compared."""
    left = set(wanted)
    for file in snapshot.manifest.files:
        for number, digest in enumerate(file.chunks):
            if digest not in left:
                continue
            left.discard(digest)
            place = snapshot.folder / file.path
            try:
                with place.open("rb") as source:
                    source.seek(number * CHUNK_BYTES)
                    data = source.read(CHUNK_BYTES)
            except OSError as error:
                raise UsageError(f"workdir: {place}: {error.strerror or error}") from error
            if digest_of(data) != digest:
                raise _changed(place)
            yield digest, data


def describe_left_out(snapshot: Snapshot) -> str:
    """Sentences for the user; empty where nothing was left out."""
    said = []
    if snapshot.secrets:
        example = "!" + snapshot.secrets[0].rpartition(" (")[0]
        rules = (_find_rules(snapshot.folder) or Path(IGNORE_FILES[0])).name
        said.append(
            f"not uploaded: {_list(snapshot.secrets)}; to upload one all the same, write it as {example} into {rules}"
        )
    if snapshot.left_out:
        said.append(f"not uploaded: {_list(snapshot.left_out)}")
    return "\n".join(said)


def _list(entries: Sequence[str]) -> str:
    more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return "; ".join(entries[:_SHOWN]) + more
