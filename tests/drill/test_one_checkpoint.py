"""Damage to a checkpoint: an older one is beside it, or the report says that the program keeps only one."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from trainmaster.core.results import Verdict
from trainmaster.core.spec import JobSpec
from trainmaster.drill import folders, plan, verdict
from trainmaster.drill.copies import Copies
from trainmaster.drill.lives import Timeline
from trainmaster.drill.plan import Strike
from trainmaster.drill.record import Attempt, Setup, Struck
from trainmaster.drill.starts import Starts

from .test_drill_parts import SHAPE, attempt, lines_of
from .test_judge import GROUND, REFERENCE, life, lines_from, resumes


@pytest.mark.parametrize(
    ("newest", "after"),
    [(5, 10), (10, 10), (30, 10), (35, None), (40, None)],
)
def test_one_more_save_is_done_and_the_next_one_not_begun(newest: int, after: int | None) -> None:
    """Saves after 5, 10, … 40: from 5 on, the one after 10 is done in the step that the one after 15 would follow."""
    assert plan.past_next_save(replace(SHAPE), newest) == after
    assert plan.past_next_save(replace(SHAPE, saves=(5, 10, 20)), 10) == 11


@pytest.mark.parametrize("kind", ["truncated", "flipped", "missing"])
@pytest.mark.parametrize("keeps_two", [True, False])
def test_nothing_is_damaged_before_a_second_checkpoint_was_saved(
    kind: str, keeps_two: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts(Setup(spec=JobSpec(name="x", command=("true",))), tmp_path, struck_since=0.0)
    saved = tmp_path / "struck/checkpoints/step-5.pt"
    saved.parent.mkdir(parents=True)
    saved.write_bytes(b"x" * 1000)
    (saved.parent / "config.json").write_bytes(b"x" * 400)  # no checkpoint to go back to
    os.utime(saved.parent / "config.json", (1, 1))
    timeline = Timeline(reference={0: REFERENCE}, savers=frozenset({0}))
    timeline.add("the start", [life(*lines_of(1, 8), saves=[5])])
    begun: list[tuple[str, object]] = []

    def start(_self: Starts, run: str, label: str, **more: object) -> Attempt:
        begun.append((label, more["steps"]))
        if label.startswith("resume after"):
            return attempt(*lines_from(5), codes=(-9,))
        folder = tmp_path / run / "checkpoints"
        if not keeps_two:
            (folder / "step-5.pt").unlink()
        (folder / "step-10.pt").write_bytes(b"y" * 1000)
        return replace(attempt(codes=(-9,), struck=True), lives=(life(*lines_of(6, 15), saves=[5]),))

    monkeypatch.setattr(Starts, "start", start)
    one = Copies(starts, replace(SHAPE, world=1), tmp_path).strike(Strike(name=kind, after=0), timeline)
    assert begun[0] == (f"one more save, for: {plan.STRIKES[kind]}", 10)
    if kind == "missing" and not keeps_two:
        assert one.skipped and len(begun) == 1
        begun.clear()
        shutil.rmtree(tmp_path / "struck-missing", ignore_errors=True)
        known = Copies(starts, replace(SHAPE, world=1, keeps_one=True), tmp_path)
        again = known.strike(Strike(name=kind, after=0), timeline)
        assert again.skipped == one.skipped and not begun, "no start is spent on what is known to be left out"
        return
    assert (one.damaged, one.older, one.newest) == ("checkpoints/step-10.pt", int(keeps_two), 10)
    assert verdict.damage(one, GROUND).verdict is Verdict.PASS and len(begun) == 2


@pytest.mark.parametrize(("newest", "struck"), [(35, True), (5, False)])
def test_without_a_second_checkpoint_nothing_is_known(
    newest: int, struck: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No save is left, or the program ended before it: INCOMPLETE, and no word on the program."""
    starts = Starts(Setup(spec=JobSpec(name="x", command=("true",))), tmp_path, struck_since=0.0)
    (tmp_path / "struck/checkpoints").mkdir(parents=True)
    (tmp_path / "struck/checkpoints/last.pt").write_bytes(b"x" * 1000)
    monkeypatch.setattr(Starts, "start", lambda *_, **__: attempt(*lines_from(newest), struck=struck))
    timeline = Timeline(reference={0: REFERENCE}, savers=frozenset({0}))
    timeline.add("the start", [life(*lines_of(1, newest + 1), saves=[newest])])
    one = Copies(starts, replace(SHAPE, world=1), tmp_path).strike(Strike(name="truncated", after=0), timeline)
    finding = verdict.damage(one, GROUND)
    assert (one.reached, finding.verdict) == (False, Verdict.ERROR)
    assert "with an older one beside it" in finding.reason and "two saves" in (finding.action or "")


@pytest.mark.parametrize(
    ("codes", "start", "outcome"), [((1,), None, Verdict.WARN), ((-9,), 0, Verdict.FAIL)]
)  # fmt: skip
def test_a_program_that_keeps_one_checkpoint_is_told_to_keep_two(
    codes: tuple[int, ...], start: int | None, outcome: Verdict
) -> None:
    lines = [] if start is None else lines_from(start)
    one = Struck(
        strike=Strike(name="truncated", after=0), reached=True, died_at=12, damaged="last.pt", newest=10, older=0,
        resumes=tuple(resumes(*lines)) if lines else (), branch=attempt(*lines, codes=codes),
    )  # fmt: skip
    finding = verdict.damage(one, GROUND)
    assert finding.verdict is outcome
    assert "keeps only one checkpoint, so there was none to go back to" in finding.reason
    assert (finding.action or "").startswith("keep at least two checkpoints")
    two = verdict.damage(replace(one, older=1), GROUND)
    assert two.verdict is outcome and "keeps only one" not in two.reason


def test_files_beside_a_checkpoint_are_none_to_go_back_to(tmp_path: Path) -> None:
    for at, (name, size) in enumerate((("config.json", 300), ("step-5.pt", 900), ("step-10.pt", 1000)), 1):
        (tmp_path / name).write_bytes(b"x" * size)
        os.utime(tmp_path / name, (at, at))
    found = folders.find_checkpoints([tmp_path], since=0.0)
    assert [one.files[0].name for one in folders.list_alike(found)] == ["step-10.pt", "step-5.pt"]
    assert folders.list_alike([]) == []
