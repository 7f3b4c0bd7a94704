"""Cost of checkpoints and hang attribution on many ranks, by simulation: real planner code, made-up shards, no GPUs.

    PYTHONPATH=src python3 benchmarks/scale.py                     64, 256 and 1,024 ranks: minutes, 3 GB of memory
    PYTHONPATH=src python3 benchmarks/scale.py --ranks 64 --layers 4

A model of 80 layers (the shape of a 70B Llama) under FSDP. Plans are linear in the number of layers: `--layers` of them
are planned, and times and sizes are multiplied up to 80. `before` is the procedure of the first version: every plan to
every rank, torch's loader with its planning on rank 0, full meshes, kept checkpoints read again at each save, and every
rank reads the status of every rank.

  save plan     training waits for it once a run: seconds on the slowest rank, and bytes that each rank receives
  save index    after: built by rank 0 in the background (before: part of the plan)
  load plan     seconds until the slowest rank may read, without the network; bytes that rank 0 receives
  groups        sockets of one rank for the groups of training and checkpoints, and seconds to connect one group
  pruning       seconds on rank 0 at each save with 3 kept checkpoints of 8 files a rank
  hang          status values read from the store by all ranks together, and seconds that the store needs for them
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainmaster.core.config.train import ModelConfig
from trainmaster.models import family
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.layout import arrange, build_index
from trainmaster.train.checkpoint.manifest import FileRecord, Manifest
from trainmaster.train.checkpoint.write_plan import Entry, Part, Shares

LAYERS = 80
GROUPS = 6  # training, save, load, copy, upload, and one of the device mesh
FILES, KEPT = 8, 3
LEADERS = 16  # watch/watchdog.py
STATUS_BYTES = 1500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--layers", type=int, default=2, help="planned layers; figures are multiplied up to 80")
    parser.add_argument("--only", nargs="+", default=["save", "load", "groups", "pruning", "hang"])
    parser.add_argument("--json", type=Path, help="also write the rows there")
    chosen = parser.parse_args()
    rows = []
    for ranks in chosen.ranks:
        for name, work in (("save", save), ("load", load), ("groups", groups), ("pruning", pruning), ("hang", hang)):
            if name in chosen.only:
                for row in work(ranks, chosen.layers):
                    rows.append({"ranks": ranks, **row})
                    print(f"{ranks:5} {row['what']:11} before {row['before']:32} after {row['after']}", flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")


def save(ranks: int, layers: int) -> Iterator[dict[str, str]]:
    shares, times = Shares(entries(ranks, layers)), LAYERS / layers
    plans = [SavePlan([item_of(part) for part in shares.of(rank)], planner_data={}) for rank in range(ranks)]
    sent = pickle.dumps(plans[0])
    received = len(sent) * ranks * times
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    unpickled = took(lambda: [pickle.loads(sent) for _ in range(ranks)])
    planned = took(lambda: planner.create_global_plan(plans))
    # The plans of all ranks came to every rank, went out from rank 0 again, and so did the places of all tensors.
    before_s = (2 * unpickled + planned) * times
    after_s = took(lambda: (shares.digest(), arrange(shares.of(ranks - 1), files=FILES))) * times
    yield row(
        "save plan", f"{before_s:.1f} s, {2 * received / 1e6:,.0f} MB", f"{after_s:.2f} s, {ranks * 150 / 1e6:.2f} MB"
    )
    index: list[bytes] = []
    built = took(lambda: index.append(pickle.dumps(build_index(shares, files=[FILES] * ranks)))) * times
    yield row("save index", "in the plan", f"{built:.1f} s, {len(index[0]) * times / 1e6:,.0f} MB, in the background")


def load(ranks: int, layers: int) -> Iterator[dict[str, str]]:
    found, times = entries(ranks, layers), LAYERS / layers
    index = build_index(Shares(found), files=[FILES] * ranks)
    dist.init_process_group("fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
        state = {entry.name: shard_of(entry, ranks - 1, mesh) for entry in found}
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, index, is_coordinator=False)
        made: list[Any] = []
        local = took(lambda: made.append(planner.create_local_plan())) * times
        sent = pickle.dumps(made[0])
        gathered = took(lambda: [pickle.loads(sent) for _ in range(ranks)])
        scattered = took(lambda: [pickle.dumps(made[0]) for _ in range(ranks)])
    finally:
        dist.destroy_process_group()
    before = local + (gathered + scattered) * times
    yield row("load plan", f"{before:.1f} s, {len(sent) * ranks * times / 1e6:,.0f} MB", f"{local:.1f} s, 0 MB")


def groups(ranks: int, _: int) -> Iterator[dict[str, str]]:
    full = GROUPS * (ranks - 1)
    eager = f"{full} sockets{', over 1,024' if full > 1000 else ''}"
    sockets, seconds = connect(ranks)
    yield row(
        "groups", eager, f"{GROUPS * sockets:.0f} sockets, {seconds:.1f} s for one group (threads of this process)"
    )


def connect(ranks: int) -> tuple[float, float]:
    """Sockets per rank of one group that has reduced, gathered and broadcast, and the seconds for it."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    store, opened = dist.HashStore(), len(list(Path("/proc/self/fd").iterdir()))  # type: ignore[attr-defined]
    open_ = threading.Barrier(ranks + 1)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            group = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=300))
            word = torch.ones(1)
            group.allreduce([word]).wait()
            group.allgather([[torch.ones(1) for _ in range(ranks)]], [word]).wait()
            group.broadcast([word], dist.BroadcastOptions()).wait()
        except BaseException as wrong:  # shown by the main thread
            errors.append(wrong)
        open_.wait()
        open_.wait()

    threading.stack_size(1 << 20)
    started = time.perf_counter()
    for rank in range(ranks):
        threading.Thread(target=run, args=(rank,), daemon=True).start()
    open_.wait()
    seconds, now = time.perf_counter() - started, len(list(Path("/proc/self/fd").iterdir()))
    open_.wait()
    if errors:
        raise SystemExit(f"groups of {ranks} ranks: {errors[0]}")
    return (now - opened) / ranks, seconds


def pruning(ranks: int, _: int) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for step in range(1, KEPT + 1):
            draft = manifests.draft_of(folder, step)
            manifests.begin(draft)
            names = [f"__{rank}_{file}.distcp" for rank in range(ranks) for file in range(FILES)]
            for name in names:
                (draft / name).touch()
            files = {name: FileRecord(size_bytes=0, sha256="0" * 64) for name in names}
            made = Manifest(step=step, state={}, run={}, files=files, ranks=ranks, torch="2", saved_at="")
            manifests.commit(draft, made)
        before = took(lambda: manifests.prune(folder, keep=KEPT, newest=KEPT))
        good = set(range(1, KEPT + 1))
        after = took(lambda: manifests.prune(folder, keep=KEPT, newest=KEPT, known_good=good))
    yield row("pruning", f"{before:.3f} s", f"{after:.4f} s")


def hang(ranks: int, _: int) -> Iterator[dict[str, str]]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    keys = [f"watchdog/pulse/{rank}" for rank in range(ranks)]
    for key in keys:
        server.set(key, "x" * STATUS_BYTES)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]

    def one_by_one() -> None:
        client.multi_get([key for key in keys if client.check([key])])

    def at_once() -> None:
        assert client.check(keys)
        client.multi_get(keys)

    old, new, verdict = best(one_by_one), best(at_once), best(lambda: client.get(keys[0]))
    readers = min(LEADERS, max(1, ranks // 8))
    before, after = 2 * ranks * ranks, 2 * readers * ranks + ranks
    yield row(
        "hang",
        f"{before:,} values, {2 * ranks * old:.1f} s",
        f"{after:,} values, {2 * readers * new + ranks * verdict:.2f} s",
    )


def entries(ranks: int, layers: int) -> list[Entry]:
    """Weights and two moments of each, cut over all ranks, as FSDP and AdamW have them."""
    model = ModelConfig(layers=layers, width=8192, heads=64, kv_heads=8, ffn_width=28672, vocab=128256, tied=False)
    blocks = {name: shape for name, shape in family.weight_shapes(model).items() if name.startswith("blocks.")}
    holders = tuple((rank,) for rank in range(ranks))
    return [
        Entry(name=f"{kind}.{name}", size=torch.Size(shape), dtype=torch.float32, dim=0, holders=holders)
        for kind in ("model", "exp_avg", "exp_avg_sq")
        for name, shape in blocks.items()
    ]


def item_of(part: Part) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(part.entry.name, part.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=part.offsets, sizes=part.sizes),
            properties=TensorProperties(dtype=part.entry.dtype),
            size=part.entry.size,
        ),
    )


def shard_of(entry: Entry, rank: int, mesh: Any) -> DTensor:
    local = torch.empty(entry.part(rank)[1], dtype=entry.dtype, device="meta")
    whole = torch.empty(entry.size, device="meta")
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=entry.size, stride=whole.stride())


def took(work: Callable[[], Any]) -> float:
    """Seconds of one core: planning is one thread of Python, and the machine may be busy with other things."""
    started = time.process_time()
    work()
    return time.process_time() - started


def best(work: Callable[[], Any]) -> float:
    """Of several: short work on a busy machine is measured by its quickest run."""
    spent = []
    for _ in range(7):
        started = time.perf_counter()
        work()
        spent.append(time.perf_counter() - started)
    return min(spent)


def row(what: str, before: str, after: str) -> dict[str, str]:
    return {"what": what, "before": before, "after": after}


if __name__ == "__main__":
    main()
