"""Strikes at the disk: what a power cut leaves, a full disk and a read-only folder, and how each is judged."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core.results import Overall, Verdict
from trainmaster.core.spec import JobSpec
from trainmaster.drill import mounts, outside, plan, storage, storage_verdict
from trainmaster.drill.copies import Copies
from trainmaster.drill.folders import Checkpoint
from trainmaster.drill.lives import Timeline
from trainmaster.drill.plan import Shape, Strike
from trainmaster.drill.record import Attempt, Setup, Storage, Struck
from trainmaster.drill.starts import Starts
from trainmaster.drill.witness_log import FOLDER_VARIABLE, STRIKE_VARIABLE

from . import matrix, recipes
from .test_drill_parts import SHAPE, attempt, lines_of
from .test_judge import REFERENCE, life, lines_from, resumes

INJECT = Path(plan.__file__).with_name("inject")


def run_python(text: str, run: Path, do: str) -> tuple[subprocess.CompletedProcess[str], Attempt]:
    """A program with the witness, in the folders of a run."""
    folder = run / "attempt-1"
    witness = run / "attempt-1-witness"
    for path in (folder, witness, run / "work", run / "checkpoints"):
        path.mkdir(parents=True, exist_ok=True)
    begun = time.time()
    order = {"when": "step", "after": 2, "rank": None, "do": do, "look": 6, "until": 9, "room": 1000}
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(INJECT),
        "PYTHONDONTWRITEBYTECODE": "1",
        FOLDER_VARIABLE: str(witness),
        STRIKE_VARIABLE: json.dumps(order),
    }
    with (folder / "rank-0.log").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-c", text],
            cwd=run / "checkpoints",
            env=env,
            check=False,
            stdout=log,
            stderr=log,
            text=True,
        )
    return done, replace(attempt(), folder=str(folder), begun=begun)


WRITES = """
import mmap, os, shutil, subprocess
from pathlib import Path

def put(name, *, sync, to=None):
    with open(name, "wb") as file:
        file.write(b"x" * 500)
        if sync:
            file.flush()
            os.fsync(file)
    if to:
        os.replace(name, to)

put("old.tmp", sync=False, to="old.pt")
os.utime("old.pt", (1, 1))
put("plain.pt", sync=False)
put("durable.tmp", sync=True, to="durable.pt")
put("renamed.tmp", sync=False, to="renamed.pt")
os.mkdir("part")
put("part/in-folder.pt", sync=False)
os.rename("part", "step-5")
os.mkdir("part")
put("part/again.pt", sync=True)
put("grown.log", sync=True)
with open("grown.log", "ab") as file:
    file.write(b"y" * 300)
with open("mapped.bin", "w+b") as file:
    file.truncate(500)
    with mmap.mmap(file.fileno(), 500) as place:
        place[:] = b"z" * 500
shutil.copyfile("durable.pt", "copied.pt")
subprocess.run(["sh", "-c", "head -c 500 /dev/zero > unseen.bin"], check=True)
"""


def test_a_power_cut_leaves_what_was_fsynced_and_what_nobody_saw(tmp_path: Path) -> None:
    done, hit = run_python(WRITES, tmp_path, "power")
    assert done.returncode == 0, (tmp_path / "attempt-1/rank-0.log").read_text()
    folder = tmp_path / "checkpoints"
    left = storage.cut(hit, [folder / "unseen.bin", folder / "mapped.bin", folder / "plain.pt"], tmp_path)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert sizes == {
        "old.pt": 500, "plain.pt": 0, "durable.pt": 500, "renamed.pt": 0, "step-5/in-folder.pt": 0,
        "part/again.pt": 500, "grown.log": 500, "mapped.bin": 500, "copied.pt": 0, "unseen.bin": 500,
    }  # fmt: skip
    lost = {"checkpoints/plain.pt", "checkpoints/renamed.pt", "checkpoints/step-5/in-folder.pt"}
    assert set(left.lost) == {*lost, "checkpoints/grown.log", "checkpoints/copied.pt"}
    assert left.lost[0] == "checkpoints/plain.pt", "a file of the newest checkpoint is told first"
    assert left.unseen == ("checkpoints/mapped.bin", "checkpoints/unseen.bin")


@pytest.mark.parametrize(
    "sync",
    ["os.sync()", "import subprocess; subprocess.run(['sync', '--version'])", "os.system('true; sync --version')"],
)
def test_a_sync_of_all_is_no_loss(sync: str, tmp_path: Path) -> None:
    text = f"import os\nwith open('a.pt', 'wb') as f: f.write(b'x' * 500)\nimport time; time.sleep(0.02); {sync}"
    _, hit = run_python(text, tmp_path, "power")
    path = tmp_path / "checkpoints/a.pt"
    left = storage.cut(hit, [path], tmp_path)
    assert (left.lost, path.stat().st_size) == ((), 500)
    assert bool(left.unseen) == (sync != "os.sync()"), "whether the command has done it is not seen"


def test_a_file_that_is_synced_when_the_journal_is_full_is_no_loss(tmp_path: Path) -> None:
    text = """
import os, trainmaster_disk
trainmaster_disk._MOST_LINES = 3
for number in range(5):
    with open(f"{number}.pt", "wb") as file:
        file.write(b"x" * 500)
        file.flush()
        os.fsync(file.fileno())
"""
    _, hit = run_python(text, tmp_path, "power")
    paths = [tmp_path / f"checkpoints/{number}.pt" for number in range(5)]
    left = storage.cut(hit, paths, tmp_path)
    assert left.lost == () and left.unseen, "what was not noted is not known"
    assert [path.stat().st_size for path in paths] == [500] * 5


def test_a_full_disk_stops_every_file_and_not_what_is_printed(tmp_path: Path) -> None:
    text = """
import os, trainmaster_disk
trainmaster_disk.fill(1000)
print("p" * 5000, flush=True)
for size in (900, 5000):
    try:
        with open(f"{size}.pt", "wb", buffering=0) as file:
            print(size, file.write(b"x" * size), file.write(b"x" * size))
    except OSError as error:
        print(size, error.errno)
with trainmaster_disk.lifted():
    open("line", "wb").write(b"x" * 5000)
"""
    done, hit = run_python(text, tmp_path, "full")
    log = (Path(hit.folder) / "rank-0.log").read_text().splitlines()
    assert (done.returncode, log) == (0, ["p" * 5000, "900 900 100", "5000 27"])
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "checkpoints").iterdir()}
    assert sizes == {"900.pt": 1000, "5000.pt": 1000, "line": 5000}


def test_a_read_only_folder_is_one_for_root_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/deep").mkdir(parents=True)
    (tmp_path / "checkpoints/a.pt").write_bytes(b"x")
    text = """
for name in ("new.pt", "a.pt", "deep/new.pt"):
    try:
        open(name, "wb")
    except PermissionError as error:
        print(name, error.errno)
print(open("a.pt").read())
"""
    storage.forbid(tmp_path / "checkpoints")
    try:
        _, hit = run_python(text, tmp_path, "readonly")
    finally:
        storage.permit(tmp_path / "checkpoints")
    log = (Path(hit.folder) / "rank-0.log").read_text().splitlines()
    assert log == ["new.pt 13", "a.pt 13", "deep/new.pt 13", "x"]
    (tmp_path / "checkpoints/deep/new.pt").write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "newest", "order"),
    [
        ("power", 25, {"after": 6}),
        ("power", 35, {}),
        ("full", 25, {"after": 2, "until": 16}),
        ("readonly", 29, {"after": 2, "until": 17}),
        ("full", 38, {"after": 2, "until": 8}),
        ("full", 39, {}),
    ],
)
def test_a_disk_is_struck_at_the_next_save(name: str, newest: int, order: dict[str, int]) -> None:
    assert storage.place(name, SHAPE, newest) == order


def test_the_folder_that_is_made_read_only_is_that_of_the_checkpoints() -> None:
    run = Path("/drill/struck")
    for file, folder in (
        ("checkpoints/step-5/a.pt", "checkpoints"),
        ("work/out/step-5/a.pt", "work/out"),
        ("work/a.pt", "work"),
        ("work/checkpoint-12/a.pt", "work"),  # the next one is made beside it
    ):
        assert storage.find_folder(Checkpoint(name="", files=(run / file,), at=0.0), run) == run / folder


def test_what_went_wrong_is_found_in_the_log_and_not_what_every_run_prints(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference/rank-0.log").write_text("UserWarning: this cannot be compiled, 3.1 s\n")
    run = tmp_path / "struck"
    disk = storage.Disk(name="full", folder=run / "checkpoints", room=1000)
    _, hit = run_python("print('UserWarning: this cannot be compiled, 4.2 s')", run, "full")

    def look(hit: Attempt) -> Storage:
        return storage.look(hit, tmp_path / "reference", until=9, disk=disk, run=run, before=tmp_path / "before")

    seen = look(hit)
    assert (seen.told, seen.went_on, seen.refused, seen.through) == (None, True, None, ())
    (run / "attempt-1/rank-0.log").write_text("could not save step 30: File too large\n")
    refused = {"k": "refused", "n": 5, "r": 0, "t": 1.0, "words": "RuntimeError: x"}
    (run / "attempt-1-witness/7.jsonl").write_text(json.dumps(refused))
    (run / "attempt-1-witness/struck-0").touch()
    time.sleep(0.05)
    (run / "checkpoints/half.pt").write_bytes(b"x" * 1000)
    (run / "checkpoints/whole.pt").write_bytes(b"x" * 1001)
    long = replace(hit, codes=(-9,), lives=attempt(*lines_of(1, 9)).lives)
    seen = look(long)
    assert seen.told == "could not save step 30: File too large"
    assert (seen.went_on, seen.refused, seen.through) == (True, "RuntimeError: x", ("checkpoints/whole.pt",))
    short = replace(long, lives=attempt(*lines_of(1, 8)).lives)
    assert not look(short).went_on
    for room, through in ((2001, 0), (2000, 2)):  # of the whole disk: more was written than it had room for
        disk.room, disk.is_mount = room, True
        assert len(look(short).through) == through


@pytest.mark.parametrize("is_mount", [True, False])
def test_a_log_in_the_checkpoint_folder_is_no_save(is_mount: bool, tmp_path: Path) -> None:
    run, before = tmp_path / "struck-full", tmp_path / "struck"
    _, hit = run_python("", run, "full")
    (before / "checkpoints").mkdir(parents=True)
    old = {"train.out": b"a" * 3000, "last.pt": b"a" * 3000, "metrics": b"a" * 3000}
    new = {"train.out": b"a" * 3100, "last.pt": b"a" * 1000, "metrics": b"a" * 3000}
    disk = storage.Disk(name="full", folder=run / "checkpoints", room=1000, is_mount=is_mount)

    def through(**changed: bytes) -> tuple[str, ...]:
        for name, content in old.items():
            (before / "checkpoints" / name).write_bytes(content)
        for name, content in {**new, **changed}.items():
            (run / "checkpoints" / name).write_bytes(content)
        return storage.look(hit, tmp_path, until=9, disk=disk, run=run, before=before).through

    assert through() == (), "what a log was given more, and half of a file"
    assert through(**{"last.pt": b"b" * 3000}) == ("checkpoints/last.pt",), "written over in place"
    assert "checkpoints/step-9.pt" in through(**{"step-9.pt": b"b" * 3000})


def test_a_file_that_is_written_over_in_place_meets_a_limit_where_a_full_disk_had_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(spec=JobSpec(name="x", command=("true",)), own_mounts=True)
    starts = Starts(setup, tmp_path, struck_since=0.0)
    kept = tmp_path / "struck/checkpoints/last.pt"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"a" * 40_000)
    rooms: list[int] = []

    def start(_self: Starts, run: str, label: str, **more: Any) -> Attempt:
        done = replace(attempt(struck=True, codes=(1,)), folder=str(tmp_path / run / f"attempt-{len(rooms)}"))
        if label.startswith("resume after"):
            return done
        path = tmp_path / run / "checkpoints/last.pt"
        assert path.read_bytes() == kept.read_bytes(), "each try has a copy of the run as it was"
        rooms.append(more["order"]["room"])
        path.write_bytes(b"b" * (more["order"]["room"] or 40_000))
        return done

    @contextlib.contextmanager
    def small_disk(_folder: Path, _room: int) -> Iterator[bool]:
        yield True

    monkeypatch.setattr(Starts, "start", start)
    monkeypatch.setattr(mounts, "enter", lambda: True)
    monkeypatch.setattr(mounts, "small_disk", small_disk)
    timeline = Timeline(reference={0: REFERENCE}, savers=frozenset({0}))
    timeline.add("the start", [life(*lines_of(1, 8), saves=[5])])
    one = Copies(starts, replace(SHAPE, world=1), tmp_path).strike(Strike(name="full", after=0), timeline)
    assert rooms == [0, 20_000]
    assert one.storage is not None and one.storage.through == () and "EFBIG in place of ENOSPC" in one.storage.way
    assert storage_verdict.judge(one, []).verdict is Verdict.FAIL, "the last good checkpoint was written over"
    assert not (tmp_path / "struck-full/checkpoints").exists()


@pytest.mark.parametrize(("began_s", "ended"), [(0.001, False), (1.0, True)], ids=["the struck one", "started again"])
def test_a_process_whose_first_step_is_in_the_tick_of_its_strike_was_not_started_again(
    began_s: float, ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a file is that of the kernel's last tick: a quick program was killed before its next save."""
    (tmp_path / "struck-0").touch()
    first = (tmp_path / "struck-0").stat().st_mtime + began_s
    step = {"k": "step", "o": 0, "r": 0, "w": 1, "lr": [0.1], "p": "p", "s": "s", "g": {}, "b": []}
    lines = [json.dumps({**step, "n": number, "t": first + number / 1e4}) for number in range(1, 9)]
    (tmp_path / "7.jsonl").write_text("\n".join(lines))
    sent: list[signal.Signals] = []
    monkeypatch.setattr(outside, "_send", lambda _, number: sent.append(number))
    watched = outside.Outside(strike=Strike(name="readonly", after=0), folder=tmp_path, witness=tmp_path, struck=True)
    watched.look(os.getpid())
    assert bool(sent) is ended


LOST = Storage(way="cut", lost=("checkpoints/a.pt",), of=1)
ON = Storage(way="full", went_on=True, refused="RuntimeError: x")


@pytest.mark.parametrize(
    ("name", "left", "start", "outcome", "words"),
    [
        ("power", Storage(way="cut", of=1), 10, Verdict.PASS, "all was fsynced; went on from step 10"),
        ("power", LOST, 5, Verdict.PASS, "was passed over, went on from step 5"),
        ("power", LOST, 10, Verdict.PASS, "went on from step 10"),
        ("power", LOST, 0, Verdict.FAIL, "1 file was not fsynced: checkpoints/a.pt; the run began at step 0"),
        ("power", LOST, None, Verdict.FAIL, "the program did not start again: exit code 1"),
        ("power", replace(LOST, lost=(), unseen=("a.bin",)), 10, Verdict.ERROR, "1 of 1 files"),
        ("power", replace(LOST, unseen=("a.bin",)), None, Verdict.FAIL, "did not start again"),
        ("full", Storage(way="full"), 10, Verdict.PASS, "ended with 1, then went on from step 10"),
        ("full", Storage(way="full"), 5, Verdict.FAIL, "went on from step 5, although step 10 was saved"),
        ("full", Storage(way="full"), None, Verdict.FAIL, "did not start again"),
        ("full", ON, 10, Verdict.FAIL, "trained on without a word"),
        ("full", replace(ON, told="no space left"), 10, Verdict.PASS, "said so ('no space left')"),
        ("full", replace(ON, refused=None), 10, Verdict.ERROR, "no save was seen to fail"),
        ("readonly", replace(ON, through=("a.pt",)), 10, Verdict.ERROR, "a.pt was written all the same"),
        ("readonly", ON, 0, Verdict.FAIL, "the run began at step 0, although step 10 was saved before"),
    ],
)
def test_a_struck_disk(name: str, left: Storage, start: int | None, outcome: Verdict, words: str) -> None:
    lines = [] if start is None else lines_from(start)
    one = Struck(
        strike=Strike(name=name, after=0), reached=True, died_at=12, hit=attempt(codes=(1,)), newest=10, storage=left,
        older_step=5 if name == "power" else None, branch=attempt(*lines, codes=(1,) if start is None else (-9,)),
        resumes=tuple(resumes(*lines)) if lines else (),
    )  # fmt: skip
    finding = storage_verdict.judge(one, [])
    assert (finding.verdict, words in finding.reason) == (outcome, True), finding.reason
    assert storage_verdict.judge(replace(one, reached=False), []).verdict is Verdict.ERROR
    hung = replace(attempt(), hung=True)
    assert storage_verdict.judge(replace(one, branch=hung, storage=Storage(way="")), []).verdict is Verdict.FAIL


def test_two_saves_are_left_for_the_copies() -> None:
    for seed in range(20):
        strikes = plan.make(
            Shape(steps=30, saves=(10, 20, 30), world=1, launcher=False), wanted=plan.STRIKES, seed=seed
        )
        assert max(strike.after for strike in strikes) < 20


@pytest.mark.spawns
@pytest.mark.matrix(one_in=36, of="drills of the scripts of others")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "strikes", "says"),
    [
        (None, plan.STORAGE, {}),
        ("undurable", ("power",), {"power": "not fsynced"}),
        ("silent", ("readonly",), {"readonly": "and the program trained on without a word"}),
        ("deleted", ("full",), {"full": "the program did not start again: exit code 1"}),
    ],
)
def test_a_struck_disk_costs_no_checkpoint(
    fault: str | None, strikes: tuple[str, ...], says: dict[str, str], tmp_path: Path
) -> None:
    with recipes.warm_python("torchrun") as python:
        changes = recipes.DISK[fault] if fault else ()
        proof = recipes.drill(tmp_path, "torchrun", strikes=strikes, changes=changes, python=(python, "-m"))
    if fault is None:
        assert matrix.judge(proof, "none") is None
        return
    failed = {one.check: one.findings[0].reason for one in proof.results if one.findings[0].verdict is Verdict.FAIL}
    assert proof.overall is Overall.FAIL
    assert failed.keys() == says.keys(), failed
    assert all(words in failed[name] for name, words in says.items()), failed
