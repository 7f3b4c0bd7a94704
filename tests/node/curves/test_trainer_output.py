"""Steps and losses of Hugging Face's Trainer: from what it prints, and from the files that it writes beside it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_curves import tfevents
from trainer_output import LOG_EVERY, STEPS, Recording, loss_at

from trainmaster.node.curves import Point
from trainmaster.node.curves.find import Curves
from trainmaster.node.curves.log_lines import LogLines

LOGGED = range(LOG_EVERY, STEPS + 1, LOG_EVERY)
TRUE = {step: pytest.approx(loss_at(step)) for step in LOGGED}
TRUE_HELD_OUT = {step: pytest.approx(loss_at(step) + 1) for step in (20, 40, 60)}


def losses(points: Sequence[Point], name: str = "loss") -> dict[int, float]:
    found = [(point.step, point.figures[name]) for point in points if name in point.figures]
    assert [step for step, _ in found] == sorted({step for step, _ in found}), "a step went back, or was told twice"
    return dict(found)


@pytest.mark.parametrize("drawn_every", [1, 7])
@pytest.mark.parametrize("seed", range(12))
def test_printed_dicts_have_the_step_of_the_training(drawn_every: int, seed: int, tmp_path: Path) -> None:
    """Not of an evaluation's bar, nor of `Writing model shards: 1/1`, nor of the bar as it was last drawn."""
    log, lot = tmp_path / "rank-0.log", random.Random(seed)
    data = Recording(drawn_every=drawn_every).train().encode()
    log.touch()
    reader, points = LogLines(log), list[Point]()
    while data:
        size = lot.choice((1, 3, 40, 700, 20_000)) if seed else len(data)
        with log.open("ab") as file:
            file.write(data[:size])
        data = data[size:]
        points += reader.read()
    points += reader.end()
    assert losses(points) == TRUE and losses(points, "eval_loss") == TRUE_HELD_OUT


def test_a_loss_is_told_with_the_redraw_after_it_and_not_a_step_later(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.touch()
    reader = LogLines(log)
    whole = Recording(drawn_every=1)
    log.write_text(whole.train(until=10))
    assert list(losses(reader.read())) == [5, 10]


def test_an_attempt_that_goes_on_has_its_own_steps(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(Recording(drawn_every=7, start=20).train())
    assert losses(LogLines(log).read()) == {step: loss for step, loss in TRUE.items() if step > 20}


@pytest.mark.parametrize(
    "text",
    [
        "\rMap: 100%|##########| 256/256 [00:01<00:00]\nloss 2.5\n",
        "\rDownloading: 40%|####      | 4/10 [00:01<00:00]\nloss 2.5\n",
        "\rEvaluating: 40%|####      | 4/10 [00:01<00:00, loss=2.5]\n",
        "\rEpoch 1 [val]: 40%|####      | 4/10 [00:01<00:00, loss=2.5]\n",
        "\r 90%|#########  | 9/10 [00:01<00:00]\n***** train metrics *****\n  train_loss               =     4.009\n",
    ],
)
def test_a_bar_of_something_else_is_no_step(text: str, tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(text)
    assert LogLines(log).read() == []


def test_a_bar_that_begins_anew_does_not_go_back(tmp_path: Path) -> None:
    """A second epoch is no repeated work."""
    log = tmp_path / "rank-0.log"
    log.write_text("".join(f"\r 4%|4 | {at}/4 [00:01<00:12, loss=0.5]" for at in (1, 2, 2, 3, 4, 1, 2)) + "\n")
    assert [point.step for point in LogLines(log).read()] == [1, 2, 2, 3, 4]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("trainmaster.node.curves.find.time.monotonic", lambda: now[0])
    return now


def scalars(rows: Sequence[dict[str, float]]) -> bytes:
    """As the Trainer's TensorBoard callback writes them."""
    named = [
        {name.replace("eval_", "eval/") if "eval_" in name else f"train/{name}": value for name, value in row.items()}
        for row in rows
    ]
    return tfevents([(int(row["step"]), values) for row, values in zip(rows, named, strict=True)])


@pytest.mark.parametrize("after", [0, 10, 35, 60], ids=lambda step: f"found after step {step}")
def test_tensorboard_takes_precedence_and_no_step_is_told_twice(after: int, tmp_path: Path, clock: list[float]) -> None:
    """A search for new files is due every 10 s: much may have been printed by then."""
    log, tracked = tmp_path / "rank-0.log", tmp_path / "runs" / "events.out.tfevents.1"
    log.touch()
    curves = Curves(log, [tmp_path], tmp_path / "events.jsonl")
    points: list[Point] = []
    whole = Recording(drawn_every=7)
    whole.train()
    tracked.parent.mkdir()
    for until in (10, 35, 60):
        part = Recording(drawn_every=7)
        log.write_text(part.train(until=until))
        if until > after or until == STEPS:
            tracked.write_bytes(scalars([row for row in whole.rows if row["step"] <= until]))
        for _ in range(4):
            clock[0] += 4
            points += curves.look()
    points += curves.look(last=True)
    assert curves.source == "tensorboard"
    assert losses(points) == TRUE and losses(points, "eval_loss") == TRUE_HELD_OUT


def save_state(folder: Path, rows: Sequence[dict[str, float]]) -> None:
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": list(rows)}))


def test_the_trainers_state_is_read_where_it_contradicts_the_printed_steps(tmp_path: Path, clock: list[float]) -> None:
    log = tmp_path / "rank-0.log"
    log.touch()
    curves = Curves(log, [tmp_path], tmp_path / "events.jsonl")
    log.write_text("\r 10%|# | 7/60 [00:01<00:12]\n{'loss': 3.9}\n")  # a callback of the script's own
    clock[0] += 1
    points = curves.look()
    clock[0] += 3
    points += curves.look()
    assert curves.source == "log" and list(losses(points)) == [7]
    rows = [{"loss": loss_at(step), "step": step} for step in (5, 10, 15, 20)]
    save_state(tmp_path / "checkpoint-20", rows)
    clock[0] += 20
    points += curves.look()
    assert curves.source == "trainer_state" and list(losses(points)) == [7, 10, 15, 20]


def test_the_printed_steps_go_on_beside_a_state_that_agrees(tmp_path: Path, clock: list[float]) -> None:
    """It is written at saves only."""
    log, points = tmp_path / "rank-0.log", list[Point]()
    log.touch()
    curves = Curves(log, [tmp_path], tmp_path / "events.jsonl")
    for until in (25, 60):
        part = Recording(drawn_every=7)
        log.write_text(part.train(until=until))
        rows = [row for row in part.rows if row["step"] <= until // 20 * 20]
        save_state(tmp_path / f"checkpoint-{until}", rows)
        for _ in range(3):
            clock[0] += 12
            points += curves.look()
    save_state(tmp_path / "end", part.rows)
    points += curves.look(last=True)
    assert curves.source == "log" and losses(points) == TRUE and losses(points, "eval_loss") == TRUE_HELD_OUT


def test_the_state_alone_has_no_mean_of_the_whole_training(tmp_path: Path, clock: list[float]) -> None:
    curves = Curves(tmp_path / "rank-0.log", [tmp_path], tmp_path / "events.jsonl")
    recording = Recording(drawn_every=1)
    recording.train()
    save_state(tmp_path / "out", recording.rows)
    points = curves.look(last=True)
    assert losses(points) == TRUE and losses(points, "eval_loss") == TRUE_HELD_OUT
