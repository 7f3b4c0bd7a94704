"""Every line of a rank carries its time, level, rank and node, in ASCII and in one piece."""

from __future__ import annotations

import json
import math
import os
import re
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core import heartbeat
from trainmaster.core.plan import START_VARIABLE
from trainmaster.node.emit import Emitter
from trainmaster.train.metrics.rate import Reading
from trainmaster.train.parallel.rank_info import RankInfo
from trainmaster.train.run_log import RunLog
from trainmaster.train.start_times import StartTimes

LINE = re.compile(heartbeat.LINE_PREFIX)


def rank(number: int, *, local: int) -> RankInfo:
    return RankInfo(
        rank=number, world_size=4, local_rank=local, local_world_size=2, node_rank=number // 2, nodes=2, master=None
    )


def test_lines_warnings_and_errors_carry_time_level_rank_and_node(capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(rank(2, local=0), None)
    before = datetime.now(UTC)
    log.line("2 × 3 tokens → done")
    log.step_skipped(step=3, samples=range(8, 16), loss=9.0, grad_norm=1.0, why="loss 9 is a spike")
    log.checkpoint_rejected("/x", "damaged")
    log.alarm("hang: rank 1")
    lines = capsys.readouterr().out.splitlines()
    assert all(LINE.match(line) and line.isascii() for line in lines), lines
    stamps, levels = zip(*(line.split()[:2] for line in lines), strict=True)
    assert levels == ("INFO", "WARNING", "WARNING", "ERROR")
    assert all(abs((datetime.fromisoformat(stamp) - before).total_seconds()) < 60 for stamp in stamps)
    assert lines[0].endswith(" INFO [rank 2 node 1] 2 x 3 tokens to done")


def test_only_local_rank_0_prints_lines_and_every_rank_prints_errors(capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(rank(3, local=1), None)
    log.line("training")
    log.warning("slow")
    log.alarm("failed")
    assert [line.split("] ")[1] for line in capsys.readouterr().out.splitlines()] == ["failed"]


def test_the_last_line_has_short_losses_or_says_that_nothing_was_left(capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(rank(0, local=0), None)
    figures = {"loss_first": 5.978416156, "loss_last": 3.6860790, "tokens_per_s": 1.0, "seconds": 1.0, "stopped": None}
    log.training_ended(step=6, steps=6, **figures)
    log.training_ended(step=6, steps=6, idle=True, **figures)
    first, second = (line.split("] ")[1] for line in capsys.readouterr().out.splitlines())
    assert first == "done at step 6/6, loss 5.978 to 3.686"
    assert second == "done: already at step 6 of 6; nothing to do"


@pytest.mark.parametrize(
    ("level", "printed"),
    [
        ("DEBUG", ["INFO", "DEBUG", "WARNING", "ERROR", "INFO", "INFO"]),
        ("INFO", ["INFO", "WARNING", "ERROR", "INFO", "INFO"]),
        ("WARNING", ["WARNING", "ERROR", "INFO", "INFO"]),
        ("ERROR", ["ERROR", "INFO", "INFO"]),
    ],
)
def test_lines_below_the_level_are_left_out_but_for_those_that_log_rules_match(
    capsys: pytest.CaptureFixture[str], level: heartbeat.Level, printed: list[str]
) -> None:
    log = RunLog(rank(0, local=0), None, level=level)
    log.line("a line")
    log.checkpoint_rejected("/x", "damaged")
    log.alarm("hang")
    log.beat(step=1, steps=2, loss=1.0, grad_norm=1.0, tokens_per_s=1.0, step_s=1.0, at="train")
    log.line("done", always=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == printed
    debug = [line for line in lines if " DEBUG " in line]
    assert all('event CHECKPOINT rejected {"epoch": null' in line and '"damaged"' in line for line in debug)


def test_each_part_of_a_start_is_an_event_and_a_recovery_is_one_with_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINMASTER_CHECK_EVENTS", "1")
    asked = time.time() - 10_000  # before this process began
    recovery = {"how": "in_place", "failed_at": asked - 2, "parts": {"stop": 0.5, "check": 1.5}}
    environ = {START_VARIABLE: json.dumps({"at": asked, "recovery": recovery})}
    with Emitter(tmp_path / "events.jsonl") as emitter:
        times = StartTimes(RunLog(rank(0, local=0), emitter), environ, restart=3)
        times.done("imports")
        times.done("first_step", of_it={"compile": 4.0, "nothing": 0.0})
        for _ in range(2):  # the second time it is over
            times.finish(step=21, resumed_from=20, tier="disk")
            times.done("later")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(line["phase"], line["data"].get("part")) for line in lines] == [
        ("START", "imports"), ("START", "compile"), ("START", "first_step"), ("START", None), ("RECOVERY", None),
    ]  # fmt: skip
    done = lines[-1]["data"]
    assert list(done["parts"]) == ["stop", "check", "fork", "imports", "compile", "first_step"]
    assert (done["step"], done["resumed_from"], done["tier"], done["restart"]) == (21, 20, "disk", 3)
    assert done["parts"]["fork"] > 1000 and done["seconds"] - lines[-2]["data"]["seconds"] == pytest.approx(2, abs=0.01)


def test_a_file_that_cannot_be_searched_holds_nothing_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Emitter(tmp_path / "events.jsonl") as emitter:
        (tmp_path / "events.jsonl").write_text('{"phase": "STEP", "event": "metrics", "data": [1]}\n{"data"\n')
        assert not emitter.holds("STEP", "metrics", since=("TRAINING", "start"), step=1)
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write('{"phase": "STEP", "event": "metrics", "data": {"step": 1, "loss": "NaN", "lr": 0.1}}\n')
        assert emitter.holds("STEP", "metrics", since=("TRAINING", "start"), step=1, loss=float("nan"))
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write('{"phase": "TRAINING", "event": "start", "data": {"step": 0}}\n')
        assert not emitter.holds("STEP", "metrics", since=("TRAINING", "start"), step=1), "it is made again"

        def refuse(*_: object) -> bytes:
            raise OSError(116, "Stale file handle")

        monkeypatch.setattr(os, "pread", refuse)
        assert not emitter.holds("TRAINING", "start", since=("PROJECT", "start"), step=0)
        monkeypatch.undo()


@pytest.mark.parametrize(("loss", "times"), [(1.0, 1), (1.5, 2), (float("nan"), 1)])
def test_a_step_that_the_lost_group_has_told_is_not_told_again(loss: float, times: int, tmp_path: Path) -> None:
    """With another loss it is a step that was made again, after a rollback."""
    reading = Reading(tokens_per_s=1.0, step_s=1.0)
    metrics: dict[str, Any] = {"lr": 0.1, "grad_norm": 1.0, "sequence_tokens": 1, "memory": {"memory_gib": 1.0}}
    with Emitter(tmp_path / "events.jsonl") as lost, Emitter(tmp_path / "events.jsonl") as left:
        logs = [RunLog(rank(0, local=0), emitter) for emitter in (lost, left)]
        logs[1].lead(False)
        for log, own, step_s in ((logs[0], loss, 1.0), (logs[1], loss if math.isnan(loss) else 1.0, 2.0)):
            log.step_metrics(step=2, loss=own, reading=replace(reading, step_s=step_s), **metrics)
        logs[1].lead(True)
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [item["data"]["step"] for item in told] == [2] * times


def test_a_group_that_takes_over_says_the_last_step_and_what_followed_it(tmp_path: Path) -> None:
    reading = Reading(tokens_per_s=1.0, step_s=1.0)
    metrics: dict[str, Any] = {
        "loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "reading": reading, "sequence_tokens": 1,
        "memory": {"memory_gib": 1.0},
    }  # fmt: skip
    with Emitter(tmp_path / "events.jsonl") as emitter:
        log = RunLog(rank(0, local=0), emitter)
        log.lead(False)
        for step in (1, 2):
            log.step_metrics(step=step, **metrics)
        log.checkpoint_failed(step=2, tier="disk", why="of this process alone")
        log.evaluated(step=2, loss=1.0, perplexity=2.7)
        log.recovered(how="group", restart=1, step=2, resumed_from=1, tier="peer", seconds=1.0, parts={})
        log.recovered(how="in_place", restart=1, step=2, resumed_from=1, tier="disk", seconds=1.0, parts={})
        log.lead(True)
        log.step_metrics(step=3, **metrics)
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(item["phase"], item["data"]["step"]) for item in told] == [
        ("RECOVERY", 2), ("STEP", 2), ("EVAL_MODEL", 2), ("STEP", 3),
    ]  # fmt: skip
