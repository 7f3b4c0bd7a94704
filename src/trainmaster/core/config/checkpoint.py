"""Checkpoint settings: when a run is saved, where, and how much is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from trainmaster.core.config.managed import ManagedConfig
from trainmaster.core.errors import Fault
from trainmaster.core.schema import YEAR_S, field

_PLACE = re.compile(r"(s3|gs|az)://[^/@?#:\s]+(/[^?#]*)?|(file://)?[^:]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """The fastest tier: files in host memory that outlive the ranks, each of them on a second node too."""

    use: Literal["auto", "on", "off"] = field(default="auto", doc="auto: with two nodes or more")
    every_steps: int = field(default=10, ge=1, doc="steps between saves to memory")
    folder: str | None = field(
        default=None, doc="a folder in memory on each node; not stated: one of this run's own in /dev/shm"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """The farthest tier: an object store, or a file system other than that of the folder. For this run alone."""

    url: str = field(example="s3://bucket/runs/7", doc="a bucket and a prefix, or a folder")
    every_steps: int | None = field(
        default=None, ge=1, doc="steps between copies there, of saves on disk; not stated: each of these"
    )
    keep: int = field(default=2, ge=1, most=100_000, doc="newest checkpoints kept there")

    def faults(self) -> Iterator[Fault]:
        if not _PLACE.fullmatch(self.url):
            # Without repeating it: what is wrong with it may be a password.
            message = "write s3://bucket/prefix or a folder; credentials and endpoint go into the environment"
            yield Fault(path="url", message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to save and how much to keep. A run always saves at its end and on a stop request."""

    folder: str | None = field(default=None, doc="where; not stated: the job's own folder")
    every_steps: int = field(default=50, ge=1, doc="steps between saves")
    keep: int = field(default=2, ge=1, most=100_000, doc="newest good checkpoints kept")
    keep_every_steps: int | None = field(
        default=None, ge=1, doc="checkpoints of multiples of this are never deleted, beside the newest"
    )
    mode: Literal["async", "exact", "sync"] = field(
        default="async",
        doc="async: written while training goes on, and one that is due meanwhile waits for a later step; exact: the "
        "same, but training waits for its turn; sync: training waits for each",
    )
    resume: Literal["same", "changed"] = field(
        default="same",
        doc="same: a checkpoint of another seed, batch or optimizer setting is refused; changed: it is continued with "
        "the settings of this config",
    )
    retries: int = field(default=2, ge=0, most=20, doc="times a failed save is tried again, at most 20")
    retry_s: float = field(
        default=5.0, ge=0, le=YEAR_S, doc="pause before the first of them; each further one is twice as long"
    )
    lease_s: float = field(
        default=60.0,
        ge=0.1,
        le=YEAR_S,
        doc="a run that has not renewed its lock on the folder or the store for this long loses it to the next run",
    )
    memory: MemoryConfig = field(factory=MemoryConfig, doc="saves to host memory")
    remote: RemoteConfig | None = field(default=None, doc="copies in an object store; its URL alone will do")
    managed: ManagedConfig | None = field(
        default=None, doc="HyperPod's managed tiers (pip install 'trainmaster[hyperpod]') in place of all others"
    )
    max_lost_steps: int | None = field(
        default=None, ge=1, doc="steps a crash may cost; the intervals then follow from measured times"
    )
    max_lost_minutes: float | None = field(
        default=None, gt=0, le=YEAR_S / 60, doc="the same in minutes; with both the stricter holds"
    )

    @classmethod
    def expand(cls, mapping: Mapping[str, object]) -> Mapping[str, object]:
        """`remote: s3://bucket/prefix` is short for `remote: {url: …}`; called by schema.build."""
        place = mapping.get("remote")
        return {**mapping, "remote": {"url": place}} if isinstance(place, str) else mapping

    def faults(self) -> Iterator[Fault]:
        if self.managed is not None:
            others = {
                "folder": self.folder is not None,
                "memory.use": self.memory.use == "on",
                "remote": self.remote is not None,
                "max_lost_steps": self.max_lost_steps is not None,
                "max_lost_minutes": self.max_lost_minutes is not None,
            }
            for path in (path for path, stated in others.items() if stated):
                yield Fault(path=path, message="does not go with managed, which takes the place of all other tiers")
