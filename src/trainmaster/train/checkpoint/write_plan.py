"""Which rank writes which part of which tensor, computed by every rank for itself.

FSDP cuts each tensor along one dimension by a fixed rule, so any rank can compute the part of any other. The ranks
compare a digest of what they see and exchange nothing else. At 1,024 ranks and 80 layers the plans would be 3 million
items, which took minutes to gather while training waited.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

Holders = tuple[tuple[int, ...], ...]  # for each part, the ranks that hold it


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of the run, cut along `dim` into as many parts as there are tuples of holders."""

    name: str
    size: torch.Size
    dtype: torch.dtype
    dim: int
    holders: Holders

    @property
    def size_bytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    def part(self, number: int) -> tuple[torch.Size, torch.Size]:
        """Offsets and sizes of a part, by the rule of torch.chunk; the last parts may be empty."""
        if not self.size:
            return torch.Size(()), torch.Size(())
        whole = self.size[self.dim]
        each = -(-whole // len(self.holders))
        start = min(each * number, whole)
        offsets, sizes = [0] * len(self.size), list(self.size)
        offsets[self.dim], sizes[self.dim] = start, min(each, whole - start)
        return torch.Size(offsets), torch.Size(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part that a rank writes."""

    entry: Entry
    offsets: torch.Size
    sizes: torch.Size

    @property
    def size_bytes(self) -> int:
        return self.sizes.numel() * self.entry.dtype.itemsize


class Shares:
    """The parts of every rank."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        # Copies of one part take turns in writing, largest first: each writes about as many bytes as the others.
        order = sorted(entries, key=lambda entry: (-entry.size_bytes, entry.name))
        self._turns = {entry.name: turn for turn, entry in enumerate(order)}
        self._entries = entries
        self._where: dict[int, dict[int, tuple[int, int]]] = {}

    def of(self, rank: int) -> list[Part]:
        """What this rank writes, in the order of the entries."""
        parts = []
        for entry in self._entries:
            place = self._places(entry.holders).get(rank)
            if place is None or self._turns[entry.name] % len(entry.holders[place[0]]) != place[1]:
                continue
            offsets, sizes = entry.part(place[0])
            if sizes.numel() or not entry.size.numel():
                parts.append(Part(entry=entry, offsets=offsets, sizes=sizes))
        return parts

    def digest(self) -> str:
        """The same on ranks that see the same tensors on the same mesh."""
        seen = hashlib.sha256()
        known: set[int] = set()
        for entry in self._entries:
            seen.update(
                f"{entry.name} {tuple(entry.size)} {entry.dtype} {entry.dim} {id(entry.holders) in known}".encode()
            )
            if id(entry.holders) not in known:
                known.add(id(entry.holders))
                seen.update(repr(entry.holders).encode())
        return seen.hexdigest()

    def _places(self, holders: Holders) -> dict[int, tuple[int, int]]:
        """For each rank its part and its number among the copies of it. A mesh has the holders of all its tensors."""
        if id(holders) not in self._where:
            self._where[id(holders)] = {
                rank: (part, copy) for part, ranks in enumerate(holders) for copy, rank in enumerate(ranks)
            }
        return self._where[id(holders)]


def read_entries(state: Mapping[str, Any], *, rank: int) -> list[Entry] | None:
    """Entries of a flat state dict on this rank; None where a tensor is cut in another way."""
    entries: list[Entry] = []
    meshes: dict[tuple[int, tuple[str, ...]], Holders] = {}
    alone: Holders = ((0,),)  # what every rank has alike (the optimizer's counts of steps) is written by rank 0
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        if not isinstance(value, DTensor):
            entries.append(Entry(name=name, size=value.size(), dtype=value.dtype, dim=0, holders=alone))
            continue
        dims = [item for item, placement in enumerate(value.placements) if type(placement) is Shard]
        if len(dims) > 1 or any(type(placement) not in (Shard, Replicate) for placement in value.placements):
            return None
        key = id(value.device_mesh), tuple(map(str, value.placements))
        if key not in meshes:
            meshes[key] = _holders(value.device_mesh.mesh, dims[0] if dims else None)
        dim = value.placements[dims[0]].dim if dims else 0  # type: ignore[attr-defined]
        entry = Entry(name=name, size=value.size(), dtype=value.dtype, dim=dim, holders=meshes[key])
        part = next((number for number, ranks in enumerate(entry.holders) if rank in ranks), None)
        # The rule is torch's own, and could change there: a part that differs is not trusted.
        if part is None or entry.part(part)[1] != value.to_local().size():
            return None
        entries.append(entry)
    return entries


def _holders(mesh: Tensor, dim: int | None) -> Holders:
    """Ranks of a mesh by the part they hold, where its dimension `dim` cuts and all others repeat."""
    if dim is None:
        return (tuple(mesh.flatten().tolist()),)
    rows = mesh.movedim(dim, 0).flatten(1) if mesh.dim() > 1 else mesh.unsqueeze(1)
    return tuple(tuple(row) for row in rows.tolist())
