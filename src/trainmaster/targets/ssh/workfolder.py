"""The files of a job's working folder on their way to a node: one archive, sent in parts, resumed where it was cut.

On the node the archive is compared with its SHA-256, unpacked beside the working folder and renamed: a rank sees all
files or none. A node that has a working folder of the job keeps it, with what the job changed there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from trainmaster.core.errors import TargetError
from trainmaster.core.plan import WORK_FOLDER

if TYPE_CHECKING:  # a node imports this module too, and has no session
    from trainmaster.targets.ssh.session import Session

_PART_BYTES = 4 << 20


async def send(folder: Path, nodes: list[Session], attempt: str) -> None:
    """Send the files of a folder to every node that has no working folder of this job yet."""
    with tempfile.TemporaryFile(prefix="trainmaster-") as archive:
        sha256 = ""
        for node in nodes:
            if (await node.ask("has_work", attempt=attempt)).result.get("present") is True:
                continue
            sha256 = sha256 or _pack(folder, archive.fileno())
            await _send(node, attempt, archive.fileno(), sha256)


async def _send(node: Session, attempt: str, archive: int, sha256: str) -> None:
    begun = (await node.ask("begin_work", attempt=attempt, sha256=sha256)).result.get("offset")
    offset = begun if isinstance(begun, int) and 0 <= begun <= os.fstat(archive).st_size else 0
    while part := os.pread(archive, _PART_BYTES, offset):
        await node.ask("take_work", attempt=attempt, sha256=sha256, offset=offset, body=part)
        offset += len(part)
    await node.ask("end_work", attempt=attempt, sha256=sha256)


def _pack(folder: Path, descriptor: int) -> str:
    """Write an archive that depends on the files alone; its SHA-256."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return info if info.isreg() or info.issym() or info.isdir() else None

    with os.fdopen(os.dup(descriptor), "wb") as raw, tarfile.open(fileobj=raw, mode="w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, path.relative_to(folder).as_posix(), recursive=False, filter=plain)
    digest, offset = hashlib.sha256(), 0
    while part := os.pread(descriptor, _PART_BYTES, offset):
        digest.update(part)
        offset += len(part)
    return digest.hexdigest()


class WorkFolder:
    """The node's end: the working folder of one job, and the archive that is arriving for it."""

    def __init__(self, job: Path) -> None:
        self._job = job
        self.path = job / WORK_FOLDER

    def _part(self, sha256: str) -> Path:
        if len(sha256) != 64 or not sha256.isalnum():
            raise TargetError("no SHA-256 of an archive")
        return self._job / f".work-{sha256}"

    def begin(self, sha256: str) -> int:
        """Bytes of this archive that are here already."""
        self._job.mkdir(parents=True, exist_ok=True)
        part = self._part(sha256)
        part.touch()
        return part.stat().st_size

    def take(self, sha256: str, offset: int, data: bytes) -> None:
        with self._part(sha256).open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def end(self, sha256: str) -> None:
        """Compare, unpack, and put the folder in place. Repeated after its end it changes nothing."""
        if self.path.exists():
            return
        part, draft = self._part(sha256), self._job / f".work-{sha256[:12]}.tmp"
        with part.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                part.unlink()
                raise TargetError("the files of the working folder were damaged on the way; they are sent again")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        with tarfile.open(part) as archive:
            for member in archive:
                _unpack(archive, member, draft)
        draft.rename(self.path)
        part.unlink()


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, draft: Path) -> None:
    """One member as a plain file, folder or link; the control plane has checked where links lead."""
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise TargetError(f"{member.name!r:.200} leads out of the working folder")
    place = draft / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if member.isdir():
        place.mkdir(exist_ok=True)
    elif member.issym():
        place.symlink_to(member.linkname)
    elif (content := archive.extractfile(member)) is not None:
        with content, place.open("wb") as out:
            shutil.copyfileobj(content, out)
        place.chmod(0o755 if member.mode & 0o100 else 0o644)
