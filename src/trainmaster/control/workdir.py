"""Working folders of jobs, uploaded by content: take chunks and snapshots in, lay them out, sweep them.

An upload asks which chunks are missing, puts those, and then the snapshot's manifest, itself in chunks. Everything is
kept by project: a token of one project can neither read nor detect the files of another. A job whose spec names a
snapshot finds its files in its own working folder when it starts; what it changes there is its own.

    workdirs/<project>/<sha256>-<nonce>     a chunk of at most 1 MiB

An unused snapshot, and a chunk that belongs to none, is deleted a day after the last upload that named it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from trainmaster.control import failpoints, quotas
from trainmaster.core.errors import Damaged, Fault, OverQuota, SpecError, UsageError
from trainmaster.core.files import write_whole
from trainmaster.core.plan import WORK_FOLDER
from trainmaster.core.workdir import (
    CHUNK_BYTES,
    MOST_MANIFEST_BYTES,
    WorkdirFile,
    digest_of,
    find_digest,
    is_digest,
    parse_manifest,
)
from trainmaster.storage import Store
from trainmaster.store import workdirs
from trainmaster.store.database import Database
from trainmaster.store.rows import JobRow
from trainmaster.store.workdirs import BlobRow, WorkdirRow

QUOTA_VARIABLE = "TRAINMASTER_WORKDIR_QUOTA_GIB"
_QUOTA_GIB = 20.0  # of each project
_UNUSED = timedelta(days=1)  # longer than any upload takes


def find_missing(db: Database, project: str, digests: Collection[str]) -> list[str]:
    """The chunks among these that a project does not have. The others stay for a day at least."""
    _check_digests(digests)
    with db.write() as conn:
        workdirs.touch_blobs(conn, project, digests, at=datetime.now(UTC))
    blobs = workdirs.find_blobs(db, project, digests)
    return sorted(set(digests) - blobs.keys())


def put_chunk(db: Database, storage: Store, project: str, sha256: str, data: bytes) -> bool:
    """Store a chunk; False where the project has it. SpecError where the bytes are others, OverQuota where no room is.

    Stored before its row is written, so a row never names an object that is not there.
    """
    _check_digests([sha256])
    if not 0 < len(data) <= CHUNK_BYTES:
        raise SpecError([Fault(path="body", message=f"a chunk has 1 to {CHUNK_BYTES:,} bytes, not {len(data):,}")])
    if digest_of(data) != sha256:
        raise SpecError([Fault(path="sha256", message="the bytes have another SHA-256; read the file again")])
    if not find_missing(db, project, [sha256]):
        return False
    limit, used = read_quota_bytes(os.environ.get(QUOTA_VARIABLE)), workdirs.sum_bytes(db, project)
    if used + len(data) > limit:
        raise OverQuota(
            f"project {project} holds {used:,} of {limit:,} bytes of working folders; delete jobs that need them no "
            f"more, upload less (.trainmasterignore), or ask the operator for more ({QUOTA_VARIABLE})"
        )
    # A new place each time: a sweep that removes an old object cannot meet a new one.
    blob = BlobRow(sha256=sha256, size_bytes=len(data), place=f"workdirs/{project}/{sha256}-{secrets.token_hex(4)}")
    storage.put(blob.place, data)
    with db.write() as conn:
        new = workdirs.insert_blob(conn, project, blob, at=datetime.now(UTC))
    if not new:
        storage.delete(blob.place)
    return new


def put_workdir(db: Database, storage: Store, project: str, sha256: str, chunks: Sequence[str]) -> list[str]:
    """Record a snapshot by the chunks of its manifest; the chunks that are missing, and then nothing is recorded."""
    _check_digests([sha256, *chunks])
    if missing := find_missing(db, project, chunks):
        return missing
    raw = _assemble(db, storage, project, chunks)
    if digest_of(raw) != sha256:
        raise SpecError([Fault(path="sha256", message="the manifest has another SHA-256")])
    manifest = parse_manifest(raw)
    sizes = manifest.chunks()
    if missing := find_missing(db, project, sizes):
        return missing
    blobs = workdirs.find_blobs(db, project, sizes)
    for file in manifest.files:
        if any(blobs[chunk].size_bytes != size for chunk, size in file.chunk_sizes() if chunk in blobs):
            raise SpecError([Fault(path="files", message=f"{file.path!r:.200}: its chunks have other sizes")])
    files, size_bytes = len(manifest.files) + len(manifest.links), manifest.size_bytes
    row = WorkdirRow(project=project, sha256=sha256, manifest=tuple(chunks), files=files, size_bytes=size_bytes)
    needed = {*sizes, *chunks}
    with db.write() as conn:
        # Counted in the transaction that records the snapshot: a sweep may have run since they were looked for.
        if workdirs.touch_blobs(conn, project, needed, at=datetime.now(UTC)) == len(needed):
            workdirs.put_workdir(conn, row, at=datetime.now(UTC))
            return []
    return find_missing(db, project, needed)


def check_known(db: Database, project: str, workdir: str | None) -> None:
    """SpecError where a spec names a snapshot that its project does not have."""
    sha256 = find_digest(workdir)
    if sha256 is not None and workdirs.find_workdir(db, project, sha256) is None:
        message = f"project {project} has no such snapshot; upload it first, or submit with the command line"
        raise SpecError([Fault(path="workdir", message=message)])


def unpack(db: Database, storage: Store, job: JobRow, folder: Path) -> None:
    """Write the files of a job's snapshot into its working folder, once. May be repeated after an interruption."""
    sha256 = find_digest(job.spec.workdir)
    done = _mark(folder)
    if sha256 is None or done.exists():
        return
    row = workdirs.find_workdir(db, job.project, sha256)
    if row is None:
        raise UsageError(f"workdir: project {job.project} no longer has the snapshot {sha256[:12]}…; submit it again")
    manifest = parse_manifest(_assemble(db, storage, job.project, row.manifest))
    blobs = workdirs.find_blobs(db, job.project, manifest.chunks())
    failpoints.before("lay out", sha256)
    work = folder / WORK_FOLDER
    if work.exists():
        shutil.rmtree(work)  # of an interrupted try: no rank runs before the mark below
    work.mkdir(parents=True)
    for file in manifest.files:
        _write_file(storage, blobs, file, work / file.path)
    for link in manifest.links:  # last: no file is written through one
        (work / link.path).parent.mkdir(parents=True, exist_ok=True)
        (work / link.path).symlink_to(link.target)
    write_whole(done, f"{sha256}\n", durable=True, mode=0o600)
    failpoints.after("lay out", sha256)


def forget(folder: Path) -> None:
    """Remove what `unpack` keeps beside the folder of a job that is deleted."""
    _mark(folder).unlink(missing_ok=True)


def _mark(folder: Path) -> Path:
    """Present once the files are laid out: from then on they are the job's own. Beside its folder, which it may own."""
    return folder.with_name(f".{folder.name}.workdir")


def _write_file(storage: Store, blobs: dict[str, BlobRow], file: WorkdirFile, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("wb") as out:
        for chunk in file.chunks:
            out.write(_get(storage, blobs.get(chunk), chunk))
    place.chmod(0o755 if file.executable else 0o644)


def _assemble(db: Database, storage: Store, project: str, chunks: Sequence[str]) -> bytes:
    if len(chunks) * CHUNK_BYTES > MOST_MANIFEST_BYTES:
        raise SpecError([Fault(path="chunks", message=f"a manifest has at most {MOST_MANIFEST_BYTES:,} bytes")])
    blobs = workdirs.find_blobs(db, project, chunks)
    return b"".join(_get(storage, blobs.get(chunk), chunk) for chunk in chunks)


def _get(storage: Store, blob: BlobRow | None, sha256: str) -> bytes:
    data = storage.get(blob.place) if blob is not None else b""
    if digest_of(data) != sha256:
        raise Damaged(f"the chunk {sha256[:12]}… of a working folder is not in storage; submit the job again")
    return data


def sweep(db: Database, storage: Store, *, now: datetime | None = None) -> int:
    """Delete unused snapshots, and chunks that belong to none; the number of chunks deleted."""
    before, count = (now or datetime.now(UTC)) - _UNUSED, 0
    with db.write() as conn:
        workdirs.delete_unused(conn, before=before)
    old = workdirs.list_old_blobs(db, before=before)
    if not old:
        return 0
    needed: dict[str, set[str]] = {}
    for row in workdirs.list_workdirs(db):
        chunks = needed.setdefault(row.project, set())
        chunks.update(row.manifest)
        with contextlib.suppress(Damaged):
            chunks.update(parse_manifest(_assemble(db, storage, row.project, row.manifest)).chunks())
    for project, blob in old:
        if blob.sha256 in needed.get(project, ()):
            continue
        with db.write() as conn:
            gone = workdirs.delete_blob(conn, project, blob.sha256, before=before)
        if gone:
            storage.delete(blob.place)
            count += 1
    return count


def read_quota_bytes(text: str | None) -> int:
    """Bytes of working folders that a project may have in storage."""
    return int(quotas.read_limit(text, variable=QUOTA_VARIABLE, default=_QUOTA_GIB))


def _check_digests(digests: Collection[str]) -> None:
    if malformed := [text for text in digests if not is_digest(text)]:
        raise SpecError([Fault(path="sha256", message=f"{malformed[0]!r:.80} is not a SHA-256 in hex")])
