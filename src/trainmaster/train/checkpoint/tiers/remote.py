"""Checkpoints in an object store, or on a file system far away: copies of what the disk tier has committed.

    URL/step-00000050.7/__0_0.distcp …  files as on the disk, uploaded by the run with fencing number 7 of this URL
    URL/step-00000050/manifest.json     put last: an upload that was cut off has none, and is never read
    URL/.lock/00000007.json             the lock of this URL

Every rank uploads and downloads its share of the files. Each is hashed while it is sent, and again when it comes back.
Two runs never write the same object, except the manifest, which names the prefix of its files.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from trainmaster.core.errors import CheckpointError, ObjectMissing, StorageError
from trainmaster.storage import Store, open_store
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.lock import Fence
from trainmaster.train.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from trainmaster.train.checkpoint.tiers.loss_bound import REMOTE
from trainmaster.train.drill.failpoints import reach
from trainmaster.train.parallel import rank_sync

_PIECE_BYTES = 16 << 20
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts to download; an object store's bad minute is mostly shorter
_STEP = re.compile(r"(step-(\d{8,})(?:\.\d+)?)/(.+)")
_FINISHED = re.compile(rf"step-(\d{{8,}})/{re.escape(MANIFEST)}")


class Remote:
    """A store of this run's own. Every method is called on all ranks alike, and fails on all alike (RankError)."""

    name = REMOTE
    verifies = True

    def __init__(
        self,
        url: str,
        *,
        disk: Path,
        lease_s: float,
        uploads: dist.ProcessGroup | None,
        asks: dist.ProcessGroup | None,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        """`disk` is the folder that all nodes share: uploads come from there, and downloads go to it.

        `guard` raises on rank 0 where this run may no longer write to that folder. Uploads have their own group: one
        may be under way in its thread while the steps are listed.
        """
        self._store: Store = open_store(url)
        self.fence = Fence(lambda: self._store, lease_s=lease_s)
        self._guard = guard
        self._disk, self._uploads, self._asks = disk, uploads, asks
        self._sent: tuple[int, set[str]] = (-1, set())  # files of a step that are there already, after a failure

    def upload(self, step: int, *, keep: int) -> str | None:
        """Copy a committed step there; returns a fault beside it as text: old ones that could not be deleted."""
        self.fence.check(group=self._uploads)
        path = manifests.path_of(self._disk, step)
        manifest = rank_sync.on_first(lambda: manifests.read(path), group=self._uploads)
        if self._sent[0] != step:
            self._sent = (step, set())
        rank_sync.on_all(lambda: self._send_mine(path, manifest), group=self._uploads)
        self.fence.check(group=self._uploads)
        rank_sync.on_first(lambda: self._commit(manifest), group=self._uploads)
        objects = self._objects(step)
        try:
            rank_sync.on_first(lambda: prune(self._store, keep=keep, newest=step, objects=objects), group=self._uploads)
        except rank_sync.RankError as error:
            return f"old checkpoints in {self} could not be deleted: {error}"
        return None

    def agreed(self, question: Callable[[], bool]) -> bool:
        """Rank 0's answer, for what the ranks decide between uploads."""
        return rank_sync.on_first(question, group=self._uploads)

    def where(self, step: int) -> str:
        return f"{self._store.url}/{_name(step)}"

    def __str__(self) -> str:
        return self._store.url

    def list_steps(self) -> list[int]:
        return rank_sync.on_first(lambda: list_steps(self._store), group=self._asks)

    def fetch(self, step: int) -> tuple[Path, Manifest]:
        """Download it into the folder on disk, where it is committed like any other. What is there already is kept.

        A store that stops to answer is tried again, and then a refusal (CheckpointError): its step may be good, and
        an older one would lose what it has.
        """
        final = manifests.path_of(self._disk, step)
        draft = final.with_name(f"{final.name}.tmp")
        received: tuple[Path, Manifest] | str = ""
        for pause_s in (*_PAUSES_S, None):
            received = self._receive(step, draft)
            if not isinstance(received, str):
                return received
            if pause_s is not None:
                time.sleep(pause_s)
        raise CheckpointError(f"{self.where(step)} was found, and cannot be downloaded now: {received}")

    def _receive(self, step: int, draft: Path) -> tuple[Path, Manifest] | str:
        """One attempt to download; a text is the reason that the store could not be read."""
        manifest = rank_sync.on_first(lambda: self._prepare(step, draft), group=self._asks)
        if isinstance(manifest, str):
            return manifest
        cut_off = rank_sync.on_all(lambda: self._receive_mine(draft, manifest), group=self._asks)
        if why := next(filter(None, cut_off), None):
            return why
        ours = replace(manifest, objects=None)
        path = rank_sync.on_first(lambda: manifests.commit(draft, ours, guard=self._guard), group=self._asks)
        return path, ours

    def _objects(self, step: int) -> str:
        """The prefix that this run alone uploads the files of a step to."""
        return f"{_name(step)}.{self.fence.number}"

    def _send_mine(self, path: Path, manifest: Manifest) -> None:
        sent = self._sent[1]
        for name, record in _share(manifest.files).items():
            if name not in sent:
                self._store.put(f"{self._objects(manifest.step)}/{name}", _hashed(path / name, record))
                sent.add(name)
                reach("remote:file")

    def _commit(self, manifest: Manifest) -> None:
        objects = self._objects(manifest.step)
        sizes = {item.path: item.size_bytes for item in self._store.list(objects)}
        for name, record in manifest.files.items():
            size = sizes.get(f"{objects}/{name}")
            if size != record.size_bytes:
                self._sent = (-1, set())  # uploaded files disappear there: begin from the start
                raise StorageError(f"{self._store.url}/{objects}/{name} has {size} bytes there after its upload")
        reach("remote:manifest")
        named = replace(manifest, objects=objects)
        self._store.put(f"{_name(manifest.step)}/{MANIFEST}", manifests.render(named).encode())

    def _prepare(self, step: int, draft: Path) -> Manifest | str:
        """Its manifest, and a draft to receive it; or why the store could not be asked. What is damaged is raised."""
        try:
            manifest = manifests.parse(self._store.get(f"{_name(step)}/{MANIFEST}"))
            objects = manifest.objects or _name(step)
            sizes = {item.path: item.size_bytes for item in self._store.list(objects)}
        except ObjectMissing:
            raise
        except StorageError as error:
            return str(error)
        for name, record in manifest.files.items():
            size = sizes.get(f"{objects}/{name}")
            if size != record.size_bytes:
                fault = "is missing" if size is None else f"has {size} bytes instead of {record.size_bytes}"
                raise CheckpointError(f"{name} {fault}")
        draft.mkdir(parents=True, exist_ok=True)
        for entry in draft.iterdir():
            if entry.name not in manifest.files:
                entry.unlink()  # of a save that was cut off here
        return manifest

    def _receive_mine(self, draft: Path, manifest: Manifest) -> str | None:
        """This rank's share; why the store could not be asked on, if it could not."""
        try:
            for name, record in _share(manifest.files).items():
                download(self._store, f"{manifest.objects or _name(manifest.step)}/{name}", draft / name, record)
        except ObjectMissing:
            raise
        except StorageError as error:
            return str(error)
        return None


def list_steps(store: Store) -> list[int]:
    """Every step whose upload was finished, newest first, good or bad."""
    matches = (_FINISHED.fullmatch(item.path) for item in store.list())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def download(store: Store, path: str, to: Path, record: FileRecord) -> None:
    """Bring one file here, going on where an earlier download ended; CheckpointError if it is not as recorded."""
    for attempt in range(2):
        digest = hashlib.sha256()
        with to.open("a+b") as file:
            if attempt or file.seek(0, 2) > record.size_bytes:
                file.truncate(0)
            file.seek(0)
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
            begun = file.tell()
            for start in range(begun, record.size_bytes, _PIECE_BYTES):
                piece = store.read(path, start=start, size=min(_PIECE_BYTES, record.size_bytes - start))
                digest.update(piece)
                file.write(piece)
        if digest.hexdigest() == record.sha256:
            return
        if not begun:
            break
        # What was here may have been of something else; the store's own bytes get one try by themselves.
    to.unlink()
    raise CheckpointError(f"{store.url}/{path} does not match its SHA-256")


def prune(store: Store, *, keep: int, newest: int, objects: str) -> None:
    """Delete all but the `keep` newest finished uploads up to `newest`, and files that cut-off uploads left.

    The files of `newest` itself are under the prefix `objects`; any others are of an earlier upload of that step.
    """
    kept = [step for step in list_steps(store) if step <= newest][:keep]
    for item in sorted(store.list(), key=lambda item: not item.path.endswith(f"/{MANIFEST}")):
        match = _STEP.fullmatch(item.path)
        # The manifest first: what is half deleted must not look like a damaged checkpoint.
        if not match or int(match[2]) > newest:
            continue
        replaced = int(match[2]) == newest and match[1] != objects and match[3] != MANIFEST
        if replaced or int(match[2]) not in kept:
            store.delete(item.path)


def _hashed(path: Path, record: FileRecord) -> Iterator[bytes]:
    """The file piece by piece; raises at the end, so that no object is created, if it differs from the manifest."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            yield piece
    if digest.hexdigest() != record.sha256:
        raise CheckpointError(f"{path} does not match its SHA-256, and was not uploaded")


def _share(files: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """This rank's share: large and small ones alike, by their order."""
    names = sorted(files, key=lambda name: (-files[name].size_bytes, name))
    return {name: files[name] for name in names[dist.get_rank() :: dist.get_world_size()]}


def _name(step: int) -> str:
    return f"step-{step:08d}"
