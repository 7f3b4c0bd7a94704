"""A tier that takes over what the tier before it has committed, in the background."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainmaster.train.checkpoint.manifest import FileRecord, Manifest
from trainmaster.train.checkpoint.save import Save


@dataclass(slots=True, kw_only=True)
class Job:
    """A committed step on its way to a farther tier."""

    step: int
    source: Path  # where it is committed
    began: float  # when its save began
    meant: set[str]  # tiers it goes to
    manifest: Manifest
    mine: Mapping[str, FileRecord] = field(default_factory=dict)  # files that this rank has written of it


class Follower:
    """A tier that takes over what another has committed: one at a time, and then the newest that waits."""

    def __init__(self, tier: str, work: Callable[[Job, Save], None]) -> None:
        self.tier, self._work = tier, work
        self.job: Job | None = None
        self.save: Save | None = None
        self._waiting: Job | None = None

    @property
    def steps(self) -> set[int]:
        """What must not be deleted in the tier before."""
        return {job.step for job in (self.job, self._waiting) if job is not None}

    def offer(self, job: Job) -> None:
        if self._waiting is not None:
            # That one was on its way to a farther tier, perhaps; this one goes there for it.
            job.meant |= self._waiting.meant
        self._waiting = job
        self.proceed()

    def proceed(self) -> None:
        if self.save is None and self._waiting is not None:
            self.job, self._waiting = self._waiting, None
            job = self.job
            self.save = Save(lambda save: self._work(job, save))

    def take(self) -> tuple[Job, Save]:
        """What has ended; the next one begins."""
        assert self.job is not None and self.save is not None
        ended = self.job, self.save
        self.job = self.save = None
        self.proceed()
        return ended
