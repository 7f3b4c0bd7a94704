"""HyperPod's managed checkpoints on one rank: the real library, a stand-in of its daemon, a real S3 server."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from s3_server import READER, READER_SECRET, S3
from sims.checkpoint_daemon import Daemon, Faults
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import CheckpointError, MissingExtra, SpecError
from trainmaster.core.schema import to_plain
from trainmaster.storage import open_store
from trainmaster.train import loop
from trainmaster.train.__main__ import main
from trainmaster.train.loop import TrainingFailed
from trainmaster.train.watch import stop

from ..runs import Ran, RunHere, tiny
from .managed_runs import NOWHERE, Managed, loaded, place, rejected, saved


class Cut(Exception):
    """As if the process was gone."""


@pytest.fixture
def cut(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run until just before a step, and be gone."""

    def run(folder: Path, config: TrainConfig, *, before: int) -> Ran:
        def reach(place: str, *, step: int | None = None) -> None:
            if place == "step:start" and step == before - 1:
                raise Cut

        with monkeypatch.context() as patch:
            patch.setattr(loop, "reach", reach)
            with pytest.raises(Cut):
                run_here(folder, config)
        return Ran(codes=[], output=[], folder=folder)

    return run


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_a_run_goes_on_bit_for_bit_from_either_tier(
    managed: Managed, daemon: Daemon, run_here: RunHere, cut: Callable[..., Ran], tmp_path: Path
) -> None:
    whole = run_here(tmp_path / "whole", managed(checkpoint={"managed": None}))
    first = cut(tmp_path / "first", managed(), before=8)
    assert saved(first) == [(2, "memory"), (4, "memory"), (4, "s3"), (6, "memory")]
    daemon.memory.lose()  # and with it step 6, which S3 has not
    second = cut(tmp_path / "second", managed(checkpoint={"mode": "async"}), before=8)
    assert loaded(second) == (4, "s3")
    assert [line for line in rejected(second) if "step 6: index is not in the daemon's memory" in line]
    third = run_here(tmp_path / "third", managed(checkpoint={"mode": "async"}))
    assert (loaded(third), rejected(third)) == ((6, "memory"), [])
    # In the background as well, the last step is in both tiers before the run ends.
    assert {(10, "memory"), (10, "s3")} <= set(saved(third))
    assert {5, 6} <= second.losses.keys() and third.losses.keys() == {7, 8, 9, 10}
    for part in (first, second, third):
        assert part.losses == {step: whole.losses[step] for step in part.losses}


def test_what_only_the_memory_had_is_missed_and_not_started_over(
    managed: Managed, daemon: Daemon, cut: Callable[..., Ran], run_here: RunHere, tmp_path: Path
) -> None:
    cut(tmp_path / "first", managed(), before=4)
    daemon.memory.lose()
    with pytest.raises(CheckpointError, match=r"has checkpoints \(newest: step 2\) and none can be trusted"):
        run_here(tmp_path / "second", managed())


@pytest.mark.proof
def test_where_a_tier_cannot_be_asked_the_other_serves_and_with_neither_nobody_knows(
    managed: Managed, daemon: Daemon, cut: Callable[..., Ran], run_here: RunHere, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    away = {"managed": {**to_plain(managed().checkpoint.managed), "daemon": NOWHERE}}
    for number, checkpoint in enumerate(({}, away)):  # before anything was saved
        with monkeypatch.context() as patch:
            if not checkpoint:
                patch.setenv("AWS_ENDPOINT_URL", NOWHERE)
            with pytest.raises(CheckpointError, match=r"cannot tell whether namespace run-\S+ has checkpoints: "):
                run_here(tmp_path / f"new{number}", managed(checkpoint=checkpoint))

    cut(tmp_path / "first", managed(), before=8)
    ran = cut(tmp_path / "without daemon", managed(checkpoint=away), before=5)
    assert loaded(ran) == (4, "s3")
    assert any(f"{NOWHERE}: cannot be asked, only S3 is" in line and "step 6 was saved there" in line
               for line in rejected(ran))  # fmt: skip
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOWHERE)
    ran = cut(tmp_path / "without S3", managed(), before=7)
    assert loaded(ran) == (6, "memory")
    assert any("cannot be asked, only the daemon's memory is" in line for line in rejected(ran))
    with pytest.raises(CheckpointError, match="cannot tell"):
        run_here(tmp_path / "without both", managed(checkpoint=away))


@pytest.mark.proof
def test_a_part_that_is_not_what_was_written_is_not_loaded(
    managed: Managed, daemon: Daemon, cut: Callable[..., Ran], run_here: RunHere, tmp_path: Path
) -> None:
    config = managed(checkpoint={"keep": 1})
    cut(tmp_path / "first", config, before=6)
    namespace = place(config).rpartition("/")[2]
    daemon.memory.flip(f"{namespace}-1r", 0, 4)
    ran = cut(tmp_path / "second", config, before=5)
    assert loaded(ran) == (4, "s3")
    assert any("step 4: the part of rank 0 does not match its checksum" in line for line in rejected(ran))

    store = open_store(place(config))
    shard = f"{namespace}-1r/rank_0/step_4/checkpoint.pt"
    whole = store.get(shard)
    store.put(shard, whole[:-1])
    daemon.memory.lose()
    with pytest.raises(CheckpointError, match="none can be trusted"):
        run_here(tmp_path / "third", config)
    (tail,) = [line for line in rejected(Ran(codes=[], output=[], folder=tmp_path / "third")) if "s3://" in line]
    assert tail.endswith(f"has {len(whole) - 1} bytes instead of {len(whole)}")

    # Nor is the run started over because its records are gone: the library's index says that there is something.
    for item in store.list("records"):
        store.delete(item.path)
    with pytest.raises(CheckpointError, match="none can be trusted"):
        run_here(tmp_path / "fourth", config)


@pytest.mark.proof
def test_old_steps_go_from_s3(managed: Managed, run_here: RunHere, tmp_path: Path) -> None:
    config = managed(checkpoint={"keep": 1, "keep_every_steps": 8})
    # A first save that was cut off before the library had its index: no checkpoint, and it is told.
    left = f"{place(config).rpartition('/')[2]}-4r/rank_3/step_2/checkpoint.pt"
    open_store(place(config)).put(left, b"a part")
    ran = run_here(tmp_path, config)
    assert [line for line in rejected(ran) if line.endswith("step 2: never finished: it has no record, only rank 3")]
    steps = {item.path.split("/")[2] for item in open_store(place(config)).list() if "/rank_0/" in item.path}
    names = [item.path.removeprefix("records/") for item in open_store(place(config)).list("records")]
    assert (steps, names) == ({"step_8", "step_10"}, ["step-00000008.s3.json", "step-00000010.s3.json"])


@pytest.mark.proof
def test_a_tier_that_refuses_a_save_leaves_it_to_the_other(
    managed: Managed, daemon: Daemon, s3: S3, cut: Callable[..., Ran], run_here: RunHere, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    daemon.faults = Faults(status=500, method="POST", only="/0/2")
    first = cut(tmp_path / "first", managed(), before=5)
    assert saved(first) == [(2, "s3"), (4, "memory")]
    assert [item["data"]["tier"] for item in first.named("CHECKPOINT", "failed")] == ["memory"]
    daemon.faults = Faults()
    s3.use(monkeypatch, READER, READER_SECRET)  # who may not write
    second = cut(tmp_path / "second", managed(), before=8)
    assert saved(second) == [(6, "memory")]
    (why,) = [item["data"]["why"] for item in second.named("CHECKPOINT", "failed")]
    assert "S3" in why


@pytest.mark.proof
def test_nothing_counts_as_saved_before_s3_has_a_witness(
    managed: Managed, s3: S3, run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.use(monkeypatch, READER, READER_SECRET)
    with pytest.raises(
        TrainingFailed, match=r"could not be saved at the end: .*its record could not be put into s3://"
    ):
        run_here(tmp_path, managed(steps=3, checkpoint={"every_steps": 3}))
    assert saved(Ran(codes=[], output=[], folder=tmp_path)) == []


def test_a_checkpoint_of_another_run_is_refused(
    managed: Managed, cut: Callable[..., Ran], run_here: RunHere, tmp_path: Path
) -> None:
    cut(tmp_path, managed(), before=3)
    with pytest.raises(CheckpointError, match="belongs to another run"):
        run_here(tmp_path, managed(model={"width": 64}))


def test_without_the_library_the_message_says_what_to_install(
    managed: Managed, run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "amzn_sagemaker_checkpointing.checkpointing.filesystem", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[hyperpod\]'"):
        run_here(tmp_path, managed())


def test_the_entry_refuses_with_exit_code_66(
    managed: Managed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOWHERE)
    config = managed(checkpoint={"managed": {**to_plain(managed().checkpoint.managed), "daemon": NOWHERE}})
    (tmp_path / "config.json").write_text(json.dumps(to_plain(config)))
    before = {number: signal.getsignal(number) for number in stop.SIGNALS}
    try:
        assert main([str(tmp_path / "config.json")], {}) == 66
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if dist.is_initialized():
            dist.destroy_process_group()
    said = capsys.readouterr().out
    assert f"the memory daemon at {NOWHERE} does not answer" in said and "cannot tell whether namespace" in said


@pytest.mark.parametrize(
    ("changes", "more", "fault"),
    [
        ({"namespace": "a b"}, {}, "checkpoint.managed.namespace: letters"),
        ({"s3": "s3://key:secret@b"}, {}, "checkpoint.managed.s3: write s3://bucket/prefix"),
        ({"daemon": "localhost:9200"}, {}, "checkpoint.managed.daemon: write http"),
        ({}, {"remote": "s3://b/q"}, "checkpoint.remote: does not go with managed"),
        ({}, {"max_lost_steps": 5}, "checkpoint.max_lost_steps: does not go with managed"),
    ],
)
def test_a_wrong_section_is_named(changes: dict[str, Any], more: dict[str, Any], fault: str) -> None:
    with pytest.raises(SpecError) as error:
        tiny(checkpoint={"managed": {"namespace": "a", "s3": "s3://b/p", **changes}, **more})
    assert fault in str(error.value) and "secret" not in str(error.value)
