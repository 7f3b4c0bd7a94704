"""torch's flight recorder, read during the run: collectives that this rank has begun, and those it waits in.

Both backends keep one: gloo's is `_dump_fr_trace_json`, NCCL's `_dump_nccl_trace_json`. Nothing is added to the path of
a collective; reading costs what is in the ring.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_READERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_DEFAULTS = {
    "TORCH_FR_BUFFER_SIZE": "256",  # entries kept; a hang needs the last few
    # Ours speaks first and ends the process; NCCL's own watchdog is the second line behind it.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of one group: the same group and number on every rank that takes part."""

    group: str
    seq: int
    name: str  # all_gather, as the backend calls it
    elements: int  # of its input
    since: float  # when this rank began it, by its own clock
    limit_s: float  # how long its group lets it wait

    def share_waited(self, now: float) -> float:
        """Of the time it may take."""
        return max(0.0, now - self.since) / self.limit_s

    def __str__(self) -> str:
        return f"{self.name} #{self.seq} of {self.group} ({self.elements:,} elements)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Collectives this rank waits in, most urgent first, and the newest it has begun in each group."""

    waiting: tuple[Collective, ...] = ()
    begun: tuple[Collective, ...] = ()


def prepare() -> None:
    """Enable the recorder before torch creates a group. Variables that are set stay."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def read() -> Trace:
    """The recorder now; an empty trace where this torch has none."""
    import torch.distributed as dist

    entries = [entry for dump in _dumps(dist) for entry in dump.get("entries", [])]
    parsed = [(entry, collective) for entry in entries if (collective := parse(entry)) is not None]
    now = time.time()
    waiting = sorted((item for entry, item in parsed if _is_open(entry)), key=lambda item: -item.share_waited(now))
    begun: dict[str, Collective] = {}
    for _, item in parsed:
        if item.group not in begun or begun[item.group].seq < item.seq:
            begun[item.group] = item
    return Trace(waiting=tuple(waiting), begun=tuple(begun.values()))


def parse(entry: dict[str, Any]) -> Collective | None:
    """One entry of a dump; None for what is no collective of ours, or of a version that writes it otherwise."""
    try:
        if entry.get("is_p2p"):
            return None
        group = entry["process_group"]
        backend, _, name = str(entry["profiling_name"]).rpartition(":")
        return Collective(
            # A description for people, and a name that only its members share. Gloo and NCCL count apart.
            group=re.sub(r"[^\w.:-]+", "_", f"{backend}:{group[1] or 'group'}.{group[0][:8]}"),
            seq=int(entry["collective_seq_id"]),
            name=name,
            elements=sum(_product(shape) for shape in entry.get("input_sizes", ())),
            since=int(entry["time_created_ns"]) / 1e9,
            limit_s=max(1.0, int(entry["timeout_ms"]) / 1e3),
        )
    except (KeyError, TypeError, ValueError, IndexError):
        return None


def _is_open(entry: dict[str, Any]) -> bool:
    return not entry.get("retired", True) and entry.get("state") != "completed"


def _product(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= int(size)
    return count


def _dumps(dist: Any) -> Iterator[dict[str, Any]]:
    library = dist.distributed_c10d.torch._C._distributed_c10d
    for name in _READERS:
        reader = getattr(library, name, None)
        if reader is None:
            continue
        try:
            dump = json.loads(reader())
        except (ValueError, RuntimeError, TypeError):
            continue
        if isinstance(dump, dict):
            yield dump
