"""The goodput ledger: bins sum to the wall time exactly, whatever was recorded; and each rule by an example."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from trainmaster.core.money.cost import Span, add_up
from trainmaster.core.money.goodput.attempt import NodeTime
from trainmaster.core.money.goodput.bins import PARTS, Bin
from trainmaster.core.money.goodput.history import AttemptHistory, History, Mark, StageChange, to_us
from trainmaster.core.money.goodput.interval import Costs, best_interval_s, expected_ettr, scale_mttf_s
from trainmaster.core.money.goodput.ledger import Ledger, book
from trainmaster.core.money.goodput.tally import Tally, fold
from trainmaster.core.states import Stage

T0 = datetime(2026, 11, 1, 12, tzinfo=UTC)
US = 1_000_000
BASE = to_us(T0)
NOW = BASE + 10_000 * US


def at(seconds: float) -> int:
    return BASE + round(seconds * US)


def mark(when: float | None, phase: str, event: str, **data: Any) -> Mark:
    return Mark(None if when is None else at(when), phase, event, data)


def step(seconds: float, number: int, **data: Any) -> Mark:
    return mark(seconds, "STEP", "metrics", step=number, **data)


def stages(*changes: tuple[float, str | None]) -> tuple[StageChange, ...]:
    return tuple(StageChange(at(seconds), Stage(word) if word else None) for seconds, word in changes)


WHOLE = stages((10, "placing"), (12, "staging"), (15, "checking"), (30, "running"), (200, "collecting"),
               (210, "releasing"), (220, None))  # fmt: skip
BEGINNING = (
    mark(16, "PROJECT", "start"), mark(17, "PREFLIGHT", "start"), mark(29, "PREFLIGHT", "end"),
)  # fmt: skip


def seconds(ledger: Ledger) -> dict[str, float]:
    """Seconds of each bin that has any, checked against the wall."""
    sums = dict.fromkeys(Bin, 0)
    at = ledger.start
    for low, high, bin_, _ in ledger.segments:
        assert low == at and high > low, "segments follow each other without a gap"
        sums[bin_] += high - low
        at = high
    assert at == ledger.end and sum(sums.values()) == ledger.end - ledger.start
    return {bin_.value: us / US for bin_, us in sums.items() if us}


def one(marks: Sequence[Mark], changes: Sequence[StageChange] = WHOLE, **values: Any) -> dict[str, float]:
    """The bins of a job with one attempt that ran our trainer."""
    released = values.pop("released", 215)
    attempt = AttemptHistory(number=1, started=at(15.5), released=at(released) if released else None, marks=marks)
    history = History(created=BASE, stages=changes, attempts=[attempt], **{"trainer": True, **values})
    return seconds(book(history, now=NOW))


def test_a_run_of_our_trainer() -> None:
    marks = [
        *BEGINNING,
        mark(38, "CHECKPOINT", "loaded", step=100, seconds=5.0),
        mark(40, "TRAINING", "start", resumed_from=100),
        step(50, 101, step_s=10.0),  # compiled for 8 s: a step takes 2 s later
        step(52, 102, step_s=2.0, data_share=0.25),
        mark(53, "CHECKPOINT", "saved", step=102, stall_s=0.5, tier="memory"),
        mark(53.5, "CHECKPOINT", "saved", step=102, stall_s=0.5, tier="disk"),
        step(54.5, 103, step_s=2.0),
        mark(54.5, "EVAL_TRAINING", "start"),
        mark(58.5, "EVAL_TRAINING", "end"),
        step(60.5, 104, step_s=2.0),
        mark(62, "CHECKPOINT", "saved", step=104, stall_s=1.0),
        mark(63, "TRAINING", "end", step=104),
        mark(64, "PROJECT", "end"),
    ]
    assert one(marks) == {
        "queued": 10 + 0.5,  # ours, then until the target said that it runs
        "provisioning": 2,
        "starting": 3 + 0.5 + 1 + 4 + 2,  # sent, agent, before the checks, up to the load, up to training
        "checking": 12,
        "loading": 5,
        "compiling": 8,
        "training": 2 + 1.5 + 2 + 2,
        "data_wait": 0.5,
        "save_stall": 0.5 + 2.5,
        "evaluating": 4,
        "idle": 1 + 136 + 15,  # until the release; storing after it holds no GPU
    }


def test_steps_that_were_lost_are_repeated_work() -> None:
    first = [*BEGINNING, mark(40, "TRAINING", "start"), step(41, 1, step_s=1.0), step(42, 2, step_s=1.0),
             step(43, 3, step_s=1.0), step(44, 4, step_s=1.0)]  # fmt: skip
    shift = 300
    again = [mark(shift + 20, "TRAINING", "start", resumed_from=2), step(shift + 21, 3, step_s=1.0),
             step(shift + 24, 6, step_s=1.0), mark(shift + 24, "TRAINING", "end", step=6)]  # fmt: skip
    changes = (*WHOLE[:-1], *stages((220, "queued"), (shift, "placing"), (shift, "staging"), (shift, "running"),
               (shift + 25, "collecting"), (shift + 25, "releasing"), (shift + 25, None)))  # fmt: skip
    attempts = [
        AttemptHistory(number=1, started=at(15), released=at(215), marks=first),
        AttemptHistory(number=2, started=at(shift), released=at(shift + 25), marks=again),
    ]
    ledger = book(History(created=BASE, stages=changes, attempts=attempts, trainer=True), now=NOW)
    bins = seconds(ledger)
    assert bins["repeated"] == 1 + 1  # steps 3 and 4; the first of them at the pace of the later ones
    assert bins["training"] == 1 + 3 + 2  # 1 to 4 once, 5 and 6
    assert bins["stalled"] == 156  # from the last step of the first attempt until the target said that it is over
    assert bins["queued"] == 10 + 85  # nothing is held from the release on
    assert ledger.steps == 6
    before = book(History(created=BASE, stages=WHOLE, attempts=attempts[:1], trainer=True, steps_before=3), now=NOW)
    assert seconds(before)["repeated"] == 3  # of an earlier job of the same run


def test_a_program_that_reports_nothing_is_unknown() -> None:
    bins = one([*BEGINNING, mark(190, "PROJECT", "end")], trainer=False)
    assert bins["unknown"] == 161 and "training" not in bins and "stalled" not in bins
    assert one([], trainer=False)["unknown"] == 184.5  # not even its agent was heard


def test_why_the_time_before_a_first_step_is_unknown() -> None:
    def notes(*marks: Mark, trainer: bool = False) -> tuple[str, ...]:
        attempt = AttemptHistory(number=1, started=at(15.5), marks=[*BEGINNING, *marks])
        return book(History(created=BASE, stages=WHOLE, attempts=(attempt,), trainer=trainer), now=NOW).notes

    (silent,) = notes(mark(190, "PROJECT", "end"))
    assert silent.startswith("attempt 1: 161.0 s are unknown: the program has reported no step")
    (before,) = notes(step(90, 1), step(100, 2), mark(190, "PROJECT", "end"))
    assert before.startswith("attempt 1: 61.0 s before its first step are unknown")
    assert notes(mark(40, "TRAINING", "start"), step(90, 1), step(100, 2), trainer=True) == ()


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("steps", [0, 100])
def test_steps_without_a_time_are_unknown_and_never_a_start(checked: bool, steps: int) -> None:
    """Lines without `ts`, as the script guide's function once wrote them, with the checks and with `preflight: 0`."""
    beginning = BEGINNING if checked else BEGINNING[:1]
    untimed = [mark(None, "STEP", "metrics", step=n, loss=2.0) for n in range(1, steps + 1)]
    marks = [*beginning, *untimed, mark(190, "PROJECT", "end")]
    bins = one(marks, trainer=False)
    assert bins["unknown"] == (161 if checked else 174)
    assert bins["starting"] == (3 + 0.5 + 1 if checked else 3 + 0.5)  # up to the agent's first line, and to the checks
    attempt = AttemptHistory(number=1, started=at(15.5), marks=marks)
    notes = book(History(created=BASE, stages=WHOLE, attempts=(attempt,)), now=NOW).notes
    if steps:
        said = f"attempt 1: {bins['unknown']:.1f} s are unknown: the program has reported {steps} steps, but no time"
        assert notes[0].startswith(said) and "`ts`" in notes[0]
        assert notes[1] == "attempt 1: 100 events without a time were left out"
    else:
        assert "has reported no step" in notes[0] and len(notes) == 1


def test_what_a_program_calls_a_start_after_the_checks_is_unknown() -> None:
    marks = [*BEGINNING, mark(31, "PROJECT", "start"), mark(50, "EVAL_TRAINING", "end"), step(90, 1), step(100, 2),
             mark(190, "PROJECT", "end")]  # fmt: skip
    assert one(marks, trainer=False)["starting"] == 3 + 0.5 + 1
    # Its agent's first lines were lost with the head of the file.
    assert "starting" not in one([mark(90, "STEP", "metrics", step=1)], WHOLE[:1] + WHOLE[3:], trainer=False)


def test_a_program_is_taken_at_its_word() -> None:
    marks = [*BEGINNING, mark(40, "TRAINING", "start"), mark(60, "TRAINING", "epoch_complete"),
             mark(90, "TRAINING", "end"), mark(190, "PROJECT", "end")]  # fmt: skip
    bins = one(marks, trainer=False)
    assert (bins["training"], bins["unknown"]) == (50, 11 + 100)


def test_waits_and_stalls() -> None:
    marks = [
        *BEGINNING,
        mark(40, "TRAINING", "start"),
        step(41, 1, step_s=1.0),
        mark(44.9, "WATCH", "straggler", step=5, rank=3, score=0.25),
        step(45, 5, step_s=1.0, data_share=0.5),
        step(46, 6, step_s=1.0),
        mark(60, "WATCH", "hang", ranks=[1]),
        step(80, 7, step_s=34.0),
        step(150, 8, step_s=70.0),  # a silence beyond the limit: one step at the usual pace, the rest a stall
        mark(150, "TRAINING", "end", step=8),
    ]
    bins = one(marks, stall_us=60 * US)
    assert (bins["data_wait"], bins["straggler_wait"]) == (2.0, 1.0)
    assert bins["stalled"] == 20 + (70 - 17.5)  # the median pace of this attempt is 17.5 s


def test_a_first_reading_of_many_steps() -> None:
    head = [*BEGINNING, mark(40, "TRAINING", "start")]
    bins = one([*head, step(70, 10), step(80, 20, step_s=1.0), mark(80, "TRAINING", "end", step=20)])
    assert (bins["compiling"], bins["training"]) == (20, 10 + 10)
    alone = one([*head, step(70, 10, step_s=3.0), mark(70, "TRAINING", "end", step=10)])
    assert alone["unknown"] == 30 and "compiling" not in alone  # ten steps and a compilation: nobody can tell


def test_parts_of_a_start_that_an_event_names() -> None:
    parts = {"imports": 2.0, "build": 1.0, "load": 4.0, "compile": 3.0, "other": 100.0}
    marks = [
        *BEGINNING, mark(40, "TRAINING", "start"), mark(43, "START", "parts", parts=parts),
        step(50, 10, step_s=2.0), mark(50, "TRAINING", "end", step=10),
    ]  # fmt: skip
    bins = one(marks)
    assert set(PARTS) >= {"imports", "rendezvous", "build", "load", "compile", "first_step"}
    assert (bins["loading"], bins["compiling"], bins["training"]) == (4, 3, 7)


def test_training_that_begins_again_in_place() -> None:
    marks = [*BEGINNING, mark(40, "TRAINING", "start"), step(41, 1, step_s=1.0), step(42, 2, step_s=1.0),
             mark(49, "CHECKPOINT", "loaded", step=1, seconds=2.0), mark(50, "TRAINING", "start", resumed_from=1),
             step(53, 2, step_s=3.0), step(54, 3, step_s=1.0), mark(54, "TRAINING", "end", step=3)]  # fmt: skip
    bins = one(marks)
    assert (bins["loading"], bins["repeated"], bins["training"], bins["compiling"]) == (2, 1, 3, 2)
    assert "stalled" not in bins


def test_a_rollback_trains_steps_again() -> None:
    marks = [*BEGINNING, mark(40, "TRAINING", "start"), step(41, 1, step_s=1.0), step(44, 4, step_s=1.0),
             mark(46, "WATCH", "rollback", step=4, to_step=2), step(48, 4, step_s=1.0), step(49, 5, step_s=1.0),
             mark(49, "TRAINING", "end", step=5)]  # fmt: skip
    bins = one(marks)
    assert (bins["loading"], bins["repeated"], bins["training"]) == (2, 2, 1 + 3 + 1)


def test_a_job_that_goes_on_and_one_that_never_began() -> None:
    running = stages((10, "placing"), (12, "staging"), (15, "running"))
    marks = [*BEGINNING, mark(40, "TRAINING", "start"), step(41, 1), step(42, 2, step_s=1.0)]
    attempt = AttemptHistory(number=1, started=at(15), marks=marks)
    history = History(created=BASE, stages=running, attempts=[attempt], trainer=True)
    assert seconds(book(history, now=at(44.5)))["training"] == 1 + 1 + 2.5  # the next step is under way
    assert seconds(book(history, now=at(60)))["stalled"] == 18
    assert seconds(book(History(created=BASE, stages=()), now=at(7))) == {"queued": 7}
    assert seconds(book(History(created=BASE, stages=stages((3, None))), now=at(7))) == {"queued": 3}


def test_the_clock_of_a_node_is_held_to_the_time_of_its_attempt() -> None:
    late = [mark(seconds + 3600, *rest) for seconds, *rest in ((16, "PROJECT", "start"), (190, "PROJECT", "end"))]
    attempt = AttemptHistory(number=1, released=at(215), marks=[*late, mark(None, "STEP", "metrics", step=1)])
    ledger = book(History(created=BASE, stages=WHOLE, attempts=[attempt]), now=NOW)
    assert seconds(ledger)["queued"] == 10 + 185  # moved to the end of the attempt: it never began, by its own clock
    assert ledger.notes == (
        "attempt 1: 1 events without a time were left out",
        "attempt 1: the node's clock differs from the server's: 2 events lay up to 3590.0 s outside the attempt and "
        "were moved to its bounds",
    )


def test_order_and_doubled_lines_change_nothing() -> None:
    marks = [*BEGINNING, mark(40, "TRAINING", "start"), *(step(40 + n, n, step_s=1.0) for n in range(1, 30)),
             mark(70, "TRAINING", "end", step=29)]  # fmt: skip
    shuffled = [*marks, *marks]
    random.Random(1).shuffle(shuffled)
    assert one(shuffled) == one(marks)


PHASES = (("PROJECT", "start"), ("PROJECT", "end"), ("PREFLIGHT", "start"), ("PREFLIGHT", "end"), ("TRAINING", "start"),
          ("TRAINING", "end"), ("TRAINING", "epoch_complete"), ("EVAL_TRAINING", "start"), ("EVAL_TRAINING", "end"),
          ("STEP", "metrics"), ("STEP", "metrics"), ("STEP", "metrics"), ("CHECKPOINT", "saved"),
          ("CHECKPOINT", "loaded"), ("WATCH", "hang"), ("WATCH", "rollback"), ("WATCH", "straggler"),
          ("TRAJECTORY", "start"), ("TRAJECTORY", "end"), ("START", "parts"))  # fmt: skip
ODD: tuple[Any, ...] = (None, -1, 0, 1, 2, 7, 1e12, -3.5, 0.3, 1.7, float("nan"), "x", True, [], {})


def random_history(dice: random.Random) -> tuple[History, dict[int, list[Span]], int]:
    """Any history at all: stages left out, clocks set back, events of any kind, time and value."""
    moment, changes, attempts, charges = 0.0, [], [], {}
    for number in range(1, dice.randint(0, 4) + 1):
        start = moment
        for stage in ("placing", "provisioning", "staging", "checking", "running", "collecting", "releasing"):
            if dice.random() < 0.8:
                moment += dice.choice((0, 0.000001, dice.uniform(0, 50), -dice.uniform(0, 5)))
                changes.append((moment, stage))
        released = dice.choice((None, moment - dice.uniform(0, 5), moment + dice.uniform(0, 5)))
        gone = dice.choice((None, None, moment + dice.uniform(-5, 60)))
        begun, skew = dice.choice((None, dice.uniform(start, moment))), dice.choice((0, 0, dice.uniform(-9000, 9000)))
        marks = [
            mark(dice.choice((None, *(dice.uniform(start, max(start, moment)) + skew for _ in range(9)))), *name,
                 **{key: dice.choice((*ODD, dice.randint(0, 40))) for key in
                    ("step", "to_step", "resumed_from", "seconds", "stall_s", "step_s", "data_share", "score", "mfu")},
                 parts=dice.choice((None, 3, {"imports": dice.choice(ODD), "compile": 2.0, "load": 4})))
            for name in dice.choices(PHASES, k=dice.randint(0, 40))
        ]  # fmt: skip
        attempts.append(AttemptHistory(number=number, started=None if begun is None else at(begun),
                                       released=None if released is None else at(released),
                                       gone=None if gone is None else at(gone), marks=marks))  # fmt: skip
        charges[number] = [Span(cents_per_hour=100.0 * number, start=T0 + timedelta(seconds=max(0.0, start)),
                                end=T0 + timedelta(seconds=max(0.0, start, moment)))]  # fmt: skip
        if dice.random() < 0.9:
            moment += dice.uniform(0, 10)
            changes.append((moment, "queued"))
    if dice.random() < 0.5:
        changes.append((moment + dice.uniform(-1, 100), None))
    history = History(
        created=BASE, stages=stages(*changes), attempts=attempts, gpus=dice.choice((1, 8, 1024)),
        trainer=dice.random() < 0.5, stall_us=dice.choice((None, US, 1800 * US)), steps_before=dice.choice((0, 0, 20)),
    )  # fmt: skip
    return history, charges, at(moment + dice.choice((-100, 0, 50, 40 * 86_400)))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_bins_sum_to_the_wall_time_exactly(first: int) -> None:
    seen: set[Bin] = set()
    for seed in range(first, first + 250):
        history, charges, now = random_history(random.Random(seed))
        ledger = book(history, now=now)
        seconds(ledger)  # no gap, no overlap, none negative, the whole wall
        tallies = fold(ledger, charges=charges, priced=True, now=T0 + timedelta(days=50))
        whole = Tally()
        for tally in tallies.values():
            whole.add(tally)
            seen |= {bin_ for bin_, us in tally.gpu_us.items() if us}
            assert min(tally.gpu_us.values()) >= 0 and min(tally.cents.values()) >= 0
        assert whole.total_us == (ledger.end - ledger.start) * history.gpus
        spent = add_up([span for spans in charges.values() for span in spans], now=T0 + timedelta(days=50))
        assert sum(whole.cents.values()) == pytest.approx(spent.known_cents, rel=1e-6, abs=1e-3)
    assert seen == set(Bin)


def test_a_month_is_cut_at_its_end() -> None:
    start = datetime(2026, 10, 31, 23, tzinfo=UTC)
    changes = [StageChange(to_us(start + timedelta(minutes=m)), stage) for m, stage in
               ((30, Stage.PLACING), (30, Stage.RUNNING), (150, Stage.RELEASING), (150, None))]  # fmt: skip
    history = History(created=to_us(start), stages=changes, attempts=[AttemptHistory(number=1)], gpus=8)
    ledger = book(history, now=NOW)
    span = Span(cents_per_hour=600.0, start=start + timedelta(minutes=30), end=start + timedelta(minutes=150))
    tallies = fold(ledger, charges={1: [span]}, priced=True, now=T0)
    hours = {name: tally.total_us / 3_600 / US for name, tally in tallies.items()}
    assert hours == {"2026-10": 8.0, "2026-11": 12.0}
    assert {name: sum(tally.cents.values()) for name, tally in tallies.items()} == pytest.approx(
        {"2026-10": 300.0, "2026-11": 900.0}
    )
    assert list(fold(ledger, charges={}, priced=False, now=T0, month="2026-11")) == ["2026-11"]


def test_the_two_ratios() -> None:
    tally = Tally()
    tally.gpu_us |= {Bin.QUEUED: 20, Bin.STARTING: 10, Bin.TRAINING: 50, Bin.DATA_WAIT: 5, Bin.EVALUATING: 5,
                     Bin.REPEATED: 6, Bin.UNKNOWN: 4}  # fmt: skip
    tally.ideal_us, tally.measured_us = 22.0, 55
    assert (tally.ettr, tally.ettr_most) == (0.6, 0.64)
    assert (tally.scheduling, tally.runtime, tally.program) == (0.8, 0.75, 0.4)
    assert tally.mpg == pytest.approx(0.8 * 0.75 * 0.4)
    assert (Tally().ettr, Tally().mpg) == (None, None)


def test_a_machine_that_outlives_its_attempt_costs_money_for_nothing() -> None:
    ledger = book(History(created=BASE, stages=WHOLE, attempts=[AttemptHistory(number=1, released=at(215))]), now=NOW)
    spans = [Span(cents_per_hour=3600.0, start=T0 + timedelta(seconds=10), end=T0 + timedelta(seconds=300))]
    tally = fold(ledger, charges={1: spans}, priced=True, now=T0)["2026-11"]
    assert sum(tally.cents.values()) == pytest.approx(290)
    assert tally.cents[Bin.IDLE] == pytest.approx(15 + 85)


def test_the_best_interval_loses_the_least() -> None:
    costs, mttf = Costs(hold_s=5.0, write_s=0.0, restart_s=100.0), 7.9 * 3600
    best = best_interval_s(costs, mttf_s=mttf)
    assert best == pytest.approx((2 * 5.0 * mttf) ** 0.5, rel=0.01)  # Young
    at_best = expected_ettr(costs, every_s=best, mttf_s=mttf)
    for other in (best / 3, best * 3):
        assert expected_ettr(costs, every_s=other, mttf_s=mttf) < at_best < 1
    slow = Costs(hold_s=0.1, write_s=600.0, restart_s=100.0)
    assert best_interval_s(slow, mttf_s=mttf) == 600  # the next save waits until one is written
    assert best_interval_s(Costs(hold_s=1e6, write_s=0.0, restart_s=0.0), mttf_s=10.0) == 10.0
    assert scale_mttf_s(1024) == 7.9 * 3600 and scale_mttf_s(2048) == scale_mttf_s(1024) / 2


@pytest.mark.slow
def test_a_long_attempt_costs_what_its_events_do() -> None:
    """Saves in every step, all told at once: looking for each of them anew would take minutes."""
    marks = [*BEGINNING, mark(40, "TRAINING", "start")]
    for n in range(1, 20_001):
        marks += [step(40 + n / 200, n, step_s=0.005), mark(40 + n / 200, "CHECKPOINT", "saved", step=n, stall_s=0.001)]
    calls = 0

    class Counting(dict[int, int]):
        def __iter__(self) -> Any:
            nonlocal calls
            calls += 1
            return super().__iter__()

    node = NodeTime(trainer=True, stall_us=None, top=0, _stalls=Counting())
    node.run(sorted(marks), start=at(16), end=at(200), goes_on=False)
    assert calls <= 2 and sum(high - low for low, high, bin_ in node.segments if bin_ is Bin.SAVE_STALL) > 19 * US


@pytest.mark.slow
def test_a_program_of_ones_own_is_starting_only_before_its_checks() -> None:
    """Over random histories: behind the last pre-flight of an attempt no time is called a start."""
    for seed in range(300):
        history, _, _ = random_history(random.Random(seed))
        plain = [Mark(m.at, m.phase, m.event, {}) for a in history.attempts for m in a.marks if m.phase != "START"]
        timed = sorted((m for m in plain if m.at is not None), key=lambda m: m.at or 0)
        if not timed:
            continue
        start, end = timed[0].at or 0, (timed[-1].at or 0) + US
        node = NodeTime(trainer=False, stall_us=history.stall_us, top=0)
        node.run(timed, start=start, end=end, goes_on=False)
        checked = max((m.at or 0 for m in timed if (m.phase, m.event) == ("PREFLIGHT", "start")), default=start)
        assert all(high <= checked for _, high, bin_ in node.segments if bin_ is Bin.STARTING), seed
