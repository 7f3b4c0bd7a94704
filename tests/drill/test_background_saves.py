"""Saves in a thread of the program: which step they are of, and whether they were finished at a strike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainmaster.core.results import Verdict
from trainmaster.drill import judge, verdict
from trainmaster.drill.lives import Resume, Timeline
from trainmaster.drill.plan import Strike
from trainmaster.drill.record import Struck
from trainmaster.drill.witness_log import Line, Save

from .test_drill_parts import attempt
from .test_judge import GROUND, REFERENCE, life, line, lines_from, resumes


def in_the_background(*second: Line, died: int = 13) -> tuple[Timeline, list[Resume]]:
    """As `resumes`, with saves in a thread that ended less than 5 s before the strike."""
    timeline = Timeline(reference={0: REFERENCE}, savers=frozenset({0}))
    saves = tuple(Save(after=after, at=died - 0.5, path="/x", behind=True) for after in (5, 10))
    timeline.add("the start", [replace(life(*(line(step) for step in range(1, died + 1))), saves=saves)])
    return timeline, timeline.add("SIGKILL", [life(*second)])


def test_a_save_in_the_background_that_was_loaded_was_finished() -> None:
    timeline, found = in_the_background(*lines_from(10))
    assert [(one.newest, one.unsure, one.start) for one in found] == [(None, 10, 10)]
    assert judge.no_restart(found).verdict is Verdict.PASS
    assert judge.newest_used(found).values == {"lost": 2}
    assert timeline.newest() == 10, "what was loaded was whole"


def test_a_save_in_the_background_that_was_not_finished_is_told_with_what_to_do() -> None:
    timeline, found = in_the_background(*lines_from(0))
    for finding in (judge.no_restart(found), judge.newest_used(found)):
        assert finding.verdict is Verdict.ERROR
        assert "the save after step 10, in the background, was not certainly finished" in finding.reason
        assert "thread.join()" in (finding.action or "")
    assert timeline.newest() is None


def late(*after: int, start: int) -> tuple[Timeline, list[Resume]]:
    """A run with saves in the background that are heard of after these steps, long before the strike in step 30."""
    timeline = Timeline(reference={0: REFERENCE}, savers=frozenset({0}))
    saves = tuple(Save(after=step, at=float(step), path="/x", behind=True) for step in after)
    timeline.add("the start", [replace(life(*(line(step) for step in range(1, 31))), saves=saves)])
    return timeline, timeline.add("SIGKILL", [life(*lines_from(start))])


def test_a_save_in_the_background_is_of_a_step_before_its_end() -> None:
    """Of step 10, and heard of after step 13: a start at step 10 uses it."""
    timeline, (resume,) = late(13, 23, start=20)
    assert (resume.newest, resume.start) == (20, 20)
    assert judge.newest_used([resume]).verdict is Verdict.PASS
    assert timeline.newest() == 20
    older = judge.newest_used(late(13, 23, start=10)[1])
    assert older.verdict is Verdict.FAIL and "from step 10, although step 23 was saved" in older.reason
    assert judge.newest_used(late(20, 23, start=20)[1]).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("name", "lines", "outcome", "words"),
    [
        ("checkpoints/step-0012.pt", lines_from(10), Verdict.PASS, "noticed, went on from step 10"),
        ("checkpoints/step-0010.pt", lines_from(10), Verdict.FAIL, "loaded without a word"),
        ("checkpoints/last.pt", lines_from(10), Verdict.ERROR, "of step 12 or 10 is not known"),
        ("checkpoints/step-0012.pt", lines_from(12), Verdict.FAIL, "loaded without a word"),
        ("checkpoints/step-0012.pt", lines_from(5), Verdict.PASS, "noticed, went on from step 5"),
    ],
)
def test_a_damaged_checkpoint_may_be_a_save_in_the_background(
    name: str, lines: list[Line], outcome: Verdict, words: str
) -> None:
    """That after step 12 had ended just before, and the one after step 10 long before."""
    struck = Struck(
        strike=Strike(name="flipped", after=0), reached=True, died_at=12, resumes=tuple(resumes(*lines)),
        branch=attempt(*lines, codes=(-9,)), damaged=name, newest=10, unsure=12, older=1,
    )  # fmt: skip
    finding = verdict.damage(struck, GROUND)
    assert finding.verdict is outcome, finding
    assert words in finding.reason
    first = verdict.damage(replace(struck, newest=None), GROUND)  # no save is certainly whole
    assert (first.verdict, first.reason) == (finding.verdict, finding.reason) or lines == lines_from(5)
