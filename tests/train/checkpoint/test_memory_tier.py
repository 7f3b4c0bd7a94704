"""The memory tier: a node is lost, processes and memory, and the run goes on from the copies on another node."""

from __future__ import annotations

import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import CheckpointError
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.manifest import FileRecord, Manifest
from trainmaster.train.checkpoint.tiers import memory, memory_to_disk
from trainmaster.train.checkpoint.write import write

from ..runs import Ran, RunHere, Start, StopAfter, tiny

_MANIFEST = Manifest(step=0, state={}, run={}, files={}, ranks=1, torch="2", saved_at="2026-11-19T00:00:00+00:00")


def config(steps: int = 10, **checkpoint: Any) -> TrainConfig:
    """Training waits for its saves to memory: what is killed at step 8 has saved step 6 for certain."""
    merged = {"every_steps": 4, "mode": "sync", "memory": {"every_steps": 2, "use": "on"}, **checkpoint}
    return tiny(steps=steps, epoch_steps=100, eval_sequences=0, checkpoint=merged)


def tiers(ran: Ran, event: str) -> list[tuple[int, str]]:
    return [(item["data"]["step"], item["data"]["tier"]) for item in ran.named("CHECKPOINT", event)]


def spoil(*folders: Path) -> None:
    """Whoever reads a checkpoint there now rejects it, and says so."""
    for folder in folders:
        for shard in folder.glob("**/*.distcp"):
            shard.write_bytes(b"lost")


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_a_lost_node_is_made_good_from_its_peer_without_the_disk(
    start: Start, run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, unbroken = tmp_path / "run", run_here(tmp_path / "unbroken", config(memory={"use": "off"}))
    plan = config(memory={"every_steps": 2})  # auto: there are two nodes
    first = start(folder, plan, ranks=2, nodes=2, env={"TRAINMASTER_KILL_AT": "step:start 8"}).finish()
    assert first.codes == [-9] * 2, first.output
    assert [one for one in tiers(first, "saved") if one[1] == "memory"] == [(2, "memory"), (4, "memory"), (6, "memory")]
    # The first node is gone, with the index and the files of its rank; and nobody may look at the disk.
    shutil.rmtree(folder / "memory-0")
    shutil.copytree(folder / "memory-1", tmp_path / "second")
    spoil(folder / "checkpoints")
    again = start(folder, plan, ranks=2, nodes=2).finish()
    assert again.codes == [0] * 2, again.output
    assert tiers(again, "loaded") == [(6, "memory")]
    assert again.named("CHECKPOINT", "rejected") == []
    assert again.losses == pytest.approx(unbroken.losses, abs=1e-4)
    # A run that has come to its end gives the memory back.
    assert [path.name for node in (0, 1) for path in (folder / f"memory-{node}").iterdir()] == []
    # The same again, but the lost node does not come back: one rank goes on with what two have saved.
    shutil.rmtree(folder / "checkpoints")
    (folder / "events.jsonl").unlink()
    monkeypatch.setenv(memory.FOLDER_VARIABLE, str(tmp_path / "second"))
    alone = run_here(folder, plan)
    assert tiers(alone, "loaded") == [(6, "memory")]
    assert alone.losses == pytest.approx({step: unbroken.losses[step] for step in range(7, 11)}, abs=1e-4)


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(memory.FOLDER_VARIABLE, str(tmp_path / "shm"))
    return tmp_path / "shm"


def test_memory_of_one_node_outlives_the_process_and_says_no_more(
    run_here: RunHere, tmp_path: Path, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unbroken = run_here(tmp_path / "unbroken", config(memory={"use": "off"}))
    plan = config(memory={"every_steps": 2, "use": "on"}, every_steps=100)
    ran = run_here(tmp_path / "run", plan, stop=StopAfter(5))
    assert tiers(ran, "saved") == [(2, "memory"), (4, "memory"), (5, "memory"), (5, "disk")]
    assert "have no copy on a second node: they survive processes alone" in capsys.readouterr().out
    (bound,) = ran.named("CHECKPOINT", "bound")[:1]
    assert bound["data"]["losses"]["process"]["tier"] == "memory"
    assert bound["data"]["losses"]["node"]["tier"] != "memory"
    (run,) = shm.iterdir()
    assert stat.S_IMODE(run.stat().st_mode) == stat.S_IMODE(shm.stat().st_mode) == 0o700
    assert sorted(path.name for path in run.iterdir()) == ["node", "step-00000004", "step-00000005"]  # two are kept
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # the disk is lost, or not mounted yet
    again = run_here(tmp_path / "run", plan)
    assert tiers(again, "loaded") == [(5, "memory")]
    assert again.losses == unbroken.losses  # bit-equal


def test_a_step_that_memory_has_goes_to_the_disk_from_there(run_here: RunHere, tmp_path: Path, shm: Path) -> None:
    """A stop right after a save to memory: the same state is not written there once more."""
    unbroken = run_here(tmp_path / "unbroken", config(memory={"use": "off"}))
    plan = config(every_steps=100)
    ran = run_here(tmp_path / "run", plan, stop=StopAfter(4))
    assert tiers(ran, "saved") == [(2, "memory"), (4, "memory"), (4, "disk")]
    shutil.rmtree(shm)
    again = run_here(tmp_path / "run", plan)
    assert tiers(again, "loaded") == [(4, "disk")]
    assert ran.losses | again.losses == unbroken.losses  # bit-equal


def flip(*folders: Path) -> None:
    """One bit of each shard: its size does not show it."""
    for shard in (shard for folder in folders for shard in folder.glob("**/*.distcp")):
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "why"),
    [(spoil, r".*__0_0.distcp has 4 bytes instead of \d+"), (flip, ".* does not match its SHA-256")],
    ids=["size", "bit"],
)
def test_damaged_memory_is_rejected_by_its_name_and_the_disk_taken(
    run_here: RunHere, tmp_path: Path, shm: Path, damage: Callable[..., None], why: str
) -> None:
    run_here(tmp_path, config(), stop=StopAfter(6))
    damage(shm)
    again = run_here(tmp_path, config())
    (rejected,) = (item["data"] for item in again.named("CHECKPOINT", "rejected"))
    assert rejected["tier"] == "memory" and re.fullmatch(why, rejected["why"]), rejected
    assert tiers(again, "loaded") == [(6, "disk")]


def test_where_every_tier_is_bad_nothing_starts(run_here: RunHere, tmp_path: Path, shm: Path) -> None:
    run_here(tmp_path, config(), stop=StopAfter(6))
    spoil(shm, tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"none of the \d checkpoints in the memory of 1 node\(s\) .* trusted"):
        run_here(tmp_path, config())


def test_a_disk_that_cannot_be_read_is_no_hindrance_while_memory_has_the_newest(
    run_here: RunHere, tmp_path: Path, shm: Path
) -> None:
    run_here(tmp_path, config(), stop=StopAfter(6))
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(Exception, match="step 10 could not be saved at the end"):
        run_here(tmp_path, config(retries=0))
    again = Ran(codes=[], output=[], folder=tmp_path)
    assert tiers(again, "loaded") == [(6, "memory")]
    spoil(shm)
    with pytest.raises(CheckpointError, match="cannot be read, so it is not known whether it holds checkpoints"):
        run_here(tmp_path, config())


def test_without_room_in_memory_the_disk_is_saved_to_and_memory_forgets(
    run_here: RunHere, tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(tmp_path, config(), stop=StopAfter(2))
    monkeypatch.setattr(memory, "_RESERVE_BYTES", 1 << 60)
    ran = run_here(tmp_path, config(), stop=StopAfter(5))
    assert tiers(ran, "saved")[2:] == [(4, "disk"), (7, "disk")]
    assert tiers(ran, "failed") == [(6, "memory")]
    said = capsys.readouterr().out
    assert "GiB are needed in" in said
    assert "step 4 went to the disk alone, memory could not take it" in said
    # An old step there would pass for the newest where the disk cannot be asked.
    assert not list(shm.glob("*/step-*"))
    more = run_here(tmp_path, config(steps=20))
    assert "no more saves to memory" in capsys.readouterr().out
    assert tiers(more, "failed") == [(6, "memory"), (10, "memory")]  # and 8 and 12 went to the disk
    assert more.named("CHECKPOINT", "bound")[-1]["data"]["every_steps"] == {"disk": 4}


def test_a_folder_that_somebody_else_made_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "shm").symlink_to(tmp_path / "real")
    with pytest.raises(CheckpointError, match="is not a folder of this user's own"):
        memory.open_folder(tmp_path / "shm" / "run")


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    places = {
        memory.folder_of(tmp_path / name, config=None, environ={memory.FOLDER_VARIABLE: "/x"}) for name in ("a", "b")
    }
    assert len(places) == 2
    assert memory.open_folder(tmp_path / "m" / "one") == memory.open_folder(tmp_path / "m" / "one")
    assert memory.open_folder(tmp_path / "m" / "one") != memory.open_folder(tmp_path / "m" / "two")


def test_files_go_from_memory_to_the_disk_beside_each_other_and_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, draft = tmp_path / "memory", tmp_path / "draft"
    source.mkdir()
    mine = {name: write(source / name, [name.encode() * 1000]) for name in ("a", "b", "c")}
    both = threading.Barrier(3, timeout=30)

    def write_together(path: Path, pieces: Iterable[bytes | memoryview], *, paged: bool) -> FileRecord:
        both.wait()  # until all three are under way
        return write(path, pieces, paged=paged)

    with monkeypatch.context() as patched:
        patched.setattr(memory_to_disk, "write", write_together)
        draft.mkdir()
        memory_to_disk.copy_files(source, draft, mine, threads=3)
    assert {path.name: path.read_bytes() for path in draft.iterdir()} == {name: name.encode() * 1000 for name in mine}
    (source / "b").write_bytes(b"x" * 1000)
    shutil.rmtree(draft)
    draft.mkdir()
    with pytest.raises(CheckpointError, match="memory/b does not match its SHA-256 any more"):
        memory_to_disk.copy_files(source, draft, mine, threads=2)


def test_the_room_of_an_old_step_is_used_again_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "memory" / "run"
    memory.open_folder(folder)

    def save(step: int, names: Iterable[str]) -> None:
        memory.make_room(folder, 10, newest=step)
        memory.begin(folder, step)
        path = manifests.path_of(folder, step)
        files = {name: write(path / name, [f"{name} of step {step}".encode()], over=True) for name in names}
        memory.commit(folder, replace(_MANIFEST, step=step, files=files))
        memory.prune(folder, newest=step)

    for step in range(1, 5):
        save(step, ("a", "b"))
    numbers = {path.name: path.stat().st_ino for path in (folder / "room").iterdir()}
    assert sorted(memory.list_steps(folder)) == [3, 4] and set(numbers) == {"a", "b"}
    save(5, ("a", "c"))  # fewer ranks than before: b is nobody's
    five = manifests.path_of(folder, 5)
    assert {path.name for path in five.iterdir()} == {"a", "c", "manifest.json"}
    assert (five / "a").stat().st_ino == numbers["a"] and (five / "a").read_bytes() == b"a of step 5"
    assert sorted(memory.list_steps(folder)) == [4, 5]
    memory.give_back_room(folder)
    assert not (folder / "room").exists() and sorted(memory.list_steps(folder)) == [4, 5]
    memory.give_back_room(folder)


def test_a_save_that_was_cut_off_is_room_and_never_a_step(tmp_path: Path) -> None:
    folder = tmp_path / "memory" / "run"
    memory.open_folder(folder)
    memory.begin(folder, 7)
    write(manifests.path_of(folder, 7) / "a", [b"half"], over=True)
    memory.make_room(folder, 10, newest=9)
    assert memory.list_steps(folder) == {} and (folder / "room" / "a").exists()
    memory.begin(folder, 9)
    assert (manifests.path_of(folder, 9) / "a").read_bytes() == b"half" and memory.list_steps(folder) == {}
