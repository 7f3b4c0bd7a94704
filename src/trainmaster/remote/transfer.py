"""A tree of files in units of at most 8 MiB, each with its SHA-256. Both ends of a transfer use this module.

Small files are packed together into one unit and a large file is cut into many, so both use the link alike. A receiver
writes units into a draft folder and notes each in a journal; a transfer that was cut goes on with the units that are
missing. Journaled units are read again and compared first: a machine may have lost power in between. The files get
their names when the last unit is there.

    DRAFT/manifest   DRAFT/journal   DRAFT/files/…        DRAFT is .trainmaster-<name> in or beside the destination
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainmaster.core.errors import DiskFull, TargetError
from trainmaster.core.files import sync, sync_file_system

UNIT_BYTES = 8 << 20
PIECE_BYTES = 256 << 10  # of a unit that are hashed and written at once: they stay in the processor's cache
_UNIT_SLICES = 4096
MAX_ENTRIES = 1_000_000
_MAX_RAW_BYTES, _MAX_TIME_NS = 512 << 20, 1 << 62  # of a list of files: a million entries with long paths
_MAX_BYTES = 16 << 40  # of a tree: two million units, which are held in memory
_DRAFT_PREFIX = ".trainmaster-"
_ABANDONED_S = 86_400.0  # a draft without a write for this long belongs to a transfer that was given up


class Changed(TargetError):
    """A file changed while it was copied."""


class DamagedUnit(TargetError):
    """Bytes that arrived have another SHA-256 than those that were sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file, folder or symbolic link of a tree."""

    kind: str  # file, folder or link
    path: str  # relative, with slashes
    size_bytes: int = 0
    mode: int = 0o644
    mtime_ns: int = 0
    link: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A range of one file."""

    path: str
    start: int
    length: int


Unit = tuple[Slice, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Every entry of a tree, in the order of its units."""

    entries: tuple[Entry, ...]

    @cached_property
    def raw(self) -> bytes:
        rows = [[item.kind, item.path, item.size_bytes, item.mode, item.mtime_ns, item.link] for item in self.entries]
        return json.dumps(rows).encode()

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()[:32]

    def draft(self, machine: str) -> str:
        """Name of the draft on one machine. Machines that share a folder may receive one tree at once."""
        return hashlib.sha256(f"{self.digest} {machine}".encode()).hexdigest()[:32]

    @cached_property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        return tuple(_units(self.entries))

    def pack(self) -> bytes:
        return zlib.compress(self.raw, 1)

    @classmethod
    def unpack(cls, data: bytes) -> Manifest:
        """The manifest that another machine sent; TargetError where a path could lead out of the destination."""
        try:
            rows = json.loads(_decompress(data))
            if len(rows) > MAX_ENTRIES:
                raise TargetError(f"{len(rows):,} files; at most {MAX_ENTRIES:,} are copied at once")
            entries = tuple(_received(row) for row in rows)
        except (ValueError, TypeError, OverflowError, zlib.error, RecursionError) as error:
            raise TargetError(f"no list of files: {str(error)[:200]}") from None
        leaves = {entry.path for entry in entries if entry.kind != "folder"}
        for entry in entries:
            _check(entry, leaves)
        if len({entry.path for entry in entries}) < len(entries):
            raise TargetError("no list of files: it names one of them twice")
        if (size := sum(entry.size_bytes for entry in entries)) > _MAX_BYTES:
            raise TargetError(f"{size:,} bytes; at most {_MAX_BYTES:,} are copied at once")
        return cls(entries=entries)


def _decompress(data: bytes) -> bytes:
    """The list in a packed manifest; a few bytes could unpack to gigabytes."""
    packed = zlib.decompressobj()
    raw = packed.decompress(data, _MAX_RAW_BYTES)
    if not packed.eof:
        raise ValueError("it is not whole, or too long")
    return raw


def _received(row: Sequence[Any]) -> Entry:
    kind, path, size, mode, at, link = row
    mode = int(mode) & 0o777
    return Entry(kind=str(kind), path=str(path), size_bytes=int(size), mode=mode, mtime_ns=int(at), link=str(link))


def scan(source: Path, *, name: str | None = None) -> Manifest:
    """The tree of a folder, or of a single file under `name`. Devices, sockets and pipes are left out."""
    facts = source.stat()
    if stat.S_ISREG(facts.st_mode):
        return Manifest(entries=(_entry("file", name or source.name, facts),))
    if not stat.S_ISDIR(facts.st_mode):
        raise TargetError(f"{source} is neither a file nor a folder")
    entries, ahead = [], [(source, "")]
    while ahead:
        folder, prefix = ahead.pop()
        for item in sorted(os.scandir(folder), key=lambda item: item.name):
            path, facts = f"{prefix}{item.name}", item.stat(follow_symlinks=False)
            if stat.S_ISLNK(facts.st_mode):
                entries.append(Entry(kind="link", path=path, link=str(Path(item.path).readlink())))
            elif stat.S_ISDIR(facts.st_mode):
                if not item.name.startswith(_DRAFT_PREFIX):
                    entries.append(_entry("folder", path, facts))
                    ahead.append((Path(item.path), f"{path}/"))
            elif stat.S_ISREG(facts.st_mode):
                entries.append(_entry("file", path, facts))
    return Manifest(entries=tuple(entries))


def _entry(kind: str, path: str, facts: os.stat_result) -> Entry:
    size = facts.st_size if kind == "file" else 0
    mtime_ns = facts.st_mtime_ns if kind == "file" else 0
    return Entry(kind=kind, path=path, size_bytes=size, mode=facts.st_mode & 0o777, mtime_ns=mtime_ns)


def _check(entry: Entry, leaves: Collection[str]) -> None:
    """TargetError for an entry that could be written outside the destination; `leaves` are files and links."""
    above, outward = entry.path, {"", ".", ".."}
    inside = outward.isdisjoint(above.split("/")) and _is_name(above + entry.link)
    while inside and (above := above.rpartition("/")[0]):
        inside = above not in leaves
    if not inside:
        raise TargetError(f"{entry.path!a:.200} leads out of the destination")
    if entry.kind not in ("file", "folder", "link") or entry.size_bytes < 0 or abs(entry.mtime_ns) > _MAX_TIME_NS:
        raise TargetError(f"{entry.path!a:.200} is neither a file, a folder nor a link")


def _is_name(text: str) -> bool:
    """Whether a file system can hold it. Bytes that are not UTF-8 are surrogate escapes; other surrogates are none."""
    try:
        return "\0" not in text and bool(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return False


def _units(entries: Sequence[Entry]) -> Iterator[Unit]:
    unit: list[Slice] = []
    room = UNIT_BYTES
    for entry in entries:
        if entry.kind != "file":
            continue
        start = 0
        while True:
            length = min(room, entry.size_bytes - start)
            unit.append(Slice(path=entry.path, start=start, length=length))
            start, room = start + length, room - length
            if room == 0 or len(unit) == _UNIT_SLICES:
                yield tuple(unit)
                unit, room = [], UNIT_BYTES
            if start == entry.size_bytes:
                break
    if unit:
        yield tuple(unit)


def read_unit(root: Path, unit: Unit) -> bytes:
    """The bytes of a unit; Changed where a file became shorter or went away."""
    parts, folder = [], str(root)  # a path object per file would take longer than the file
    for piece in unit:
        try:
            fd = os.open(f"{folder}/{piece.path}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise Changed(f"{root / piece.path} was removed while it was copied") from None
        try:
            part = os.pread(fd, piece.length, piece.start)
        finally:
            os.close(fd)
        if len(part) != piece.length:
            raise Changed(f"{root / piece.path} became shorter while it was copied")
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


class FileUnit:
    """A unit that is a part of one file: hashed in pieces that fit the processor's cache, sent by the kernel.

    The bytes are never held here: on a gigabyte two copies through memory cost as much as its SHA-256.
    """

    def __init__(self, root: Path, piece: Slice) -> None:
        self._path, self._start, self._length = root / piece.path, piece.start, piece.length

    def __len__(self) -> int:
        return self._length

    def sha256(self) -> str:
        digest, buffer = hashlib.sha256(), bytearray(min(PIECE_BYTES, self._length))
        fd = self._open()
        try:
            done = 0
            while done < self._length:
                view = memoryview(buffer)[: self._length - done]
                got = os.preadv(fd, [view], self._start + done)
                if not got:
                    raise self._changed()
                digest.update(view[:got])
                done += got
        finally:
            os.close(fd)
        return digest.hexdigest()

    def send(self, descriptor: int) -> None:
        """Write the bytes into a pipe; Changed where there are fewer by now, after a part of them."""
        fd = self._open()
        try:
            done = 0
            while done < self._length:
                got = os.sendfile(descriptor, fd, self._start + done, self._length - done)
                if not got:
                    raise self._changed()
                done += got
        finally:
            os.close(fd)

    def read(self) -> bytes:
        return read_unit(self._path.parent, (Slice(path=self._path.name, start=self._start, length=self._length),))

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise Changed(f"{self._path} was removed while it was copied") from None

    def _changed(self) -> Changed:
        return Changed(f"{self._path} became shorter while it was copied")


class Incoming:
    """The receiving end of one transfer. Any number of processes may write units of it at the same time."""

    def __init__(self, into: Path, draft: str) -> None:
        name = f"{_DRAFT_PREFIX}{draft}"
        beside = into.parent / f"{name}-{into.name}"
        self.into = into
        self._draft = beside if beside.exists() or not into.exists() else into / name
        self._files = self._draft / "files"
        self._manifest: Manifest | None = None

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            self._manifest = Manifest.unpack((self._draft / "manifest").read_bytes())
        return self._manifest

    def begin(self, manifest: Manifest) -> set[int]:
        """Make the draft, or find it; the numbers of the units that are there and right."""
        self._manifest = manifest
        if (self._draft / "manifest").exists():
            return self._read_journal()
        _drop_abandoned(self._draft.parent)
        self._draft.parent.mkdir(parents=True, exist_ok=True)
        room = shutil.disk_usage(self._draft.parent)
        if room.total and room.free < manifest.size_bytes:
            raise DiskFull(f"{self._draft.parent} has {room.free:,} bytes free, {manifest.size_bytes:,} are needed")
        shutil.rmtree(self._draft, ignore_errors=True)
        self._files.mkdir(parents=True)
        folders = {entry.path.rpartition("/")[0] for entry in manifest.entries}
        folders |= {entry.path for entry in manifest.entries if entry.kind == "folder"}
        for folder in sorted(folders):
            (self._files / folder).mkdir(parents=True, exist_ok=True)
        part = self._draft / "manifest.part"
        part.write_bytes(manifest.pack())
        part.rename(self._draft / "manifest")  # last: with it the draft can be gone on with
        return set()

    def write(self, number: int, digest: str, data: bytes | memoryview) -> None:
        """Write one unit; DamagedUnit where its bytes are not those that were sent."""
        view, at = memoryview(data), 0

        def take(most: int) -> memoryview:
            nonlocal at
            at += most
            return view[at - most : at]

        self.receive(number, digest, len(data), take)

    def receive(self, number: int, digest: str, size: int, take: Callable[[int], memoryview]) -> None:
        """Write one unit piece by piece; `take` gives the next bytes, as many as it is asked for.

        The bytes are compared when all are written: before that the unit is not in the journal, and is sent again.
        """
        unit, actual = self.manifest.units[number], hashlib.sha256()
        if sum(part.length for part in unit) != size:
            raise DamagedUnit(f"unit {number} of {self.into} has {size:,} bytes")
        folder = str(self._files)
        for part in unit:
            fd = os.open(f"{folder}/{part.path}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                for start in range(0, part.length, PIECE_BYTES):
                    piece = take(min(PIECE_BYTES, part.length - start))
                    actual.update(piece)
                    _pwrite(fd, piece, part.start + start)
            finally:
                os.close(fd)
        if actual.hexdigest() != digest:
            raise DamagedUnit(f"unit {number} of {self.into} was damaged on the way")
        journal = os.open(self._draft / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(journal, f"{number} {digest}\n".encode())  # one write: lines of several processes do not mix
        finally:
            os.close(journal)

    def finish(self, *, durable: bool = False) -> None:
        """Give the files their names. Repeated after its end it changes nothing.

        `durable`: on the disk before they have their names, so that a machine that loses power has all or none.
        """
        if not self._draft.exists():
            return
        missing = set(range(len(self.manifest.units))) - {number for number, _ in self._journal()}
        if missing:
            raise TargetError(f"{len(missing)} of {len(self.manifest.units)} units of {self.into} did not arrive")
        folder = str(self._files)
        for entry in self.manifest.entries:
            if entry.kind == "link":
                (self._files / entry.path).unlink(missing_ok=True)
                (self._files / entry.path).symlink_to(entry.link)
            elif entry.kind == "file":
                os.chmod(f"{folder}/{entry.path}", entry.mode)  # noqa: PTH101 (as in read_unit)
                os.utime(f"{folder}/{entry.path}", ns=(entry.mtime_ns, entry.mtime_ns))
        if durable:
            sync_file_system(self._files)
        if self.into.exists() or not _rename(self._files, self.into):
            _merge(self._files, self.into, self.manifest.entries)
        if durable:
            sync(self.into.parent)
        shutil.rmtree(self._draft)

    def drop(self) -> None:
        """Remove the draft."""
        shutil.rmtree(self._draft, ignore_errors=True)

    def _read_journal(self) -> set[int]:
        done = set()
        for number, digest in self._journal():
            try:
                if sha256(read_unit(self._files, self.manifest.units[number])) == digest:
                    done.add(number)
            except (OSError, TargetError, IndexError):
                continue
        return done

    def _journal(self) -> Collection[tuple[int, str]]:
        try:
            lines = (self._draft / "journal").read_text().splitlines()
        except FileNotFoundError:
            return []
        pairs = [line.split() for line in lines]
        return {(int(pair[0]), pair[1]) for pair in pairs if len(pair) == 2 and pair[0].isdecimal()}


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _rename(files: Path, into: Path) -> bool:
    """Give all files their names at once: a reader sees all or none. False where another machine was first."""
    try:
        files.rename(into)
    except OSError:
        if not into.is_dir():
            raise
        return False
    return True


def _merge(files: Path, into: Path, entries: Sequence[Entry]) -> None:
    """Move every entry into a folder that exists; files of the same name are replaced."""
    root = into.resolve()
    for entry in entries:
        place = into / entry.path
        folder = place if entry.kind == "folder" else place.parent
        folder.mkdir(parents=True, exist_ok=True)
        if not folder.resolve().is_relative_to(root):
            raise TargetError(f"{place} leads out of {into} through a link")
        if entry.kind != "folder":
            (files / entry.path).replace(place)


def _drop_abandoned(folder: Path) -> None:
    """Remove drafts of transfers that were given up."""
    for old in folder.glob(f"{_DRAFT_PREFIX}*"):
        try:
            newest = max((old / name).stat().st_mtime for name in ("manifest", "journal") if (old / name).exists())
        except (OSError, ValueError):
            continue
        if time.time() - newest > _ABANDONED_S:
            shutil.rmtree(old, ignore_errors=True)
