"""Numbers that a program prints after a resume: what tells of state that nothing else does, and what is no fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from trainmaster.cli._views import command_proof, drill_report
from trainmaster.core.results import Finding, Overall, Verdict, error
from trainmaster.drill import printed, readings

from . import prints, recipes
from .test_drill_parts import attempt, lines_of, proof_of
from .test_judge import GROUND, resumes

STEPS = [f"step {step}/40 loss {1 / step:.4f}" for step in range(1, 41)]
HEAD = ["parameters 161, loss before training 2.31"]


def judge(
    end: Sequence[str],
    got: Sequence[str] | None = None,
    *,
    steps: Sequence[str] = STEPS,
    after: Sequence[str] | None = None,
    other: Sequence[str] | None = None,
    repeatable: bool = True,
    noise: float | None = None,
    differ: bool = False,
    losses: dict[int, float] | None = None,
) -> Finding | None:
    """A run that is killed in step 13 and goes on from step 10, to its end. `end`: what both undisturbed runs print
    after their steps, and `got` what the resumed one does; `after`: what it prints of its steps; `other`: what the
    second undisturbed run prints in all."""
    anew = [f"parameters 161, loss before training 0.93, resumed from step {10}", HEAD[0].replace("2.31", "0.93")]
    first = attempt(printed=(*HEAD, *steps, *end), losses=losses or {})
    second = attempt(printed=tuple(other) if other is not None else first.printed)
    runs = [
        attempt(printed=(*HEAD, *steps[:13]), codes=(-9,)),
        attempt(printed=(*anew, *(after or steps[10:]), *(end if got is None else got)), before="SIGKILL"),
    ]
    ground = replace(GROUND, repeatable=repeatable)
    found = resumes(*lines_of(11, 40))
    return printed.judge(first, second, runs, found, ground=ground, noise=noise, steps=40, losses_differ=differ)


@pytest.mark.parametrize(
    ("wanted", "got", "outcome", "words"),
    [
        ("final ema loss 0.50923", "final ema loss 0.53192", Verdict.ERROR, "prints `final ema loss 0.53192`, and the"),
        ("best 0.41 at step 7", "best 0.45 at step 33", Verdict.ERROR, "(2 of 56 numbers differ)"),
        ("eval {'accuracy': 0.81}", "eval {'accuracy': 0.79}", Verdict.ERROR, "`accuracy 0.79`"),
        ("ema nan", "ema 0.5", Verdict.ERROR, "`ema 0.5`"),
        ("seen 1,280 samples", "seen 960 samples", Verdict.WARN, "as much as this process alone did"),
        ("40 steps, loss 0.5", "30 steps, loss 0.5", Verdict.WARN, "as much as this process alone did"),
        ("saves: 8", "saves: 6", Verdict.WARN, "as much as this process alone did"),
        ("timesteps 400", "timesteps 500", Verdict.ERROR, "`timesteps 500`"),
        ("validated 0.4, updated 7", "validated 0.5, updated 9", Verdict.ERROR, "`validated 0.5`"),
        ("loss_avg: 0.51", "loss_avg: 0.48", Verdict.WARN, "an average that begins anew"),
        ("mean loss 0.51", "mean loss 0.48", Verdict.WARN, "an average that begins anew"),
        ("loss 0.51 (0.60)", "loss 0.51 (0.48)", Verdict.WARN, "an average that begins anew"),
    ],
)
def test_a_number_at_the_end_that_is_not_the_undisturbed_runs_is_never_passed(
    wanted: str, got: str, outcome: Verdict, words: str
) -> None:
    """A moving average that no checkpoint holds was not missed: the drill said that it resumes right."""
    finding = judge([wanted], [got])
    assert finding is not None and finding.verdict is outcome, finding
    assert words in finding.reason and "at its end" in finding.reason and "this process" in (finding.action or "")
    right = judge([wanted])
    assert right is not None and right.verdict is Verdict.PASS and "numbers that it prints" in right.reason


@pytest.mark.parametrize(
    ("wanted", "got"),
    [
        ("took 40 s, 12 steps/s", "took 30 s, 9 steps/s"),
        ("time 1.0 elapsed 3", "time 2.0 elapsed 4"),
        ("done at 2026-11-19 04:05:06", "done at 2026-11-20 05:06:07"),
        ("peak memory 120 MiB, pid 17", "peak memory 130 MiB, pid 18"),
        ("steps in this process: 40 | loss 0.5", "steps in this process: 30 | loss 0.5"),
        ("40 steps in this process, loss 0.5", "30 steps in this process, loss 0.5"),
        ("max_mem_GB 1.2 step_ms 3 gpu_util 40 wall 3", "max_mem_GB 1.3 step_ms 4 gpu_util 50 wall 4"),
        ("tokens_per_second_avg=12 eta: 3 secs 4", "tokens_per_second_avg=9 eta: 1 secs 2"),
        ("start_step 0 end 40", "start_step 10 end 40"),
        ("restarts 0, attempt 1", "restarts 2, attempt 3"),
        ("0 restarts", "2 restarts"),
        ("trained from step 0 to 40", "trained from step 10 to 40"),
        ("began with 0, loss 0.5", "began with 10, loss 0.5"),
        (
            "{'train_runtime': 1, 'train_loss': 0.43, 'epoch': 3.3}",
            "{'train_runtime': 2, 'train_loss': 0.21, 'epoch': 3.3}",
        ),
        ("loss 0.5", "loss 0.5 of a run that was resumed 2 times"),
    ],
)
def test_what_a_healthy_script_prints_of_its_process_is_no_fault(wanted: str, got: str) -> None:
    finding = judge([wanted], [got])
    assert finding is not None and finding.verdict is Verdict.PASS, finding


def test_numbers_that_two_undisturbed_runs_print_differently_are_not_asked() -> None:
    ends = ["final 0.51 in 3.1", "hash a1b2 7", "final loss 0.50"]
    other = [*HEAD, *STEPS, "final 0.51 in 3.2", "hash c3d4 8", "final loss 0.50"]
    finding = judge(ends, ["final 0.51 in 9.9", "hash e5f6 9", "final loss 0.50"], other=other)
    assert finding is not None and finding.verdict is Verdict.PASS
    assert "1 that differ between the two undisturbed runs, as times, were not compared" in finding.reason
    path = ["final 0.5 in /a/reference/x-1.pt"]
    moved = judge(path, ["final 0.6 in /a/struck/x-9.pt"], other=[*HEAD, *STEPS, "final 0.5 in /a/reference-2/x-2.pt"])
    assert moved is not None and moved.verdict is Verdict.ERROR and "`final 0.6`" in moved.reason
    wrong = judge(ends, ["final 0.61 in 3.1", "hash a1b2 7", "final loss 0.50"], other=other)
    assert wrong is not None and wrong.verdict is Verdict.ERROR and "`final 0.61`" in wrong.reason


def test_losses_of_runs_that_are_not_repeatable_are_held_to_their_noise() -> None:
    other = [*HEAD, *STEPS, "final ema loss 0.505, accuracy 0.8"]
    for got, outcome in (("0.51", Verdict.PASS), ("0.52", Verdict.PASS), ("0.54", Verdict.ERROR)):
        line = f"final ema loss {got}, accuracy 0.9"
        finding = judge(["final ema loss 0.5, accuracy 0.8"], [line], other=other, repeatable=False, noise=0.01)
        assert finding is not None and finding.verdict is outcome, finding
    unknown = judge(["final ema loss 0.5"], ["final ema loss 0.9"], repeatable=False)
    assert unknown is not None and unknown.verdict is Verdict.PASS, "no noise is known: the step numbers alone"
    count = judge(["correct 9"], ["correct 11"], repeatable=False)
    assert count is not None and count.verdict is Verdict.WARN and "or chance" in count.reason


def test_a_number_in_the_line_of_a_step_is_compared_with_that_steps() -> None:
    steps = [f"step {step} | loss 0.5 | smooth {1 / step:.3f} | {step}.1 it/s" for step in range(1, 41)]
    right = judge([], steps=steps)
    assert right is not None and right.verdict is Verdict.PASS
    wrong = judge(
        [], steps=steps, after=[*steps[10:20], *(line.replace("smooth 0.", "smooth 1.") for line in steps[20:])]
    )
    assert wrong is not None and wrong.verdict is Verdict.WARN
    assert "after SIGKILL, in the line of step 21, it prints `smooth 1.048`" in wrong.reason
    assert judge([], steps=steps, differ=True) is None, "told by the losses"
    batches = [f"epoch {at // 10} [{at % 10}/10] acc {at / 40}" for at in range(40)]
    by_epoch = judge([], steps=batches, after=[*batches[10:39], batches[39].replace("0.975", "0.9")])
    assert by_epoch is not None and by_epoch.verdict is Verdict.ERROR and "`acc 0.9`" in by_epoch.reason


def test_lines_that_begin_anew_with_each_process_are_not_those_of_its_steps() -> None:
    own = [f"batch {at} of this loop: acc {at / 40}" for at in range(1, 41)]
    assert judge([], steps=own, after=[line.replace("acc 0", "acc 1") for line in own[:30]]) is None
    shards = [f"shard {at}: 100 rows" for at in range(3)]
    finding = judge(["eval 0.5"], ["eval 0.6"], steps=[*shards, *STEPS], after=[*shards, "eval 0.9", *STEPS[10:]])
    assert finding is not None and finding.verdict is Verdict.ERROR and "`eval 0.6`" in finding.reason
    epoch = [*STEPS[:8], "epoch 0 begins, best 9.0", *STEPS[8:]]
    again = judge([], steps=epoch, after=["epoch 0 begins, best 0.7", *STEPS[10:]])
    assert again is not None and again.verdict is Verdict.PASS


def test_without_lines_of_steps_only_what_is_printed_once_all_is_done_counts() -> None:
    finding = judge(["final 0.5"], ["final 0.6"], steps=())
    assert finding is not None and finding.verdict is Verdict.ERROR and "1 of" not in finding.reason
    assert judge([], steps=()) is None, "what is printed at each start is of that start"


def test_where_the_printed_losses_differ_what_is_made_of_them_is_not_told_twice() -> None:
    losses = {40: 0.5}
    assert judge(["last 0.5"], ["last 0.6"], differ=True, losses=losses) is None
    finding = judge(["ema 0.4"], ["ema 0.6"], differ=True, losses=losses)
    assert finding is not None and finding.verdict is Verdict.ERROR


def test_a_number_that_differs_makes_a_drill_incomplete_and_follows_from_what_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "printed" not in {result.check for result in proof_of(lines_of(11, 40)).results}, "it prints nothing"
    monkeypatch.setattr(printed, "judge", lambda *_, **__: error("x", action="y"))
    proof = proof_of(lines_of(11, 40))
    assert proof.overall is Overall.INCOMPLETE and "resumes right" not in command_proof.report(proof).sentence
    assert "the numbers that it prints" in drill_report.markdown(command_proof.report(proof))
    lost = proof_of([replace(one, state=None) if one.at == 11 else one for one in lines_of(11, 40)])
    assert lost.overall is Overall.FAIL and "printed" not in {result.check for result in lost.results}


def test_lines_are_read_as_a_terminal_shows_them(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    assert readings.read_printed(log, ended=False) == ()
    log.write_bytes(
        b"no number\n\x1b[32mloss 0.5\x1b[0m\r\n\rstep 1\r\rstep 2\n 10%|#   | 4/40 [00:01<00:02, 3it/s]\rstep 3 a\n"
        b" 40%|##  | 16/40 [00:01<00:02, 3it/s, loss=1.2]\nema nan\nrank0 v1.2.3 0x7f\nstep 4 loss 0."
    )
    shown = ("loss 0.5", "step 2", "step 3 a", "ema nan")
    assert readings.read_printed(log, ended=False) == shown
    assert readings.read_printed(log, ended=True) == (*shown, "step 4 loss 0.")


def test_words_and_numbers_of_a_line() -> None:
    (line,) = printed.parse(["[12:03:04] step-0005.pt  7/40 | loss: -1.5e-3 (2.) | tokens 1,024 took .5s"])
    assert line.written == ("0005", "7", "40", "-1.5e-3", "2", "1,024", ".5")
    assert line.numbers == (5, 7, 40, -0.0015, 2, 1024, 0.5)
    assert (line.before[3], line.before[4], line.before[5]) == ("loss", "average loss", "tokens")
    (wide,) = printed.parse(["[12:03:04] step-0005.pt  7/40 | loss:     1.5 (2.) | tokens 1,024 took .5s"])
    assert wide.words == line.words, "padding is no word"


VERSIONS = [
    *((version, (Verdict.ERROR, Verdict.WARN)) for version in prints.LOST.values()),
    *((version, (Verdict.PASS, None)) for version in prints.WHOLE.values()),
    *((version, (Verdict.WARN,)) for version in prints.COUNTED.values()),
]
NAMES = [f"{kind} {name}" for kind in ("lost", "whole", "counted") for name in getattr(prints, kind.upper())]


@pytest.mark.spawns
@pytest.mark.matrix(one_in=36, of="drills of the scripts of others")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("version", "outcomes"), VERSIONS, ids=NAMES)
def test_what_a_script_prints_tells_what_it_lost(
    version: prints.Version, outcomes: tuple[Verdict | None, ...], tmp_path: Path
) -> None:
    with recipes.warm_python("torchrun") as python:
        proof = recipes.drill_program(tmp_path, str(version), strikes=("one",), python=(python, "-m"))
    found = {result.check: result.findings[0] for result in proof.results}
    told = found.get("printed")
    assert (told.verdict if told else None) in outcomes, told
    others = {name: one.reason for name, one in found.items() if one.verdict in (Verdict.FAIL, Verdict.ERROR)}
    others.pop("printed", None)
    assert others == {}, others
    assert (proof.overall is Overall.PASS) == (None in outcomes)


def test_lines_with_a_hash_are_no_others_with_a_number() -> None:
    one, other = printed.parse(["5 6", "# 7"])
    assert one.words != other.words and (len(one.numbers), len(other.numbers)) == (2, 1)
