"""Work that must not grow with the number of ranks or of kept checkpoints: counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainmaster.core.config.train import ModelConfig
from trainmaster.models.family import weight_shapes
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.layout import Layout, build_index
from trainmaster.train.checkpoint.load import _reader
from trainmaster.train.checkpoint.read import Reader, fill, share_out
from trainmaster.train.checkpoint.weights import save_weights
from trainmaster.train.checkpoint.write_plan import Shares, read_entries
from trainmaster.train.parallel import shard
from trainmaster.train.parallel.groups import open_group

from ..runs import ALONE, RunHere, tiny

_opened: list[str] | None = None


def _count(event: str, arguments: tuple[object, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], (str, bytes)):
        _opened.append(str(arguments[0]))


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Names of the files that Python opens in the block."""
    global _opened  # noqa: PLW0603 (an audit hook cannot be removed)
    if not getattr(sys, "_trainmaster_hook", False):
        sys.addaudithook(_count)
        sys._trainmaster_hook = True  # type: ignore[attr-defined]
    _opened = []
    try:
        yield _opened
    finally:
        _opened = None


@contextmanager
def ranks(count: int, rank: int) -> Iterator[None]:
    """This process as one rank of many; the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def sent_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of the objects that this rank sends in the block, in bytes."""
    sent: list[int] = []
    pack = distributed_c10d._object_to_tensor

    def counted(*arguments: Any, **named: Any) -> Any:
        packed = pack(*arguments, **named)  # every collective of objects packs them here
        sent.append(packed[0].numel())
        return packed

    with monkeypatch.context() as patched:
        patched.setattr(distributed_c10d, "_object_to_tensor", counted)
        yield sent


def test_pruning_reads_no_kept_checkpoint_again(tmp_path: Path, run_here: RunHere) -> None:
    config = tiny(steps=12, eval_sequences=0, checkpoint={"every_steps": 1, "keep": 5})
    with opened_files() as opened:
        ran = run_here(tmp_path, config)
    assert len(ran.checkpoints) == 5
    assert [name for name in opened if name.endswith("manifest.json")] == []


@pytest.mark.parametrize("verified", [False, True])
def test_a_rank_reads_its_own_rows_of_weights_that_were_stored_whole(tmp_path: Path, verified: bool) -> None:
    """Where files are verified, as for init_from, each is read whole by one rank, and by the others in part."""
    config = ModelConfig(layers=1, width=64, heads=4, kv_heads=4, ffn_width=256, vocab=4096, tied=False)
    whole = {name: torch.randn(shape) for name, shape in weight_shapes(config).items()}
    path = save_weights(tmp_path, config, whole.__getitem__)
    manifest = manifests.read(path)
    size = sum(weight.nbytes for weight in whole.values())
    with ranks(64, 3):
        mesh = dist.device_mesh.init_device_mesh("cpu", (64,))
        mine = {
            name: DTensor.from_local(
                torch.zeros_like(weight.chunk(64)[3] if weight.shape[0] >= 64 else weight),
                mesh,
                [Shard(0) if weight.shape[0] >= 64 else Replicate()],
                run_check=False,
            )
            for name, weight in whole.items()
        }
        reader, planner = _reader(path, manifest, verify=verified, threads=1), DefaultLoadPlanner()
        index = reader.read_metadata()
        planner.set_up_planner({"model": mine}, index, is_coordinator=False)
        reader.set_up_storage_reader(index, is_coordinator=False)
        plan = planner.create_local_plan()
        before = _read_bytes()
        reader.read_data(plan, planner)
        assert _read_bytes() - before < size / 8
        for name, weight in mine.items():
            wanted = whole[name].chunk(64)[3] if whole[name].shape[0] >= 64 else whole[name]
            assert torch.equal(weight.to_local(), wanted)


def test_each_file_is_verified_by_one_rank(tmp_path: Path) -> None:
    config = ModelConfig(layers=2, width=16, heads=2, kv_heads=2, ffn_width=32, vocab=64)
    whole = {name: torch.randn(shape) for name, shape in weight_shapes(config).items()}
    manifest = manifests.read(save_weights(tmp_path, config, whole.__getitem__))
    shares = [share_out(manifest, rank=rank, ranks=5) for rank in range(5)]
    assert sorted(name for share in shares for name in share) == sorted(manifest.files)


@pytest.mark.slow
@pytest.mark.parametrize("verified", [False, True])
def test_ranks_that_load_exchange_no_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verified: bool) -> None:
    """What a load sends is the same for a model of two layers and of twelve; plans would grow with its tensors."""
    shard.join(ALONE, torch.device("cpu"), timeout_s=60)
    try:
        group, found = open_group(60, "checkpoint_load"), []
        for layers in (2, 12):
            config = ModelConfig(layers=layers, width=16, heads=2, kv_heads=2, ffn_width=32, vocab=64)
            whole = {name: torch.randn(shape) for name, shape in weight_shapes(config).items()}
            path = save_weights(tmp_path / str(layers), config, whole.__getitem__)
            mine = {name: torch.zeros_like(weight) for name, weight in whole.items()}
            verify = manifests.read(path).files if verified else {}
            with sent_objects(monkeypatch) as sent:
                fill({"model": mine}, Reader(path, verify=verify, threads=1), group=group)
            assert all(torch.equal(mine[name], weight) for name, weight in whole.items())
            found.append(sent)
        assert found[0] == found[1] and 0 < sum(found[0]) < 100
    finally:
        dist.destroy_process_group()


def _read_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [((6,), [Shard(0)]), ((2, 3), [Replicate(), Shard(0)]), ((6,), [Replicate()])],
    ids=["full", "hybrid", "replicated"],
)
def test_every_rank_computes_the_shares_that_torch_plans(
    mesh_shape: tuple[int, ...], placements: list[Placement]
) -> None:
    """Each part of each tensor is written once, and the index is that of torch's own planner."""
    shapes = {"a": (13, 4), "b": (4,), "c": (36, 2), "d": ()}
    plans, digests = [], set()
    for rank in range(6):
        with ranks(6, rank):
            mesh = dist.device_mesh.init_device_mesh("cpu", mesh_shape)
            state = {
                name: DTensor.from_local(
                    _local(torch.empty(shape), mesh, placements), mesh, placements, run_check=False,
                    shape=torch.Size(shape), stride=torch.empty(shape).stride(),
                ) if shape else torch.tensor(1.0)
                for name, shape in shapes.items()
            }  # fmt: skip
            planner = DefaultSavePlanner()
            planner.set_up_planner(state, is_coordinator=rank == 0)
            plans.append(planner.create_local_plan())
            entries = read_entries(planner.state_dict, rank=rank)
            assert entries is not None
            shares = Shares(entries)
            digests.add(shares.digest())
    assert len(digests) == 1
    planned = planner.create_global_plan(plans)[1]
    found = build_index(shares, files=[1] * 6)
    for name, held in planned.state_dict_metadata.items():
        ours = found.state_dict_metadata[name]
        full = {(chunk.offsets, chunk.sizes) for chunk in held.chunks if chunk.sizes.numel() or not held.size}
        assert {(chunk.offsets, chunk.sizes) for chunk in ours.chunks} == full
        assert len(ours.chunks) == len(full)
    written = [(part.entry.name, part.offsets) for rank in range(6) for part in shares.of(rank)]
    assert len(written) == len(set(written)) == len(found.storage_data)
    assert all(item.type != WriteItemType.BYTE_IO for plan in plans for item in plan.items)


def _local(tensor: torch.Tensor, mesh: dist.device_mesh.DeviceMesh, placements: list[Placement]) -> torch.Tensor:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for at, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts = list(tensor.chunk(mesh.size(at), dim=placement.dim))
            number = coordinate[at]
            tensor = parts[number] if number < len(parts) else tensor.narrow(placement.dim, 0, 0)
    return tensor


def test_ranks_that_see_the_same_tensors_gather_no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a save's plan sends is the same for two tensors and for a hundred."""
    shard.join(ALONE, torch.device("cpu"), timeout_s=60)
    try:
        group, found = open_group(60, "checkpoint_save"), []
        for count in (2, 100):
            state = {"model": {f"weight-{number}": torch.ones(4, 2) for number in range(count)}}
            with sent_objects(monkeypatch) as sent:
                layout = Layout(state, group=group, files=1)
            assert isinstance(layout._shares, Shares)
            found.append(sent)
        assert found[0] == found[1] and 0 < sum(found[0]) < 200
    finally:
        dist.destroy_process_group()
