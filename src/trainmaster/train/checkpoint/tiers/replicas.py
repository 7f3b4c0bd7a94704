"""The memory tier over all nodes: each file lies in the memory of the node that wrote it and of the node after it.

A lost node takes two kinds of files with it: its own, which the next node has too, and copies of the node before it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict

from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.layout import INDEX
from trainmaster.train.checkpoint.load import as_of_today, must_match, read_manifest
from trainmaster.train.checkpoint.manifest import FileRecord, Manifest
from trainmaster.train.checkpoint.protocol import Run
from trainmaster.train.checkpoint.tiers import memory
from trainmaster.train.checkpoint.tiers.loss_bound import MEMORY
from trainmaster.train.checkpoint.tiers.rank_transfer import Transfer, exchange
from trainmaster.train.drill.failpoints import reach
from trainmaster.train.parallel import rank_sync

# Given a folder with the index of a checkpoint: the files that this rank will read of it.
Needs = Callable[[Path], Collection[str]]


class Replicas:
    """Every method is called on all ranks alike, and fails on all alike (RankError)."""

    name = MEMORY

    def __init__(
        self,
        folder: Path,
        *,
        group: dist.ProcessGroup | None,
        loads: dist.ProcessGroup | None,
        check: Callable[[Manifest], None],
        needs: Needs,
        threads: int,
    ) -> None:
        """`check` raises CheckpointError where a manifest is of another run, before anything is moved for it."""
        self._loads, self._threads = loads, threads
        self._folder, self._group, self._check, self._needs = folder, group, check, needs
        self._rank = dist.get_rank()
        words = rank_sync.on_all(lambda: memory.open_folder(folder), group=group)
        names = list(dict.fromkeys(words))
        # What shares its memory is one node, whatever the launcher calls it: it would be lost together.
        self._node_of = [names.index(word) for word in words]
        self._node = self._node_of[self._rank]
        self._ranks_on = [[rank for rank, node in enumerate(self._node_of) if node == n] for n in range(len(names))]
        self._leads = self._ranks_on[self._node][0] == self._rank

    @property
    def nodes(self) -> int:
        """Memories that can be lost one by one. With one there is nowhere to put a copy."""
        return len(self._ranks_on)

    @property
    def verifies(self) -> bool:
        """With one node nothing is moved before the load, which then compares every byte while it reads it."""
        return self.nodes > 1

    def save(
        self,
        step: int,
        *,
        size_bytes: int,
        files: Collection[str],
        write: Callable[[Path], Mapping[str, FileRecord]],
        describe: Callable[[Sequence[Mapping[str, FileRecord]]], Manifest],
        spare: Collection[int],
    ) -> Manifest:
        """Write this rank's files with `write`, copy them to the next node, commit on every node.

        `size_bytes` is about what `write` will write, `files` are the names; `describe` makes the manifest, on rank 0,
        from all ranks' files.
        """
        path = manifests.path_of(self._folder, step)
        try:
            coming = rank_sync.on_all(lambda: (size_bytes, list(files)), group=self._group)
            rank_sync.on_all(lambda: self._begin(step, coming, spare), group=self._group)
            parts = rank_sync.on_all(lambda: write(path), group=self._group)
            reach("memory:local")
            written = [(name, rank, record) for rank, part in enumerate(parts) for name, record in part.items()]
            self._exchange(
                path,
                [Transfer(name=n, source=r, target=self._peer(r), record=f) for n, r, f in written]
                if self.nodes > 1
                else [],
                self._group,
            )
            reach("memory:peer")
            manifest = rank_sync.on_first(lambda: describe(parts), group=self._group)
            rank_sync.on_all(lambda: memory.commit(self._folder, manifest) if self._leads else None, group=self._group)
        except rank_sync.RankError:
            if self._leads:
                with contextlib.suppress(OSError):
                    memory.discard(self._folder, step)
            raise
        self.prune(newest=step, spare=spare)
        return manifest

    def prune(self, *, newest: int, spare: Collection[int]) -> None:
        """Keep the two newest complete steps."""
        rank_sync.on_all(
            lambda: memory.prune(self._folder, newest=newest, spare=spare) if self._leads else None, group=self._group
        )

    def forget(self, *, before: int) -> None:
        """Drop what is older than a step that another tier has and this one could not take."""
        if self._leads:
            memory.prune(self._folder, newest=before - 1, keep=0)
            memory.give_back_room(self._folder)

    def give_back_room(self) -> None:
        """Free what only the next save would use."""
        if self._leads:
            memory.give_back_room(self._folder)

    def drop(self) -> None:
        """Free all memory at the end of a completed run."""
        if self._leads:
            memory.drop(self._folder)

    def where(self, step: int) -> str:
        return str(manifests.path_of(self._folder, step))

    def __str__(self) -> str:
        return f"the memory of {self.nodes} node(s) ({self._folder})"

    def list_steps(self) -> list[int]:
        """Every step that is committed on one node or more."""
        return sorted({step for part in self._inventories() for step in part}, reverse=True)

    def fetch(self, step: int) -> tuple[Path, Manifest]:
        """The folder on this rank's node, with all its ranks need; with other nodes verified, and completed by them."""
        path = manifests.path_of(self._folder, step)
        manifest = self._choose(step)
        self._check(manifest)
        if self.nodes == 1:
            return path, rank_sync.on_first(lambda: read_manifest(path), group=self._loads)
        rank_sync.on_all(lambda: path.mkdir(mode=0o700, exist_ok=True), group=self._loads)
        here = self._verify(path, manifest)
        lost = sorted(set(manifest.files) - {name for names in here for name in names})
        if lost:
            raise rank_sync.RankError(f"{len(lost)} of {len(manifest.files)} files are on no node, as {lost[0]}")
        self._bring(path, manifest, here, [{INDEX} & set(manifest.files)] * len(self._node_of))
        needed = rank_sync.on_all(lambda: set(self._needs(path)), group=self._loads)
        self._bring(path, manifest, here, needed)
        rank_sync.on_all(lambda: memory.commit(self._folder, manifest) if self._leads else None, group=self._loads)
        return path, manifest

    def _begin(self, step: int, coming: Sequence[tuple[int, Sequence[str]]], spare: Collection[int]) -> None:
        if not self._leads:
            return
        # Of this node, and as copies those of the node before it. With one node that is the same one.
        here = [coming[rank] for node in {self._node, (self._node - 1) % self.nodes} for rank in self._ranks_on[node]]
        need, files = sum(size for size, _ in here), [name for _, names in here for name in names]
        memory.discard(self._folder, step)
        memory.make_room(self._folder, need, files=files, newest=step, spare=spare)
        memory.begin(self._folder, step)

    def _peer(self, rank: int) -> int:
        """The rank on the next node that takes the copies of this one's files."""
        node = self._node_of[rank]
        peers = self._ranks_on[(node + 1) % self.nodes]
        return peers[self._ranks_on[node].index(rank) % len(peers)]

    def _exchange(self, path: Path, transfers: Sequence[Transfer], group: dist.ProcessGroup | None) -> None:
        faults = rank_sync.on_all(lambda: exchange(path, transfers, group=group), group=group)
        lines = [f"rank {rank}: {fault}" for rank, own_faults in enumerate(faults) for fault in own_faults]
        if lines:
            raise rank_sync.RankError("; ".join(lines))

    def _inventories(self) -> list[dict[int, Manifest | str]]:
        return rank_sync.on_all(lambda: memory.list_steps(self._folder) if self._leads else {}, group=self._loads)

    def _choose(self, step: int) -> Manifest:
        """Of a step that was saved twice, by a run and by one that went back before it, the later."""
        entries = [part[step] for part in self._inventories() if step in part]
        good = [entry for entry in entries if isinstance(entry, Manifest)]
        if not good:
            raise rank_sync.RankError("; ".join(str(entry) for entry in entries) or "it is gone")
        return max(good, key=lambda entry: entry.saved_at)

    def _verify(self, path: Path, manifest: Manifest) -> list[set[str]]:
        """Per node, the files there that match the manifest. Read whole, divided among the node's ranks."""
        mine = self._ranks_on[self._node]
        names = sorted(manifest.files)[mine.index(self._rank) :: len(mine)]

        def is_whole(name: str) -> bool:
            return manifests.find_fault(path, {name: manifest.files[name]}, deep=True) is None

        with ThreadPoolExecutor(self._threads, thread_name_prefix="checkpoint-verify") as pool:
            good = rank_sync.on_all(
                lambda: {name for name, whole in zip(names, pool.map(is_whole, names), strict=True) if whole},
                group=self._loads,
            )
        return [set().union(*(good[rank] for rank in ranks)) for ranks in self._ranks_on]

    def _bring(self, path: Path, manifest: Manifest, here: list[set[str]], needed: Sequence[Collection[str]]) -> None:
        """Copy to every node what its ranks need and it has not; `here` is kept up to date."""
        transfers = []
        for node, ranks in enumerate(self._ranks_on):
            wanted = sorted({name for rank in ranks for name in needed[rank]} - here[node])
            for number, name in enumerate(wanted):
                holder = next(other for other, names in enumerate(here) if name in names and other != node)
                sources = self._ranks_on[holder]
                transfers.append(
                    Transfer(
                        name=name,
                        source=sources[number % len(sources)],
                        target=ranks[number % len(ranks)],
                        record=manifest.files[name],
                    )
                )
        coming = sum(
            transfer.record.size_bytes for transfer in transfers if self._node_of[transfer.target] == self._node
        )
        rank_sync.on_all(lambda: memory.must_have(self._folder, coming) if self._leads else None, group=self._loads)
        self._exchange(path, transfers, self._loads)
        for transfer in transfers:
            here[self._node_of[transfer.target]].add(transfer.name)


def open_memory(
    run: Run, checkpoints: Path, *, group: dist.ProcessGroup | None, loads: dist.ProcessGroup | None, threads: int
) -> Replicas | None:
    """The memory tier of a run that saves to the folder `checkpoints`; None where it has none."""
    config = run.config.checkpoint.memory
    if config.use == "off":
        return None
    folder = memory.folder_of(checkpoints, config=config.folder, environ=os.environ)
    # A run that had more nodes may have left its newest step in the memory of the one that is left.
    if config.use == "auto" and run.world.rank_info.nodes < 2 and not rank_sync.any_rank(folder.exists()):
        return None

    def check(manifest: Manifest) -> None:
        where = f"step {manifest.step} in memory"
        must_match(where, as_of_today(where, manifest.run), run.identity)

    try:
        opened = Replicas(
            folder,
            group=group,
            loads=loads,
            check=check,
            needs=lambda path: _find_needed(run, path),
            threads=threads,
        )
    except rank_sync.RankError as error:
        run.say(f"no saves to memory, only to {checkpoints}: {error}")
        return None
    if opened.nodes == 1:
        run.say(f"saves to memory ({folder}) have no copy on a second node: they survive processes alone")
    return opened


def _find_needed(run: Run, path: Path) -> set[str]:
    """Files of a checkpoint, of which only the index is here yet, that this rank fills its tensors from."""
    index = pickle.loads((path / INDEX).read_bytes())  # noqa: S301 (its hash has been verified)
    weights, moments = get_state_dict(run.model, run.optimizer)
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"model": weights, "optimizer": moments}, index, is_coordinator=False)
    return {index.storage_data[item.storage_index].relative_path for item in planner.create_local_plan().items}
