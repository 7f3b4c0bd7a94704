"""An event file holds whole lines numbered 1..n, whoever wrote them and however they died."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from trainmaster.core.event_catalog import CHECK_VARIABLE
from trainmaster.core.events import Event, split
from trainmaster.node.emit import Emitter


@pytest.fixture(autouse=True)
def any_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is the subject here: events may be any."""
    monkeypatch.delenv(CHECK_VARIABLE)


def events_of(path: Path) -> list[Event]:
    lines = split(path.read_bytes(), offset=0, zone=UTC, last=True)
    return [line.event for line in lines if line.event is not None]


def seqs_of(path: Path) -> list[int | None]:
    return [event.seq for event in events_of(path)]


def python(code: str, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE)


def test_an_event_is_returned_as_it_was_written(tmp_path: Path) -> None:
    when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    with Emitter(tmp_path / "a" / "events.jsonl", now=lambda: when) as emitter:
        written = emitter.emit("TRAINING", "epoch_complete", epoch=3, step=7, loss=float("nan"))
    assert written == Event(
        phase="TRAINING", event="epoch_complete", ts=when, seq=1, epoch=3, data=written.data, iteration=None
    )
    (read,) = events_of(tmp_path / "a" / "events.jsonl")
    assert (read.ts, read.seq, read.epoch, read.data) == (when, 1, 3, {"step": 7, "loss": "NaN"})


WRITER = """
import sys
from trainmaster.node.emit import Emitter
with Emitter(sys.argv[1], fsync="never") as emitter:
    for n in range(100):
        emitter.emit("STEP", "metrics", writer=sys.argv[2], n=n, padding="x" * (n * 37 % 3000))
"""


def test_processes_that_write_at_once_keep_whole_lines_and_one_count(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writers = [python(WRITER, str(path), str(n)) for n in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.close()
    events = events_of(path)
    assert [event.seq for event in events] == list(range(1, 401))
    for name in "0123":  # and each writer's own lines are all there, in its order
        assert [event.data["n"] for event in events if event.data["writer"] == name] == list(range(100))


def test_threads_of_one_emitter_keep_one_count(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Emitter(path, fsync="never") as emitter:
        threads = [
            threading.Thread(target=lambda: [emitter.emit("HEARTBEAT", "alive") for _ in range(100)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seqs_of(path) == list(range(1, 401))


def test_a_restarted_writer_goes_on_counting(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for _ in range(3):
        with Emitter(path) as emitter:
            emitter.emit("PROJECT", "start")
    assert seqs_of(path) == [1, 2, 3]


@pytest.mark.parametrize(
    "half", [b'{"v":1,"seq":2,"pha', b'{"v":1,"seq":2,"x":"' + b"y" * 200_000, b"\xff\xfe", b"\x00"]
)
def test_half_a_line_of_a_killed_writer_spoils_no_other(tmp_path: Path, half: bytes) -> None:
    path = tmp_path / "events.jsonl"
    with Emitter(path) as emitter:
        emitter.emit("PROJECT", "start")
    with path.open("ab") as file:
        file.write(half)
    with Emitter(path) as emitter:
        assert emitter.emit("PROJECT", "end").seq == 2
    lines = split(path.read_bytes(), offset=0, zone=UTC, last=True)
    assert [line.event and line.event.seq for line in lines] == [1, None, 2]


def test_a_line_longer_than_the_first_look_back_is_still_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Emitter(path) as emitter:
        emitter.emit("PREFLIGHT", "check", text="x" * 300_000)
        emitter.emit("PREFLIGHT", "check", text='\n{"seq":77}\n' * 10_000)
    with Emitter(path) as emitter:
        assert emitter.emit("PREFLIGHT", "end").seq == 3


def test_a_writer_killed_at_any_moment_leaves_lines_that_can_be_added_to(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = WRITER.replace("range(100)", "range(10**9)").replace("with Emitter", "print(flush=True)\nwith Emitter")
    writer = python(code, str(path), "0")
    assert writer.stdout is not None
    writer.stdout.readline()
    while not path.exists() or path.stat().st_size < 50_000:
        pass
    writer.kill()
    assert writer.wait() == -signal.SIGKILL
    writer.stdout.close()
    before = seqs_of(path)
    with Emitter(path) as emitter:
        emitter.emit("PROJECT", "end")
    assert before == list(range(1, len(before) + 1))
    assert seqs_of(path) == [*before, len(before) + 1]


def test_a_full_disk_is_told_and_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python itself starts; then write() fails like a full disk
    try:
        with Emitter(path) as emitter:
            first = emitter.emit("PROJECT", "start")
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, hard))
            with pytest.raises(OSError):
                emitter.emit("TRAINING", "start", text="x" * 100)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert path.read_bytes().endswith(b"\n")
            second = emitter.emit("TRAINING", "start", text="x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert (first.seq, second.seq) == (1, 2)
    assert seqs_of(path) == [1, 2]


def test_marks_are_synced_and_steps_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with Emitter(tmp_path / "events.jsonl") as emitter:
        emitter.emit("STEP", "metrics", step=1)
        emitter.emit("HEARTBEAT", "alive")
        assert not synced
        emitter.emit("CHECKPOINT", "saved", step=1)
        assert len(synced) == 1


def test_foreign_lines_before_ours_do_not_stop_the_count(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('not json\n[1]\n{"seq":"x"}\n')
    with Emitter(path) as emitter:
        assert emitter.emit("PROJECT", "start").seq == 1
    assert json.loads(path.read_text().splitlines()[-1])["seq"] == 1


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def truncate_and_fill(path: Path) -> None:
    path.write_bytes(b'{"phase":"STEP"}\n' * 100)  # longer than it was


def replace_by_name(path: Path) -> None:
    path.with_name("other").write_bytes(b"")
    path.with_name("other").rename(path)


@pytest.mark.parametrize("act", [truncate, truncate_and_fill, replace_by_name, Path.unlink])
def test_a_guard_sees_that_lines_are_gone_and_marks_the_place(tmp_path: Path, act: Callable[[Path], None]) -> None:
    path = tmp_path / "events.jsonl"
    with Emitter(path, guard=True) as agent, Emitter(path) as rank:
        agent.emit("HEARTBEAT", "alive", ranks=1)
        rank.emit("STEP", "metrics", step=1)
        agent.emit("HEARTBEAT", "alive", ranks=1)
        act(path)
        agent.emit("HEARTBEAT", "alive", ranks=1)
        agent.emit("HEARTBEAT", "alive", ranks=1)
    marks = [event for event in events_of(path) if event.event == "events_lost"]
    assert [(mark.seq, mark.data["after_seq"]) for mark in marks] == [(4, 3)]
    assert seqs_of(path)[-2:] == [5, 6], "numbers go on: what is missing can be counted"


def test_a_guard_writes_through_no_link_and_into_no_pipe(tmp_path: Path) -> None:
    path, secret = tmp_path / "events.jsonl", tmp_path / "secret"
    secret.write_text("s")
    with Emitter(path, guard=True) as agent:
        for make in (lambda: path.symlink_to(secret), lambda: os.mkfifo(path), path.mkdir):
            agent.emit("HEARTBEAT", "alive", ranks=1)
            path.rmdir() if path.is_dir() else path.unlink()
            make()
            agent.emit("HEARTBEAT", "alive", ranks=1)
    assert secret.read_text() == "s"


def test_a_file_beyond_any_use_is_emptied_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Emitter(path, guard=True) as agent, Emitter(path) as rank:
        agent.emit("HEARTBEAT", "alive", ranks=1)
        agent.bound(10_000)
        assert len(events_of(path)) == 1, "it is small"
        for step in range(200):
            rank.emit("STEP", "metrics", step=step)
        size = path.stat().st_size
        agent.bound(10_000)
        rank.emit("STEP", "metrics", step=200)
    assert path.stat().st_size < 1_000 < 10_000 < size
    assert [event.event for event in events_of(path)] == ["events_lost", "events_cut", "metrics"]
    assert events_of(path)[1].data["cut_bytes"] == size
