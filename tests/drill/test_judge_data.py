"""Judgement of the data after a resume, where its order is not seeded or no DataLoader tells of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from trainmaster.core.results import Verdict
from trainmaster.drill import judge_data
from trainmaster.drill.ground import Ground
from trainmaster.drill.lives import Resume, Timeline
from trainmaster.drill.witness_log import Line

from .test_judge import GROUND, life, line, lines_from, resumes


def test_without_a_data_loader_the_weights_tell_of_the_data() -> None:
    ground = replace(GROUND, source=None)
    assert judge_data.data(resumes(*lines_from(10)), ground).verdict is Verdict.PASS
    other = lines_from(10, weights=lambda one, n: one.weights if n == 1 else f"x{n}")
    found = judge_data.data(resumes(*other), ground)
    assert (found.verdict, "the weights after SIGKILL are others" in found.reason) == (Verdict.ERROR, True)
    assert "drill.sample(ids)" in (found.action or "")
    follows = judge_data.data(resumes(*other), ground, failed=True)
    assert (follows.verdict, follows.action) == (Verdict.ERROR, "mend first what failed")
    unsure = judge_data.data(resumes(*other), replace(ground, repeatable=False), failed=True)
    assert "not repeatable enough" in unsure.reason


def test_a_resume_that_was_struck_again_in_its_first_step_leaves_the_data_to_be_shown_by_others() -> None:
    ground, short = replace(GROUND, source=None), resumes(*lines_from(10)[:1])
    found = judge_data.data([*short, *resumes(*lines_from(10))], ground)
    assert (found.verdict, found.reason.split(":")[0]) == (Verdict.PASS, "1 resume")
    alone = judge_data.data(short, ground)
    assert (alone.verdict, "too few steps" in alone.reason) == (Verdict.ERROR, True)


def unseeded(after: Sequence[tuple[str, int]], *, save: int = 10, killed: int = 13, length: int = 5) -> list[Resume]:
    """A run whose loader draws another order for each pass of so many steps; then (batch, its place) a step."""

    def one(step: int, batch: str, place: int) -> Line:
        return replace(line(step), batches=(("data", batch),), places=(place,))

    own = [one(step, f"own{step}", (step - 1) % length + 1) for step in range(1, killed + 1)]
    timeline = Timeline(reference={0: {}}, savers=frozenset({0}))
    timeline.add("the start", [life(*own, saves=[save])])
    found = timeline.add("SIGKILL", [life(*(one(save + n, *read) for n, read in enumerate(after, 1)))])
    assert [resume.start for resume in found] == [save]
    return found


NO_ORDER = replace(GROUND, data=False, told=False)


@pytest.mark.parametrize(
    ("save", "after", "verdict", "words"),
    [
        (10, [("x1", 1), ("x2", 2), ("x3", 3)], Verdict.PASS, "order of their own"),
        (12, [("own13", 3), ("x", 4), ("y", 5)], Verdict.PASS, "1 steps read the batches that the run had read"),
        (12, [("x1", 1), ("x2", 2), ("x3", 3)], Verdict.ERROR, "another order"),
        (12, [("x1", 3), ("x2", 4), ("x3", 5)], Verdict.ERROR, "another order"),
        # So few may be drawn by chance.
        (10, [("own6", 1), ("own7", 2), ("own8", 3)], Verdict.PASS, "order of their own"),
        (10, [("own11", 1), ("x2", 2), ("x3", 3)], Verdict.PASS, "1 resume began a pass"),
        (10, [("own11", 1), ("x2", 1), ("x3", 2)], Verdict.ERROR, "another order"),
        (12, [("own12", 2), ("own13", 3)], Verdict.ERROR, "another order"),
    ],
)  # fmt: skip
def test_where_two_undisturbed_runs_read_in_another_order_only_the_runs_own_order_tells(
    save: int, after: Sequence[tuple[str, int]], verdict: Verdict, words: str
) -> None:
    finding = judge_data.data(unseeded(after, save=save), NO_ORDER)
    assert finding.verdict is verdict, finding
    assert words in finding.reason
    if verdict is not Verdict.FAIL:
        assert "two undisturbed runs read the samples in another order" in finding.reason


@pytest.mark.parametrize(
    ("save", "after", "words"),
    [
        (20, range(11, 21), "10 batches were read a second time"),  # the pass before, and then another one
        (20, range(22, 27), "1 batches were skipped"),  # as far as the run had read
        (21, range(21, 26), "1 batches were read a second time"),
    ],
)
def test_batches_that_the_run_had_read_elsewhere_are_a_wrong_place(save: int, after: range, words: str) -> None:
    begin = (save - 20) % 10
    read = [(f"own{step}", begin + at) for at, step in enumerate(after, 1)] + [("x1", 1), ("x2", 2)]
    finding = judge_data.data(unseeded(read, save=save, killed=26, length=10), NO_ORDER)
    assert (finding.verdict, words in finding.reason) == (Verdict.FAIL, True), finding


@pytest.mark.slow
@pytest.mark.parametrize("length", [5, 8, 20])
def test_small_data_that_are_drawn_anew_fail_no_right_resume(length: int) -> None:
    def drawn(dice: random.Random) -> list[tuple[str, int]]:
        return [(f"sample{one}", place) for place, one in enumerate(dice.sample(range(length), length), 1)]

    for seed in range(200):
        dice, begin = random.Random(seed), 3 * length
        read = [one for _ in range(4) for one in drawn(dice)][: begin + 3]
        own = {
            step: replace(line(step), batches=(("data", one),), places=(at,)) for step, (one, at) in enumerate(read, 1)
        }
        after = [replace(line(1), batches=(("data", one),), places=(at,)) for one, at in drawn(dice)]
        found = [
            replace(one, start=begin, newest=begin, own=own, reference=own, lines=tuple(after))
            for one in resumes(*lines_from(10))
        ]
        finding = judge_data.data(found, NO_ORDER)
        assert finding.verdict is Verdict.PASS, (seed, finding)


def accumulated(held: Sequence[int], after: Sequence[int], **of_ground: bool) -> tuple[Resume, Ground]:
    """Four micro-batches a step and six a pass, drawn anew: places in step 8 before the kill and after the resume."""

    def one(step: int, word: str, places: Sequence[int]) -> Line:
        return replace(
            line(step),
            batches=tuple(("data", f"{word}{step}.{at}") for at in range(len(places))),
            places=tuple(places),
        )

    reference = {step: one(step, "other", [1, 2, 3, 4]) for step in range(1, 10)}
    own = {step: one(step, "own", held if step == 8 else [1, 2, 3, 4]) for step in range(1, 10)}
    timeline = Timeline(reference={0: reference}, savers=frozenset({0}))
    timeline.add("the start", [life(*own.values(), saves=[7])])
    (found,) = timeline.add("SIGKILL", [life(one(8, "new", after), *lines_from(8, weights="x")[:2])])
    assert found.base == 7
    return found, replace(NO_ORDER, **of_ground)


@pytest.mark.parametrize(
    ("held", "after", "of_ground", "data", "micro", "words"),
    [
        # Saved at the end of a pass without the gradients of its last two.
        ([5, 6, 1, 2], [1, 2], {}, Verdict.ERROR, Verdict.FAIL, "made of 2 micro-batches of 4"),
        ([5, 6, 1, 2], [1, 2, 3, 4], {}, Verdict.ERROR, Verdict.ERROR, "whether gradients were lost is not known"),
        ([5, 6, 1, 2], [1, 2], {"counts": False}, Verdict.ERROR, Verdict.ERROR, "made of 2 batches, and of 4 before"),
        # The last two of each pass may be left out: then nothing of them was lost.
        ([5, 6, 1, 2, 3, 4], [1, 2, 3, 4], {}, Verdict.ERROR, Verdict.ERROR, "whether gradients were lost"),
        ([1, 2, 3, 4], [1, 2, 3, 4], {}, Verdict.PASS, Verdict.PASS, "made of all 4"),
        ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 1, 2, 3, 4], {}, Verdict.PASS, Verdict.PASS, "made of all 4"),
    ],
)  # fmt: skip
def test_a_step_over_the_end_of_a_pass_that_is_made_of_fewer_lost_gradients(
    held: Sequence[int], after: Sequence[int], of_ground: dict[str, bool], data: Verdict, micro: Verdict, words: str
) -> None:
    found, ground = accumulated(held, after, **of_ground)
    finding = judge_data.accumulation([found], ground)
    assert (finding.verdict, words in finding.reason) == (micro, True), finding
    assert finding.verdict is Verdict.PASS or finding.action
    assert judge_data.data([found], ground).verdict is data


def test_what_is_left_of_a_pass_is_the_same_where_the_next_one_is_drawn_anew_in_one_step() -> None:
    found, ground = accumulated([5, 6, 1, 2], [1, 2, 1, 2])  # a sampler that leaves out what was read
    own = found.own[8].batches
    right = replace(found.lines[0], batches=own[:2] + found.lines[0].batches[2:])
    found = replace(found, lines=(right, *found.lines[1:]))
    assert judge_data.accumulation([found], ground).verdict is Verdict.PASS
    assert judge_data.data([found], ground).verdict is Verdict.PASS


def test_micro_batches_of_a_step_that_the_run_had_not_read_before_are_not_called_whole() -> None:
    found, ground = accumulated([1, 2, 3, 4], [1, 2, 3, 4])
    finding = judge_data.accumulation([replace(found, own={})], ground)
    assert (finding.verdict, "not judged" in finding.reason) == (Verdict.ERROR, True)


def test_samples_in_one_order_are_asked_of_a_resume_where_their_batches_are_augmented() -> None:
    ground = replace(GROUND, data=False, ids=True)
    found = [
        replace(one, own={}, reference={11: replace(line(11), ids="a")}) for one in resumes(*lines_from(10, ids="b"))
    ]
    assert judge_data.data(found, ground).verdict is Verdict.FAIL


def told(order: Sequence[int], *, first: int, last: int) -> dict[int, Line]:
    """Steps of two samples each, told by the program."""
    parts = {step: tuple(f"i{one}" for one in order[2 * (step - 1) : 2 * step]) for step in range(first, last + 1)}
    return {step: replace(line(step), batches=(), ids="+".join(part), samples=part) for step, part in parts.items()}


@pytest.mark.parametrize(
    ("after", "verdict", "words"),
    [
        ([5, 3, 1, 0, 2, 4], Verdict.PASS, "each sample once"),  # the rest of its pass, and another one
        ([9, 8, 7, 6, 5, 4], Verdict.FAIL, "4 samples a second time in one pass through the data, which reads 10"),
        ([5, 3], Verdict.ERROR, "another order"),  # its pass was not read to the end
    ],
)
def test_samples_that_are_told_are_read_once_in_a_pass(after: list[int], verdict: Verdict, words: str) -> None:
    reference = told([*range(10), *range(9, -1, -1), *range(10)], first=1, last=15)
    own = told([*range(10), 9, 8, 7, 6, 4, 5, 0, 1], first=1, last=9)  # saved after step 7: four of the second pass
    timeline = Timeline(reference={0: reference}, savers=frozenset({0}))
    timeline.add("the start", [life(*own.values(), saves=[7])])
    second = told([*[0] * 14, *after], first=8, last=7 + len(after) // 2)
    found = timeline.add("SIGKILL", [life(*second.values())])
    finding = judge_data.data(found, replace(NO_ORDER, ids=True, source=None))
    assert (finding.verdict, words in finding.reason) == (verdict, True), finding


def test_no_step_that_the_run_had_read_before_shows_nothing_of_an_order() -> None:
    finding = judge_data.data([replace(one, own={}) for one in unseeded([("x", 1)])], NO_ORDER)
    assert finding.verdict is Verdict.ERROR and "seed the shuffle" in (finding.action or "")


def test_resumes_that_are_not_compared_with_an_order_are_not_counted() -> None:
    (known,) = unseeded([("x1", 1), ("x2", 2)])
    finding = judge_data.data([known, replace(known, own={})], NO_ORDER)
    assert (finding.verdict, finding.reason[:9]) == (Verdict.PASS, "1 resume:")


def test_samples_that_differ_between_undisturbed_runs_are_not_asked_of_a_resume() -> None:
    ids = replace(NO_ORDER, ids=True)
    told = [replace(one, own={11: replace(line(11), ids="a")}) for one in resumes(*lines_from(10, ids="a"))]
    assert judge_data.data(told, ids).verdict is Verdict.PASS
    assert (
        judge_data.data([replace(one, own={11: replace(line(11), ids="b")}) for one in told], ids).verdict
        is Verdict.ERROR
    )
