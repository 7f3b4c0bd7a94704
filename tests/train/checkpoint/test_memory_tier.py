"""The memory tier: a node is lost, processes and memory, and the run goes on from the copies on another node."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import CheckpointError
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.manifest import FileRecord, Manifest
from trainmaster.train.checkpoint.tiers import memory, memory_to_disk, rank_transfer
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


def save_files(folder: Path, step: int, names: Iterable[str]) -> None:
    memory.make_room(folder, 10, files=list(names), newest=step)
    memory.begin(folder, step)
    path = manifests.path_of(folder, step)
    files = {name: write(path / name, [f"{name} of step {step}".encode()], over=True) for name in names}
    memory.commit(folder, replace(_MANIFEST, step=step, files=files))
    memory.prune(folder, newest=step)


@pytest.fixture
def run_memory(tmp_path: Path) -> Path:
    """The memory of a run that has saved four steps."""
    folder = tmp_path / "memory" / "run"
    memory.open_folder(folder)
    for step in range(1, 5):
        save_files(folder, step, ("a", "b"))
    return folder


def test_the_room_of_an_old_step_is_used_again_and_nothing_of_it_is_left(run_memory: Path) -> None:
    folder = run_memory
    numbers = {path.name: path.stat().st_ino for path in (folder / "room").iterdir()}
    assert sorted(memory.list_steps(folder)) == [3, 4] and set(numbers) == {"a", "b"}
    save_files(folder, 5, ("a", "b"))
    five = manifests.path_of(folder, 5)
    assert {path.name for path in five.iterdir()} == {"a", "b", "manifest.json"}
    assert {path.name: path.stat().st_ino for path in five.iterdir() if path.name in "ab"} == numbers
    assert (five / "a").read_bytes() == b"a of step 5"
    assert sorted(memory.list_steps(folder)) == [4, 5]
    memory.give_back_room(folder)
    assert not (folder / "room").exists() and sorted(memory.list_steps(folder)) == [4, 5]
    memory.give_back_room(folder)


@pytest.mark.parametrize("names", [("a", "c"), ("a",), ("a", "b", "c")])
def test_room_of_other_files_is_given_back_before_it_is_counted(
    run_memory: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    """Another number of ranks: old files and new ones would lie there together, in a memory that one of them fills."""
    monkeypatch.setattr(memory, "_free", lambda folder: 10 if not (folder / "room").exists() else 0)
    memory.make_room(run_memory, 10, files=["a", "b"], newest=5)
    assert (run_memory / "room").exists()
    memory.make_room(run_memory, 10, files=names, newest=5)
    assert not (run_memory / "room").exists()
    save_files(run_memory, 5, names)
    assert {path.name for path in manifests.path_of(run_memory, 5).iterdir()} == {*names, "manifest.json"}
    assert sorted(memory.list_steps(run_memory)) == [4, 5]


@pytest.mark.parametrize("kind", ["file", "link", "folders", "links"])
def test_what_is_no_room_is_removed_and_not_written_to(run_memory: Path, tmp_path: Path, kind: str) -> None:
    room, other = run_memory / "room", tmp_path / "other"
    shutil.rmtree(room)
    other.mkdir()
    for name in ("a", "b"):
        (other / name).write_text("of somebody")
    if kind == "file":
        room.write_text("x")
    elif kind == "link":
        room.symlink_to(other)
    else:
        room.mkdir()
        for name in ("a", "b"):
            (room / name).mkdir() if kind == "folders" else (room / name).symlink_to(other / name)
    save_files(run_memory, 5, ("a", "b"))
    assert sorted(memory.list_steps(run_memory)) == [4, 5]
    assert (manifests.path_of(run_memory, 5) / "a").read_bytes() == b"a of step 5"
    assert {path.read_text() for path in other.iterdir()} == {"of somebody"}


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_step_that_is_no_folder_is_removed_and_saves_go_on(run_memory: Path, tmp_path: Path, kind: str) -> None:
    three = manifests.path_of(run_memory, 3)
    if kind == "link":
        three.rename(tmp_path / "kept")
        three.symlink_to(tmp_path / "kept")
    else:
        shutil.rmtree(three)
        three.write_text("x")
    for step in (5, 6):
        save_files(run_memory, step, ("a", "b"))
    assert sorted(memory.list_steps(run_memory)) == [5, 6]
    assert kind == "file" or (tmp_path / "kept" / "a").read_bytes() == b"a of step 3"


def test_files_that_an_older_run_may_still_write_are_never_written_over(tmp_path: Path) -> None:
    """It was stopped (SIGSTOP) in its save of step 55, and goes on after another run has taken the lock and saved."""
    folder = tmp_path / "memory" / "run"
    memory.open_folder(folder)
    save_files(folder, 50, ("a",))

    def written_by_the_older() -> Iterator[bytes]:
        yield b"of the "
        for step in (60, 70):
            save_files(folder, step, ("a",))
        yield b"older one"

    memory.begin(folder, 55)
    write(manifests.path_of(folder, 55) / "a", written_by_the_older(), over=True)
    for step in (60, 70):
        assert (manifests.path_of(folder, step) / "a").read_bytes() == f"a of step {step}".encode()
    assert not manifests.path_of(folder, 55).exists()


def test_a_step_that_is_committed_once_more_is_never_without_its_manifest(
    run_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load of several nodes does that, on all of them at once. Killed then, they must have the step."""
    held = memory.list_steps(run_memory)[4]
    assert isinstance(held, Manifest)

    def die(*args: Any, **kwargs: Any) -> None:
        raise SystemExit

    monkeypatch.setattr(memory, "write_whole", die)
    with pytest.raises(SystemExit):
        memory.commit(run_memory, held)
    assert memory.list_steps(run_memory)[4] == held


def test_a_file_that_is_cut_or_changed_while_it_is_copied_fails_the_copy_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped, a file that was cut would kill the process; and what is hashed must be what is written."""
    source, draft = tmp_path / "memory", tmp_path / "draft"
    draft.mkdir()
    source.mkdir()
    size = 20 << 20
    mine = {"a": write(source / "a", [bytes(size)])}
    written = os.write

    def cut(fd: int, part: memoryview) -> int:
        os.truncate(source / "a", 4096)
        return written(fd, part)

    def change(fd: int, part: memoryview) -> int:
        with (source / "a").open("r+b") as file:
            file.write(b"x")  # of what has been hashed and is written now
        return written(fd, part)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", change)
        memory_to_disk.copy_files(source, draft, mine, threads=1)
    assert (draft / "a").read_bytes() == bytes(size)
    (draft / "a").unlink()
    mine = {"a": write(source / "a", [bytes(size)], over=True)}
    monkeypatch.setattr(os, "write", cut)
    with pytest.raises(CheckpointError, match="memory/a does not match its SHA-256 any more"):
        memory_to_disk.copy_files(source, draft, mine, threads=1)


def test_an_empty_file_is_copied(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    mine = {"a": write(tmp_path / "a", [])}
    memory_to_disk.copy_files(tmp_path, tmp_path / "draft", mine, threads=1)
    assert (tmp_path / "draft" / "a").read_bytes() == b""


def test_the_older_copy_of_a_peers_file_is_gone_before_the_new_one_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory was counted for one of them."""
    content = b"of step 5"
    (tmp_path / "a").write_bytes(b"of step 2")
    comes = [torch.tensor([len(content)]), torch.frombuffer(bytearray(content), dtype=torch.uint8)]
    held: list[list[str]] = []

    def receive(into: torch.Tensor, source: int, group: None) -> None:
        held.append(sorted(path.name for path in tmp_path.iterdir()))
        into.copy_(comes.pop(0))

    monkeypatch.setattr(rank_transfer.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(rank_transfer.dist, "recv", receive)
    record = FileRecord(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    sent = rank_transfer.Transfer(name="a", source=0, target=1, record=record)
    assert rank_transfer.exchange(tmp_path, [sent], group=None) == []
    assert held == [["a"], ["a.part"]]
    assert (tmp_path / "a").read_bytes() == content
