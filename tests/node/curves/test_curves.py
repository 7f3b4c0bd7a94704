"""Figures of programs that know nothing of us, from each place they leave them, growing or damaged."""

from __future__ import annotations

import json
import math
import random
import sqlite3
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from trainmaster.node.curves import Point, Reader, canonical
from trainmaster.node.curves.find import READ_FROM, Curves
from trainmaster.node.curves.log_lines import LogLines
from trainmaster.node.curves.tables import LightningTable, MlflowDatabase, MlflowMetric, TrainerState
from trainmaster.node.curves.tensorboard import EventFile
from trainmaster.node.curves.wandb import OfflineRun

# The shapes in which well-known trainers print a step, written for this test.
LINES = {
    "step 10 | loss 2.31 | lr 3.00e-04 | norm 0.5": (10, {"loss": 2.31, "lr": 3e-4}),
    "iter 100: loss 3.2145, time 24.11ms, mfu 12.3%": (100, {"loss": 3.2145}),
    "step 250: train loss 3.1034, val loss 3.2112": (250, {"loss": 3.1034, "eval_loss": 3.2112}),
    "[rank0]:2026-01-01 12:00:00,123 - INFO - step:  10  loss:  8.1312  grad_norm:  1.4  memory: 1.23GiB(0.5%)  tps: "
    "12,345": (10, {"loss": 8.1312, "grad_norm": 1.4, "tokens_per_s": 12345}),
    " iteration       10/     100 | consumed samples: 320 | learning rate: 1.500000E-04 | lm loss: 1.083432E+01 | loss "
    "scale: 1.0 | grad norm: 2.345 |": (10, {"loss": 10.83432, "lr": 1.5e-4, "grad_norm": 2.345}),
    "Epoch 0:  50%|#####     | 10/20 [00:01<00:01,  9.5it/s, v_num=0, train_loss=0.512]": (10, {"loss": 0.512}),
    "step 00012/00100 (12.00%) | loss: 4.123456 | dt: 123.45ms | tok/sec: 123,456 | mfu: 40.1": (
        12, {"loss": 4.123456, "tokens_per_s": 123456}),
    "epoch 2 | batch 10/200 | loss 1.5": (410, {"loss": 1.5}),
    "\x1b[32mstep 7\x1b[0m loss \x1b[1m1.25\x1b[0m": (7, {"loss": 1.25}),
    '{"step": 12, "loss": 1.25, "lr": 0.001}': (12, {"loss": 1.25, "lr": 0.001}),
    "global_step=20, total_loss=0.7": (20, {"loss": 0.7}),
    "step 21 | loss 0.7 | TestError: 0.25": (21, {"loss": 0.7}),
}  # fmt: skip
NO_LINES = (
    "the loss of a parent at step 3 was 5 years ago",
    "lossless compression step 4 at 3.5",
    "step 5 took 3.1 s",
    "loss 2.5",
    "RuntimeError: loss diverged at step 2: 74923.7 (lr=50.0)",
    "[rank0]: trainer.faults.DivergedException: loss 7.5 at step 2",
    "    raise ValueError('loss 7.5 at step 2')",
    "",
)


def give(path: Path, data: bytes, reader: Reader) -> list[Point]:
    with path.open("ab") as file:
        file.write(data)
    return reader.read()


@pytest.mark.parametrize("line", LINES)
def test_a_printed_step_is_read(line: str, tmp_path: Path) -> None:
    step, figures = LINES[line]
    path = tmp_path / "rank-0.log"
    assert give(path, f"{line}\n".encode(), LogLines(path)) == [Point(step=step, figures=figures)]


@pytest.mark.parametrize("line", NO_LINES)
def test_another_line_is_none(line: str, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    assert give(path, f"{line}\n".encode(), LogLines(path)) == []


def test_the_last_redraw_of_a_progress_bar_that_was_killed_is_read_at_the_end(tmp_path: Path) -> None:
    """tqdm writes \\r before each redraw, and a newline only when it closes."""
    for path, last in (
        (tmp_path / "killed", b"\r 8%|8 | 2/25 [00:01<00:12, loss=0.4]"),
        (tmp_path / "own", b"\rit 2 loss 0.4"),
    ):
        path.write_bytes(b"")
        curves = Curves(path, [], tmp_path / "none")
        path.write_bytes(b"\r 4%|4 | 1/25 [00:00<00:12, loss=0.5]" + last[:9])
        assert curves.look() == []
        with path.open("ab") as file:
            file.write(last[9:])
        first = [Point(step=1, figures={"loss": 0.5}), Point(step=2, figures={"loss": 0.4})]
        assert curves.look(last=True) == first and curves.look(last=True) == []
    torn = tmp_path / "torn"
    torn.write_bytes(b"")
    curves = Curves(torn, [], tmp_path / "none")
    torn.write_bytes(b"step 1 loss 0.5\nstep 2 loss 0.4")
    assert curves.look(last=True) == [Point(step=1, figures={"loss": 0.5})], "a line that was cut off, as 0.41 may be"


def test_a_line_without_a_step_has_that_of_the_progress_bar_before_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    reader = LogLines(path)
    assert give(path, b" 10%|#   | 30/300 [00:01<00:09,  9.9it/s]\r{'loss': '2.3', 'learn", reader) == []
    (point,) = give(path, b"ing_rate': 5e-05, 'epoch': 0.1}\n", reader)
    assert point == Point(step=30, figures={"loss": 2.3, "lr": 5e-5})
    (sick,) = give(path, b"step 31 loss nan\n", reader)
    assert math.isnan(sick.figures["loss"])


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | float | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def tfevents(rows: Sequence[tuple[int, dict[str, float]]], *, tensor: bool = False) -> bytes:
    """Records as TensorBoard writes them; `tensor`: as its newer summary API does."""
    out = b""
    for step, figures in rows:
        values = b""
        for tag, number in figures.items():
            held = field(8, field(1, 1) + field(4, struct.pack("<f", number))) if tensor else field(2, float(number))
            values += field(1, field(1, tag) + held)
        event = varint(1 << 3 | 1) + struct.pack("<d", 1.0) + field(2, step) + field(5, values)
        out += struct.pack("<QI", len(event), 0) + event + struct.pack("<I", 0)
    return out


def wandb(rows: Sequence[tuple[int, dict[str, float]]], *, padding: int = 0) -> bytes:
    """A file as `wandb offline` leaves it: blocks of 32 KiB, records that may be cut at their ends."""
    out = b":W&B\xce\xbe\x00"
    for step, figures in rows:
        items = b"".join(field(1, field(2, tag) + field(16, json.dumps(value))) for tag, value in figures.items())
        record = field(1, 1) + field(2, items + field(2, field(1, step))) + field(4, b"x" * padding)
        first = True
        while record or first:
            left = 32768 - len(out) % 32768
            if left < 7:
                out += b"\0" * left
                continue
            part, record = record[: left - 7], record[left - 7 :]
            kind = (1 if first else 4) if not record else (2 if first else 3)
            out += struct.pack("<IHB", 0, len(part), kind) + part
            first = False
    return out


ROWS = [(step, {"train/loss": 3 - step / 8, "train/learning_rate": 0.5 / step}) for step in range(1, 9)]
WANTED = [Point(step=step, figures={"loss": 3 - step / 8, "lr": pytest.approx(0.5 / step)}) for step in range(1, 9)]
KINDS: dict[str, tuple[Callable[[Path], Reader], bytes]] = {
    "tensorboard": (EventFile, tfevents(ROWS)),
    "tensorboard, tensors": (EventFile, tfevents(ROWS, tensor=True)),
    "wandb": (OfflineRun, wandb(ROWS)),
    "wandb, long records": (OfflineRun, wandb(ROWS, padding=20_000)),
    "lightning": (
        LightningTable,
        b"epoch,train_loss,lr,step\n" + b"".join(b"0,%r,%r,%d\n" % (3 - s / 8, 0.5 / s, s) for s in range(1, 9)),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("piece", [1 << 20, 4000, 13])
def test_a_file_that_grows_gives_each_point_once(kind: str, piece: int, tmp_path: Path) -> None:
    make, data = KINDS[kind]
    path = tmp_path / "file"
    reader, points = make(path), []
    piece = max(piece, len(data) // 3000)
    for at in range(0, len(data), piece):
        points += give(path, data[at : at + piece], reader)
    merged: dict[int, dict[str, float]] = {}
    for point in points:
        merged.setdefault(point.step, {}).update(point.figures)
    assert [Point(step=step, figures=figures) for step, figures in merged.items()] == WANTED
    assert reader.read() == []


def test_stores_of_mlflow_are_read(tmp_path: Path) -> None:
    metric = tmp_path / "metrics" / "train_loss"
    metric.parent.mkdir()
    reader = MlflowMetric(metric)
    assert give(metric, b"1700000000000 2.5 1\n1700000000001 2.2", reader) == [Point(step=1, figures={"loss": 2.5})]
    assert give(metric, b"5 2\n", reader) == [Point(step=2, figures={"loss": 2.25})]
    path = tmp_path / "mlflow.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE metrics (key, value, timestamp, run_uuid, step, is_nan)")
        db.execute("INSERT INTO metrics VALUES ('loss', 2.5, 0, 'a', 1, 0), ('other', 1.0, 0, 'a', 1, 0)")
    database = MlflowDatabase(path)
    assert database.read() == [Point(step=1, figures={"loss": 2.5})]
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO metrics VALUES ('loss', 2.0, 0, 'a', 2, 0)")
    assert database.read() == [Point(step=2, figures={"loss": 2.0})] and database.read() == []


def state(folder: Path, step: int) -> Path:
    folder.mkdir(parents=True)
    rows = [{"epoch": 0.1, "loss": 3 - at / 100, "step": at} for at in range(10, step + 1, 10)]
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"global_step": step, "log_history": rows}))
    return path


def test_the_states_of_checkpoints_tell_each_step_once(tmp_path: Path) -> None:
    floor: dict[str, int] = {}
    first, second = (TrainerState(state(tmp_path / f"checkpoint-{step}", step), floor) for step in (20, 40))
    assert [point.step for point in first.read()] == [10, 20]
    assert [point.step for point in second.read()] == [30, 40]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("trainmaster.node.curves.find.time.monotonic", lambda: now[0])
    return now


def test_what_lay_there_before_the_start_is_not_of_this_run(tmp_path: Path, clock: list[float]) -> None:
    log, old = tmp_path / "rank-0.log", tmp_path / "runs" / "events.out.tfevents.1"
    old.parent.mkdir()
    old.write_bytes(tfevents(ROWS))
    state(tmp_path / "checkpoint-20", 20)
    curves = Curves(log, [tmp_path], tmp_path / "events.jsonl")
    assert curves.look(last=True) == []
    state(tmp_path / "checkpoint-40", 40)
    clock[0] += 60
    assert curves.look() == []  # kept back for a moment
    clock[0] += 2
    assert [point.step for point in curves.look()] == [30, 40] and curves.source == "trainer_state"
    give(log, b"step 50 loss 2\n", LogLines(log))
    clock[0] += 60
    assert curves.look() == []  # one place is read: a step is not told twice


def test_near_the_start_the_log_is_read_at_every_turn_of_the_agent(tmp_path: Path, clock: list[float]) -> None:
    """A point has the time at which it was read: what lies before the first step is told by it."""
    log = tmp_path / "rank-0.log"
    curves = Curves(log, [tmp_path], tmp_path / "events.jsonl")
    log.write_bytes(b"step 0 loss 2\n")
    assert curves.look() == []
    clock[0] += 2.25
    assert [point.step for point in curves.look()] == [0]
    turns = ((0.1, False), (0.25, True), (0.1, False), (0.25, True), (90, True), (0.25, False), (2, True))
    for step, (after_s, seen) in enumerate(turns):
        clock[0] += after_s
        with log.open("ab") as file:
            file.write(f"step {step} loss 2\n".encode())
        assert bool(curves.look()) == seen, (step, after_s)


def test_a_program_that_writes_events_is_left_alone(tmp_path: Path, clock: list[float]) -> None:
    log, events = tmp_path / "rank-0.log", tmp_path / "events.jsonl"
    curves = Curves(log, [tmp_path], events)
    ours = {"phase": "STEP", "event": "metrics", "data": {"step": 1, "loss": 2, READ_FROM: "log"}}
    events.write_text(json.dumps(ours) + "\n")
    log.write_text("step 1 loss 2\n")
    assert curves.look() == []
    clock[0] += 2.1
    assert [point.step for point in curves.look()] == [1]  # the event before is one of ours
    with events.open("a") as file:
        file.write('{"phase":"STEP","event":"metrics","data":{"step":1,"loss":2}}\n')
    with log.open("a") as file:
        file.write("step 2 loss 2\n")
    clock[0] += 60
    assert curves.look() == []


def test_events_that_are_written_during_a_look_are_seen_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step was told twice: the log was read after the events, and both were written in between."""
    log, events = tmp_path / "rank-0.log", tmp_path / "events.jsonl"
    curves = Curves(log, [tmp_path], events)

    def write() -> None:
        events.write_text('{"phase":"STEP","event":"metrics","data":{"step":1,"loss":2}}\n')
        log.write_text("step 1 | loss 2\n")

    monkeypatch.setattr(curves, "_search", write)
    assert curves.look(last=True) == [] and curves.source is None


def test_a_step_that_is_printed_before_its_event_is_written_is_told_once(tmp_path: Path, clock: list[float]) -> None:
    """A look every 0.2 s came between the two."""
    log, events = tmp_path / "rank-0.log", tmp_path / "events.jsonl"
    curves = Curves(log, [tmp_path], events)
    log.write_text("step 1 loss 2\n")
    assert curves.look() == []
    events.write_text('{"phase":"STEP","event":"metrics","data":{"step":1,"loss":2}}\n')
    for _ in range(20):
        clock[0] += 0.25
        assert curves.look() == []
    assert curves.look(last=True) == []


def test_first_points_that_are_kept_back_have_the_time_at_which_they_were_read(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, wall = tmp_path / "rank-0.log", [1000.0]
    monkeypatch.setattr("trainmaster.node.curves.find.time.time", lambda: wall[0])
    curves = Curves(log, [tmp_path], tmp_path / "events.jsonl")
    for step in (1, 2):
        with log.open("a") as file:
            file.write(f"step {step} loss 2\n")
        assert curves.look() == []
        clock[0] += 0.25
        wall[0] += 0.25
    clock[0] += 2
    assert [(point.step, point.at) for point in curves.look()] == [(1, 1000.0), (2, 1000.25)]
    with log.open("a") as file:
        file.write("step 3 loss 2\n")
    assert [point.step for point in curves.look(last=True)] == [3]


def test_links_and_fifos_are_not_read(tmp_path: Path) -> None:
    import os

    other = tmp_path / "other"
    other.write_text("step 1 loss 2\n")
    (tmp_path / "link").symlink_to(other)
    os.mkfifo(tmp_path / "fifo")
    assert LogLines(tmp_path / "link").read() == [] and LogLines(tmp_path / "fifo").read() == []


def test_damaged_files_give_points_or_none_and_no_error(tmp_path: Path) -> None:
    lot = random.Random(7)
    for round_ in range(400):
        make, data = KINDS[lot.choice([*KINDS])]
        damaged = bytearray(data[:4000])
        for _ in range(lot.randrange(1, 6)):
            damaged[lot.randrange(len(damaged))] = lot.randrange(256)
        path = tmp_path / str(round_)
        path.write_bytes(bytes(damaged[: lot.randrange(len(damaged))] if lot.random() < 0.3 else damaged))
        for point in make(path).read():
            assert point.step >= 0 and point.figures


@pytest.mark.parametrize(
    ("name", "ours"),
    [("train/loss", "loss"), ("Loss", "loss"), ("val_loss", "eval_loss"), ("train_loss_step", "loss"), ("gloss", None),
     ("eval/loss", "eval_loss"), ("train/learning_rate", "lr"), ("x" * 10_000, None)],
)  # fmt: skip
def test_names_of_figures(name: str, ours: str | None) -> None:
    assert canonical(name) == ours
