"""Judgements of a drill of any program, on recorded lines: every fault of a resume has a signature of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from trainmaster.core.results import Finding, Verdict
from trainmaster.drill import judge, judge_data
from trainmaster.drill.ground import Ground
from trainmaster.drill.lives import Resume, Timeline
from trainmaster.drill.witness_log import Life, Line, Save

GROUND = Ground(repeatable=True, random=frozenset({"torch"}), data=True, source="data", ids=False)
EVERY, STEPS = 5, 40


def line(step: int, *, rank: int = 0, at: float | None = None) -> Line:
    """The line of an undisturbed run; two micro-batches a step."""
    return Line(
        at=float(step) if at is None else at,
        rates=(0.1 / step,),
        weights=f"w{step}",
        state=f"s{step}" if step > 1 else None,
        random={"torch": f"r{step}", "python": f"noise{rank}"},
        batches=(("data", f"b{step}a"), ("data", f"b{step}b")),
    )


REFERENCE = {step: line(step) for step in range(1, STEPS + 1)}


def life(*lines: Line, rank: int = 0, world: int = 1, saves: Sequence[int] = ()) -> Life:
    return Life(
        pid=1,
        rank=rank,
        world=world,
        lines=lines,
        saves=tuple(Save(after=after, at=lines[after - 1].at, path="/x") for after in saves),
    )


def resumes(*second: Line, died: int = 13) -> list[Resume]:
    """A run that saved after 5 and 10, was killed in step 13, and went on with these lines."""
    timeline = Timeline(reference={0: REFERENCE}, savers=frozenset({0}))
    first = life(*(line(step) for step in range(1, died + 1)), saves=[5, 10])
    assert timeline.add("the start", [first]) == []
    return timeline.add("SIGKILL", [life(*second)])


def lines_from(step: int, **changes: object) -> list[Line]:
    """Steps after `step`, as undisturbed but for changes: a value, or a function of the line and its number."""
    made = []
    for number, one in enumerate((line(at) for at in range(step + 1, step + 7)), 1):
        values = {name: value(one, number) if callable(value) else value for name, value in changes.items()}
        made.append(replace(one, **values))  # type: ignore[arg-type]
    return made


CLAIMS: dict[str, Callable[[list[Resume]], Finding]] = {
    "start": judge.no_restart,
    "lost": judge.newest_used,
    "weights": judge.weights,
    "optimizer": judge.optimizer,
    "buffers": lambda found: judge.buffers(found, replace(GROUND, buffers=True)),
    "schedule": judge.schedule,
    "random": lambda found: judge.random_state(found, GROUND),
    "data": lambda found: judge_data.data(found, GROUND),
    "accumulation": lambda found: judge_data.accumulation(found, GROUND),
}


def batches_of(step: int) -> tuple[tuple[str, str], ...]:
    return line(step).batches


def shifted(by: int) -> Callable[[Line, int], object]:
    """Batches of a stream that is so many micro-batches ahead."""
    flat = [batch for step in sorted(REFERENCE) for batch in REFERENCE[step].batches]
    return lambda _, number: tuple(flat[2 * (10 + number - 1) + by : 2 * (10 + number) + by])


CASES: dict[str, tuple[list[Line], dict[str, str]]] = {
    "healthy": (lines_from(10), {}),
    "step 0": (lines_from(0), {"start": "began at step 0, although step 10 was saved"}),
    "an older checkpoint": (lines_from(5), {"lost": "from step 5, although step 10 was saved"}),
    "no weights": (
        lines_from(10, weights=lambda _, number: f"other{number}"),
        {"weights": "none that the run had at step 10"},
    ),
    "no optimizer state": (lines_from(10, state=lambda one, n: None if n == 1 else one.state), {"optimizer": "empty"}),
    "no optimizer state, and with it the learning rate of one step": (
        lines_from(
            10,
            state=lambda one, n: None if n == 1 else one.state,
            rates=lambda one, n: (0.1,) if n == 1 else one.rates,
        ),
        {"optimizer": "empty"},
    ),
    "another optimizer state": (lines_from(10, state=lambda _, n: f"x{n}"), {"optimizer": "another one"}),
    "the schedule begins anew": (
        lines_from(10, rates=lambda _, number: REFERENCE[number].rates),
        {"schedule": "that of step 1: the schedule began anew"},
    ),
    "the schedule begins anew a step later": (
        lines_from(10, rates=lambda one, number: one.rates if number == 1 else (0.1,)),
        {"schedule": "the learning rate of step 12 is 0.1"},
    ),
    "the schedule is a step behind": (
        lines_from(10, rates=lambda _, number: REFERENCE[10 + number - 1].rates),
        {"schedule": "that of step 10: the schedule is 1 step behind"},
    ),
    "the schedule is a step ahead, from the second step on": (
        lines_from(10, rates=lambda one, number: one.rates if number == 1 else REFERENCE[10 + number + 1].rates),
        {"schedule": "that of step 13: the schedule is 1 step ahead"},
    ),
    "no random state": (
        lines_from(
            10,
            random=lambda _, n: {"torch": f"x{n}"},
            weights=lambda one, n: one.weights if n == 1 else f"x{n}",
        ),
        {"random": "the random state of torch"},
    ),
    "data from the beginning": (
        lines_from(10, batches=lambda _, number: batches_of(number)),
        {"data": "data began anew"},
    ),
    "data skipped": (lines_from(10, batches=shifted(4)), {"data": "4 batches were skipped"}),
    "data read twice": (lines_from(10, batches=shifted(-4)), {"data": "4 batches were read a second time"}),
    "another order": (
        lines_from(10, batches=lambda _, n: (("data", f"x{n}"), ("data", f"y{n}"))),
        {"data": "the shuffle is another one"},
    ),
    "half a step": (
        lines_from(
            10,
            batches=lambda one, number: one.batches[1:] if number == 1 else one.batches,
            random=lambda _, n: {"torch": f"x{n}"},
            weights=lambda one, n: one.weights if n == 1 else f"x{n}",
        ),
        {"accumulation": "1 micro-batches of 2"},
    ),
    "in the middle of a step": (
        lines_from(10, batches=shifted(1), weights=lambda one, n: one.weights if n == 1 else f"x{n}"),
        {"accumulation": "were lost"},
    ),
    "what a pass leaves out is not read again": (
        lines_from(10, batches=lambda one, number: one.batches[1:] if number == 1 else one.batches),
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_fault_is_named_and_no_other(case: str) -> None:
    lines, wanted = CASES[case]
    found = {name: claim(resumes(*lines)) for name, claim in CLAIMS.items()}
    failed = {name: finding.reason for name, finding in found.items() if finding.verdict is Verdict.FAIL}
    assert list(failed) == list(wanted), failed
    for name, words in wanted.items():
        assert words in failed[name]
        assert found[name].action


def test_what_is_read_over_to_come_to_the_place_is_no_other_data() -> None:
    skipped = tuple(batch for step in range(1, 11) for batch in batches_of(step))
    lines = lines_from(10, batches=lambda one, number: skipped + one.batches if number == 1 else one.batches)
    found = resumes(*lines)
    assert judge_data.data(found, GROUND).verdict is Verdict.PASS
    assert judge_data.accumulation(found, GROUND).verdict is Verdict.PASS


def read_ahead(lines: Sequence[Line], *, first: int) -> list[Line]:
    """The same as a loader tells that reads one batch ahead: `first` is how many it has read before the first step."""
    flat = [batch for one in REFERENCE.values() for batch in one.batches]
    at = flat.index(lines[0].batches[0])
    cuts = [at + 2 - (first - 1), *(at + 3 + 2 * number for number in range(len(lines)))]
    cuts[0] = cuts[1] - first
    return [replace(one, batches=tuple(flat[a:b])) for one, a, b in zip(lines, cuts, cuts[1:], strict=False)]


@pytest.mark.parametrize(("first", "verdict"), [(3, Verdict.PASS), (2, Verdict.FAIL)])
def test_micro_batches_are_counted_where_a_loader_reads_ahead(first: int, verdict: Verdict) -> None:
    whole = read_ahead(list(REFERENCE.values()), first=3)
    reference = dict(enumerate(whole, 1))
    timeline = Timeline(reference={0: reference}, savers=frozenset({0}))
    timeline.add("the start", [life(*whole[:13], saves=[5, 10])])
    second = [replace(one, weights=f"{one.weights}x" if n and first == 2 else one.weights) for n, one in
              enumerate(read_ahead(lines_from(10), first=first))]  # fmt: skip
    finding = judge_data.accumulation(timeline.add("SIGKILL", [life(*second)]), GROUND)
    assert finding.verdict is verdict
    if verdict is Verdict.FAIL:
        assert "step 11 was made of 1 micro-batches of 2" in finding.reason


def test_a_random_state_that_moves_no_weight_is_told_and_not_failed() -> None:
    finding = judge.random_state(resumes(*lines_from(10, random={"torch": "x"})), GROUND)
    assert finding.verdict is Verdict.PASS
    assert "torch differs, without effect" in finding.reason


def test_a_run_struck_again_in_its_first_step_fails_no_random_state_that_others_show_to_be_of_no_effect() -> None:
    after = lines_from(10, random={"torch": "x"})
    whole, short = resumes(*after), resumes(after[0])
    moved = resumes(*lines_from(10, random={"torch": "x"}, weights="y"))
    assert judge.random_state([*short, *whole], GROUND).verdict is Verdict.PASS
    assert judge.random_state([*short, *moved], GROUND).verdict is Verdict.FAIL
    assert judge.random_state(short, GROUND).verdict is Verdict.FAIL  # nothing tells that it is of no effect


def test_random_states_are_not_passed_where_a_resume_began_with_another_one_that_nobody_can_judge() -> None:
    """An earlier fault changed the run, and it was struck before the step after the save: only the plan is known."""
    known = resumes(*lines_from(10))
    late = replace(resumes(*lines_from(10, random={"torch": "r1"}))[0], own={}, clean=False)
    finding = judge.random_state([*known, late], GROUND)
    assert finding.verdict is Verdict.ERROR
    assert "not judged" in finding.reason and "1 of 2 resumes" in finding.reason
    same = replace(resumes(*lines_from(10))[0], own={}, clean=False)
    assert judge.random_state([*known, same], GROUND).verdict is Verdict.PASS


def test_generators_that_nobody_seeds_are_not_judged() -> None:
    ground = replace(GROUND, random=frozenset())
    assert judge.random_state(resumes(*lines_from(10, random={})), ground).verdict is Verdict.SKIP


@pytest.mark.parametrize(
    ("before", "after", "repeatable", "verdict"),
    [
        ("u", "u", True, Verdict.PASS),
        ("u", "began anew", True, Verdict.FAIL),
        ("u", "began anew", False, Verdict.SKIP),
        ("", "", True, Verdict.SKIP),
        (None, None, True, Verdict.SKIP),
    ],
)
def test_buffers_are_those_that_the_run_had(
    before: str | None, after: str | None, repeatable: bool, verdict: Verdict
) -> None:
    found = [
        replace(one, own={11: replace(line(11), buffers=before)}) for one in resumes(*lines_from(10, buffers=after))
    ]
    finding = judge.buffers(found, replace(GROUND, buffers=repeatable))
    assert finding.verdict is verdict
    assert ("not looked at" in finding.reason) == (before is None)


def test_buffers_that_each_rank_has_of_its_own_and_rank_0_saves_for_all_have_a_fix_of_their_own() -> None:
    def on(rank: int, *, before: str, after: str) -> list[Resume]:
        found = resumes(*lines_from(10, buffers=after))
        return [replace(one, rank=rank, own={11: replace(line(11), buffers=before)}) for one in found]

    ground = replace(GROUND, buffers=True)
    finding = judge.buffers([*on(0, before="u0", after="u0"), *on(1, before="u1", after="u0+")], ground)
    assert finding.verdict is Verdict.FAIL
    assert "buffers of rank 1" in finding.reason and "although those of rank 0 are" in finding.reason
    assert "broadcast_buffers=True" in (finding.action or "")
    none = judge.buffers([*on(0, before="u0", after="x"), *on(1, before="u1", after="x")], ground)
    assert "model.state_dict(), not only model.parameters()" in (none.action or "")


def test_what_was_not_seen_never_passes() -> None:
    assert {claim([]).verdict for claim in CLAIMS.values()} == {Verdict.ERROR}


def test_before_any_save_step_0_is_right() -> None:
    timeline = Timeline(reference={0: REFERENCE}, savers=frozenset({0}))
    timeline.add("the start", [life(line(1), line(2), line(3))])
    (found,) = timeline.add("SIGKILL", [life(*lines_from(0))])
    assert (found.start, found.newest, found.restarted) == (0, None, False)


def test_a_save_that_one_rank_has_not_finished_is_not_expected() -> None:
    timeline = Timeline(reference={0: REFERENCE, 1: REFERENCE}, savers=frozenset({0, 1}))
    run = [line(step) for step in range(1, 12)]
    timeline.add("the start", [life(*run, saves=[5, 10]), life(*run, rank=1, saves=[5])])
    assert timeline.newest() == 5


def test_ranks_that_did_not_load_are_named() -> None:
    timeline = Timeline(reference={0: REFERENCE, 1: REFERENCE}, savers=frozenset({0}))
    run = [line(step) for step in range(1, 14)]
    timeline.add("the start", [life(*run, world=2, saves=[5, 10]), life(*run, rank=1, world=2)])
    found = timeline.add("SIGKILL", [life(*lines_from(10)), life(*lines_from(0), rank=1)])
    finding = judge.ranks_agree(found, 2)
    assert finding.verdict is Verdict.FAIL
    assert "rank 0 from step 10, rank 1 from step 0" in finding.reason
    assert judge.no_restart(found).verdict is Verdict.PASS
    assert judge.ranks_agree(found[:1], 1).verdict is Verdict.SKIP


def test_a_rank_with_the_weights_of_another_and_no_optimizer_state_did_not_load() -> None:
    """DDP sends every rank the weights of rank 0 when it is built."""
    timeline = Timeline(reference={0: REFERENCE, 1: REFERENCE}, savers=frozenset({0}))
    run = [line(step) for step in range(1, 14)]
    timeline.add("the start", [life(*run, saves=[5, 10]), life(*run, rank=1)])
    empty = lines_from(10, state=lambda one, number: None if number == 1 else one.state)
    found = timeline.copy().add("SIGKILL", [life(*lines_from(10)), life(*empty, rank=1)])
    assert [resume.rank for resume in judge.not_loaded(found)] == [1]
    finding = judge.ranks_agree(found, 2)
    assert finding.verdict is Verdict.FAIL and "the optimizer of rank 1" in finding.reason
    everywhere = timeline.add("SIGKILL", [life(*empty), life(*empty, rank=1)])
    assert judge.not_loaded(everywhere) == [], "lost on every rank: the optimizer is not saved"


def test_equal_weights_of_a_learning_rate_of_zero_are_told_apart_by_the_rest() -> None:
    warm = {step: replace(one, weights="w" if step < 4 else one.weights) for step, one in REFERENCE.items()}
    timeline = Timeline(reference={0: warm}, savers=frozenset({0}))
    timeline.add("the start", [life(*(warm[step] for step in range(1, 5)), saves=[2])])
    (found,) = timeline.add("SIGKILL", [life(warm[3], warm[4])])
    assert found.start == 2


@pytest.mark.parametrize(
    ("code", "forced", "finished", "verdict", "words"),
    [
        (75, False, False, Verdict.PASS, "exit code 75"),
        (-15, False, False, Verdict.PASS, "without a save"),
        (0, False, False, Verdict.WARN, "says that the run is finished"),
        (0, False, True, Verdict.WARN, "SIGTERM was ignored"),
        (-9, True, True, Verdict.FAIL, "was killed"),
    ],
)
def test_the_end_after_sigterm(code: int, forced: bool, finished: bool, verdict: Verdict, words: str) -> None:
    finding = judge.stopped(code=code, took_s=1.0, grace_s=30.0, forced=forced, finished=finished)
    assert finding.verdict is verdict
    assert words in finding.reason


def test_an_unseeded_start_before_any_save_is_no_lost_state() -> None:
    timeline = Timeline(reference={0: REFERENCE}, savers=frozenset({0}))
    timeline.add("the start", [life(line(1), line(2), line(3))])
    found = timeline.add("SIGKILL", [life(*lines_from(0, weights=lambda _, number: f"other{number}"))])
    assert [resume.start for resume in found] == [None]
    assert {claim(found).verdict for claim in CLAIMS.values()} == {Verdict.ERROR}


@pytest.mark.parametrize(("by", "says"), [(-1, "too seldom"), (1, "too often"), (-10, "not saved or not loaded")])
def test_a_schedule_that_is_a_step_off_has_a_fix_of_its_own(by: int, says: str) -> None:
    finding = judge.schedule(resumes(*lines_from(10, rates=lambda _, number: REFERENCE[10 + number + by].rates)))
    assert says in (finding.action or "")
