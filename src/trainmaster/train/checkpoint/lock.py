"""Lock on a place of checkpoints, a folder or an object store: one run writes there, others are refused or stop.

    PLACE/.lock/00000007.json      the highest number holds the lock; it is the fencing number of its owner

A run claims the lock by creating the next number. Stores create an object exclusively, so of several runs one wins. The
owner renews its object; a run that finds an object unchanged for a whole lease claims the next number. No clocks of two
machines are compared. A process of the same machine that has ended is replaced at once.

The owner checks for a higher number before each write, and drafts carry the fencing number in their names. A run that
was paused past its lease therefore stops before it writes, and files of two runs never meet in one checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import torch.distributed as dist

from trainmaster.core.compat import UTC
from trainmaster.core.errors import CheckpointError, CheckpointInUse, ObjectMissing, StorageError
from trainmaster.node.owner import start_of
from trainmaster.storage import Store
from trainmaster.train.parallel import rank_sync

_NUMBER = re.compile(r"\.lock/(\d{8,})\.json")
_RENEWALS_PER_LEASE = 4
_LOOKS_PER_LEASE = 20
_TRIES = 3  # to create a number that no other run creates


class LockHeld(CheckpointInUse):
    """Another run that is alive holds the lock."""


class LockLost(CheckpointInUse):
    """Another run has taken the lock; this one must not write any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, so that others can name it and, on the same machine, see whether it lives."""

    run: str  # a word of its own
    host: str
    pid: int
    started: str  # of the process, in clock ticks since the machine started
    machine: str  # boot and process namespace: pids mean something only inside it
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """One object of the lock."""

    owner: Owner
    renewals: int = 0
    released: bool = False


class Lock:
    """The lock of one place, used by one process."""

    def __init__(self, store: Store, *, lease_s: float) -> None:
        self._store, self._lease_s = store, lease_s
        self._mine = _Record(owner=_this_process())
        self._over = threading.Event()
        self._writing = threading.Lock()  # a renewal must not undo a release
        self.number = 0

    def claim(self) -> int:
        """Take the lock and keep renewing it; returns the fencing number. LockHeld where its owner is alive."""
        seen: tuple[int, _Record | None] | None = None
        since, refused = 0.0, 0
        while not self.number:
            now = self._newest()
            number, record = now
            if seen is None or number != seen[0]:
                seen, since, refused = now, time.monotonic(), 0
            is_free = record is None or record.released or _has_ended(record.owner)
            if not is_free and record != seen[1]:
                raise LockHeld(f"{self._store.url} is in use by {_describe(record)}, or choose another place")
            if is_free or time.monotonic() - since > self._lease_s:
                self._try(number + 1)
                refused += 1
            if not self.number and refused >= _TRIES:
                # No other run has it either: the number would have changed.
                raise CheckpointError(f"{self._store.url}: {_path(number + 1)} is not there and cannot be created")
            if not self.number:
                time.sleep(self._lease_s / _LOOKS_PER_LEASE)
        for number in self._numbers():
            if number < self.number:
                self._store.delete(_path(number))
        threading.Thread(target=self._renew, name="checkpoint-lock", daemon=True).start()
        return self.number

    def hold(self) -> int:
        """Claim the lock, or check that it is still held; returns the fencing number."""
        if not self.number:
            return self.claim()
        self.check()
        return self.number

    def check(self) -> None:
        """LockLost where another run has taken the lock."""
        numbers = self._numbers()
        if not numbers:
            # The whole place was removed under a living run, and no run has claimed it since.
            numbers = [self.number] if self._store.put_new(_path(self.number), _render(self._mine)) else self._numbers()
        if numbers[-1] == self.number:
            return
        _, record = self._newest()
        raise LockLost(
            f"{self._store.url} was taken over by {record.owner if record is not None else 'another run'}: this run "
            f"(fencing number {self.number}) did not renew its lock for {self._lease_s:g} s; nothing more is written"
        )

    def release(self) -> None:
        """Let the next run claim the lock at once."""
        with self._writing:
            if self._over.is_set() or not self.number:
                return
            self._over.set()
            with contextlib.suppress(StorageError):  # the lease runs out by itself
                if self._numbers()[-1:] == [self.number]:
                    self._put(_Record(owner=self._mine.owner, renewals=self._mine.renewals, released=True))

    def _try(self, number: int) -> None:
        if self._store.put_new(_path(number), _render(self._mine)):
            self.number = number

    def _renew(self) -> None:
        while not self._over.wait(self._lease_s / _RENEWALS_PER_LEASE):
            with self._writing, contextlib.suppress(StorageError):  # tried again at the next renewal
                numbers = self._numbers()
                if self._over.is_set() or (numbers and numbers[-1] != self.number):
                    return
                if not numbers:
                    continue  # a place that is away, or was removed, may come back; `check` claims it again
                self._mine = _Record(owner=self._mine.owner, renewals=self._mine.renewals + 1)
                self._put(self._mine)

    def _put(self, record: _Record) -> None:
        self._store.put(_path(self.number), _render(record))

    def _numbers(self) -> list[int]:
        matches = (_NUMBER.fullmatch(item.path) for item in self._store.list(".lock"))
        return sorted(int(match[1]) for match in matches if match)

    def _newest(self) -> tuple[int, _Record | None]:
        """The number that holds the lock and its record; None where there is none, or it cannot be read."""
        numbers = self._numbers()
        if not numbers:
            return 0, None
        try:
            return numbers[-1], _parse(self._store.get(_path(numbers[-1])))
        except ObjectMissing:
            return self._newest()  # replaced by a higher one


class Fence:
    """The lock as all ranks see it: rank 0 holds it, and every rank gets its fencing number or the same error."""

    def __init__(self, open_store: Callable[[], Store], *, lease_s: float) -> None:
        self._lock = Lock(open_store(), lease_s=lease_s) if dist.get_rank() == 0 else None
        self.number = 0

    def check(self, *, group: dist.ProcessGroup | None) -> None:
        """Before each write. The first call claims the lock; LockHeld or LockLost on every rank, with the same text."""

        def attempt() -> tuple[int, type[CheckpointError] | None, str]:
            assert self._lock is not None
            try:
                return self._lock.hold(), None, ""
            except (LockHeld, LockLost) as exc:
                return 0, type(exc), str(exc)

        number, error, why = rank_sync.on_first(attempt, group=group)
        if error is not None:
            raise error(why)
        self.number = number

    def check_here(self) -> None:
        """The same on rank 0 alone, right before a commit."""
        if self._lock is not None:
            self._lock.hold()

    def release(self) -> None:
        """On the way out; without the other ranks, which may be gone."""
        if self._lock is not None:
            self._lock.release()


def _path(number: int) -> str:
    return f".lock/{number:08d}.json"


def _render(record: _Record) -> bytes:
    return json.dumps({"v": 1, **asdict(record)}, sort_keys=True).encode()


def _parse(text: bytes) -> _Record | None:
    """A record; None for one that cannot be read: it is then replaced, as no process can be told from it."""
    try:
        raw = json.loads(text)
        return _Record(owner=Owner(**raw["owner"]), renewals=int(raw["renewals"]), released=bool(raw["released"]))
    except (ValueError, KeyError, TypeError):
        return None


def _describe(record: _Record | None) -> str:
    """Who holds the lock, and the command that ends it."""
    if record is None:
        return "another run; stop that run"
    owner = record.owner
    where = "" if owner.machine == _machine() else f" on {owner.host}"
    return f"{owner}; `kill {owner.pid}`{where} lets it save and end"


def _this_process() -> Owner:
    pid = os.getpid()
    return Owner(
        run=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=pid,
        started=start_of(pid) or "",
        machine=_machine(),
        since=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _has_ended(owner: Owner) -> bool:
    """Whether it was a process of this machine that is gone, or this process itself in an earlier run."""
    if owner.machine != _machine() or not owner.started:
        return False
    return owner.pid == os.getpid() or start_of(owner.pid) != owner.started


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode()}"
