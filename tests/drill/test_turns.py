"""Which optimizer's steps are those of the run: what a program with several of them is seen to do."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core.results import Overall, Verdict
from trainmaster.drill import judge, losses, plan, verdict, witness_log
from trainmaster.drill.lives import Resume, Timeline
from trainmaster.drill.witness_log import Life

from .test_drill_parts import SHAPE, attempt, lines_of, proof_of
from .test_judge import life, line


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(plan.__file__).parent / "inject"))
    yield importlib.import_module("trainmaster_turns").Turns()
    del sys.modules["trainmaster_turns"]


class Optimizer:
    """As one of torch: it can be referred to weakly."""


def witness(
    turns: Any,
    folder: Path,
    steps: Sequence[str],
    *,
    forget: Sequence[str] = (),
    begin: int = 0,
    without: str = "",
    empty: str = "",
    ended: bool = False,
) -> Life:
    """What is read of these steps. `+`: a save; `forget`: optimizers that the program drops when another one steps.

    `begin`: the steps before were done by another process; `without`, `empty`: optimizers whose weights, and whose
    state, are not theirs.
    """
    live: dict[str, Optimizer] = {}
    lines, number, done = [], 0, {name: list(steps[:begin]).count(name) for name in steps}
    for name in steps[begin:]:
        if name == "+":
            lines.append({"k": "save", "n": number, "t": 1.0, "path": "/p", "r": 0})
            continue
        for old in set(live) & set(forget) - {name}:
            del live[old]
        optimizer = live.setdefault(name, Optimizer())
        number += turns.take(optimizer)
        done[name] += 1
        if turns.is_looked_at(turns.number(optimizer)):
            lines.append({
                "k": "step", "n": number, "o": turns.number(optimizer), "r": 0, "w": 1, "t": 1.0, "lr": [0.1],
                "p": f"{name}{done[name]}" + "x" * (name in without), "g": {}, "b": [],
                "s": "empty" if name in empty else f"s{name}{done[name]}",
            })  # fmt: skip
        del optimizer
    (folder / "7.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (life,) = witness_log.read(folder, ended=ended)
    assert life.missed == 0
    return life


def every(cycle: Callable[[int], str], many: int, save: int) -> list[str]:
    """Steps of so many cycles, saved after every `save`th."""
    return [name for at in range(many) for name in (*cycle(at), *"+" * ((at + 1) % save == 0))]


VPG = every(lambda _: "P" + "V" * 80, 8, 1)
CRITIC = every(lambda at: "G" + "DD" * (at >= 5), 40, 5)
BEFORE = every(lambda at: "X" * 10 * (at > 0 and at % 20 == 0) + "M", 100, 20)
HEAD = every(lambda at: "A" if at < 21 else "B", 40, 4)
IN_TURN = every(lambda at: "A" if at // 5 % 2 == 0 else "B", 40, 4)


def resume(turns: Any, folder: Path, steps: list[str], *, save: int, more: int = 999, **changes: Any) -> Resume:
    """Of a run of these steps that was killed three steps after its save of this number, before the next."""
    at, following = [place for place, name in enumerate(steps, 1) if name == "+"][save : save + 2]
    seen = witness(turns, folder, steps, ended=True)
    timeline = Timeline(reference={0: dict(enumerate(seen.lines, 1))}, savers=frozenset({0}))
    timeline.add("the start", [witness(type(turns)(), folder, steps[: min(at + 3, following - 1)])])
    again = witness(type(turns)(), folder, steps[: at + more], begin=at, **changes)
    (found,) = timeline.add("SIGKILL", [again])
    # Once more, from the next save of the resumed process: its steps are now the run's own.
    later = [place for place, name in enumerate(steps, 1) if name == "+" and at < place < min(at + more, len(steps))]
    if later and not changes:
        (second,) = timeline.add("SIGKILL", [witness(type(turns)(), folder, steps, begin=later[-1])])
        assert judge.weights([second]).verdict is Verdict.PASS
        assert second.start is not None and second.start > found.base
    return found


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("save", [0, 2, 3])
@pytest.mark.parametrize("steps", [VPG, CRITIC[:75], CRITIC, BEFORE, HEAD, IN_TURN])
def test_a_right_resume_has_the_steps_of_the_run_however_it_begins(
    turns: Any, tmp_path: Path, steps: list[str], save: int
) -> None:
    """Which optimizer's steps count was seen from the first step of the process on."""
    found = resume(turns, tmp_path, steps, save=save)
    judged = (judge.weights([found]), judge.optimizer([found]), judge.newest_used([found]))
    assert [one.verdict for one in judged] == [Verdict.PASS] * 3, judged
    for number, one in enumerate(found.lines, 1):
        assert one.weights == found.reference[found.base + number].weights
    assert found.base + len(found.lines) == max(found.reference)
    short = resume(type(turns)(), tmp_path, steps, save=save, more=2)  # it was killed in a step of the run
    assert judge.weights([short]).verdict is Verdict.PASS


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("seed", range(24))
def test_a_right_resume_of_a_program_of_any_rhythm_passes(turns: Any, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    rhythm = [
        (name, dice.choice([1, 2, 3]), dice.choice([1, 1, 2, 5]), dice.choice([0, 0, 3, 7]))
        for name in "GDE"[: dice.choice([2, 3])]
    ]

    def cycle(at: int) -> str:
        return "".join(name * many for name, many, each, late in rhythm if at % each == 0 and at >= late) or "G"

    steps = every(cycle, 40, dice.choice([1, 3, 4, 5]))
    found = resume(turns, tmp_path, steps, save=dice.randrange(steps.count("+") - 2), more=dice.choice([5, 999]))
    judged = (judge.weights([found]), judge.optimizer([found]), judge.newest_used([found]))
    assert [one.verdict for one in judged] == [Verdict.PASS] * 3, (judged, rhythm)
    assert all(one.weights == found.reference[found.base + at].weights for at, one in enumerate(found.lines, 1))


@pytest.mark.parametrize(
    ("steps", "changes"),
    [
        (VPG, {"without": "P"}),
        (VPG, {"without": "V"}),
        (VPG, {"without": "PV"}),
        (CRITIC, {"without": "D"}),
        (CRITIC, {"without": "G"}),
        (HEAD, {"without": "AB"}),
    ],
)
def test_weights_of_one_of_several_optimizers_that_are_not_loaded_fail(
    turns: Any, tmp_path: Path, steps: list[str], changes: Any
) -> None:
    found = resume(turns, tmp_path, steps, save=4, **changes)
    wrong = [at for at, one in enumerate(found.lines, 1) if one.weights != found.reference[found.base + at].weights]
    assert (judge.weights([found]).verdict is Verdict.FAIL) == (1 in wrong) and min(wrong) <= 2
    empty = resume(type(turns)(), tmp_path, steps, save=4, empty=changes["without"])
    assert found.newest == empty.newest == empty.start
    assert judge.optimizer([empty]).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("steps", "seen"),
    [
        ("A A B B B", "A1 A2 B1 B2 B3"),
        ("G D G D G D", "G1+D1 G2+D2 G3+D3"),
        ("G D D G D D G D D", "G1+D1+D2 G2+D3+D4 G3+D5+D6"),
        ("D D D G D D D G D D D G", "D1 D2 D3+G1 D4 D5 D6+G2 D7 D8 D9+G3"),
        ("G G G D G D G D", "G1 G2 G3+D1 G4+D2 G5+D3"),
        ("A A B B C C", "A1 A2 B1 B2 C1 C2"),
        ("G D G D g d g d g d", "G1+D1 G2+D2 g1+d1 g2+d2 g3+d3"),
        ("G D D G D D D D G D D D D", "G1+D1+D2 G2+D3+D4+D5+D6 G3+D7+D8+D9+D10"),
        ("G D G D D D D", "G1+D1 G2+D2 D3 D4 D5"),
    ],
)
@pytest.mark.parametrize("kept", [True, False])
def test_every_step_of_the_run_is_seen_once(turns: Any, tmp_path: Path, steps: str, seen: str, kept: bool) -> None:
    """`kept`: the program keeps the optimizers that it no longer steps; they are gone otherwise."""
    gone = [] if kept else ["A", "B"]
    life = witness(turns, tmp_path, steps.split(), forget=gone)
    assert " ".join(line.weights for line in life.lines) == seen


def test_a_save_of_the_second_optimizer_is_after_its_step(turns: Any, tmp_path: Path) -> None:
    """It was one after the last step of the first, for as long as it was not sure that this one would not step."""
    life = witness(turns, tmp_path, "A A + B + B + B".split())
    assert [save.after for save in life.saves] == [2, 3, 4]


@pytest.mark.parametrize(("steps", "seen"), [("A A B", "A1"), ("A A B +", "A1 A2+B1"), ("G D G D G", "G1+D1 G2+D2")])
def test_a_step_that_the_process_was_killed_in_is_left_out(turns: Any, tmp_path: Path, steps: str, seen: str) -> None:
    life = witness(turns, tmp_path, steps.split())
    assert " ".join(line.weights for line in life.lines) == seen


def test_the_last_step_of_a_run_that_ended_is_seen_though_it_is_a_short_one(turns: Any, tmp_path: Path) -> None:
    steps = every(lambda at: "GD" if at % 2 else "G", 9, 4)
    life = witness(turns, tmp_path, steps, ended=True)
    assert [line.weights for line in life.lines][-2:] == ["G8+D4", "G9"]


def test_of_many_optimizers_of_one_step_some_are_looked_at(turns: Any, tmp_path: Path) -> None:
    """One for each parameter; and one made anew for each epoch is looked at, however many there were."""
    many = [f"O{number}" for number in range(20)] * 3
    life = witness(turns, tmp_path, many)
    assert [line.weights.count("+") for line in life.lines] == [7, 7, 7]


def test_an_optimizer_made_anew_in_every_epoch_is_looked_at(turns: Any, tmp_path: Path) -> None:
    epochs = [f"E{number}" for number in range(12) for _ in range(3)]
    assert len(witness(turns, tmp_path, epochs).lines) == 36


def test_more_losses_than_steps_that_were_seen_pass_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a run was not looked at, and it passed."""
    printed = {step: 1.0 / step for step in range(1, 81)}
    run = attempt(*lines_of(1, 40), losses=printed)
    alone = [replace(line, batches=line.batches[:1]) for line in lines_of(1, 40)]
    half = replace(run, lives=(replace(run.lives[0], lines=tuple(alone)),))
    assert losses.judge_seen([run]) is None, "two batches a step, each printed"
    finding = losses.judge_seen([run, half])
    assert finding is not None and finding.verdict is Verdict.ERROR
    assert "printed losses of 80 steps, and the witness saw 40 optimizer steps" in finding.reason
    assert losses.judge_seen([replace(half, losses=dict.fromkeys(range(43), 1.0)), attempt()]) is None
    found = verdict.judge_all(
        half, half, SHAPE, struck=[], attempts=[], resumes=[], planned=[], reached=40
    )  # fmt: skip
    assert found[0] == ("witness", finding)
    whole = proof_of(lines_of(11, 40))
    monkeypatch.setattr(losses, "judge_seen", lambda _: finding)
    assert (whole.overall, proof_of(lines_of(11, 40)).overall) == (Overall.PASS, Overall.INCOMPLETE)


def test_a_step_of_a_critic_that_was_killed_before_the_other_stepped_is_left_out() -> None:
    """Its line was taken for a step with half of the weights."""
    names = ["d1", "d2", "d3+g1", "d4", "d5", "d6+g2", "d7", "d8", "d9+g3"]
    reference = {step: replace(line(step), weights=name) for step, name in enumerate(names, 1)}
    timeline = Timeline(reference={0: reference}, savers=frozenset({0}))
    killed = [*(reference[step] for step in range(1, 6)), replace(line(6), weights="d6")]
    timeline.add("the start", [life(*killed, saves=[3])])
    assert (timeline.clean, timeline.done, max(timeline.history[0])) == (True, 4, 5)
    second = [*(reference[step] for step in range(4, 9)), replace(line(9), weights="d9")]
    (found,) = timeline.add("SIGKILL", [life(*second)])
    assert (found.start, [one.weights for one in found.lines]) == (3, ["d4", "d5", "d6+g2", "d7", "d8"])
