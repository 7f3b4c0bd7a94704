"""Parts of a drill of any program: the plan, the folders, the lines of the witness, what is refused."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from trainmaster.cli._views import command_proof, drill_report
from trainmaster.cli.main import build
from trainmaster.core.errors import UsageError
from trainmaster.core.plan import PLAN_FILE, Plan
from trainmaster.core.results import CheckResult, Overall, Verdict
from trainmaster.core.schema import to_plain
from trainmaster.core.spec import JobSpec
from trainmaster.drill import attempt as engine
from trainmaster.drill import judge_end, outside, plan, sample, verdict, witness_log
from trainmaster.drill.attempt import last_words
from trainmaster.drill.ground import make_ground
from trainmaster.drill.lives import Timeline
from trainmaster.drill.plan import Shape, Strike
from trainmaster.drill.readings import read_losses
from trainmaster.drill.record import Attempt, Proof, Setup, Struck
from trainmaster.drill.witness_log import Line, Save

from .test_judge import GROUND, REFERENCE, life, line, lines_from, resumes

SHAPE = Shape(steps=40, saves=(5, 10, 15, 20, 25, 30, 35, 40), world=2, launcher=True, fewer=1)


def attempt(*lines: Line, codes: tuple[int, ...] = (0,), **more: object) -> Attempt:
    values: dict[str, object] = {
        "label": "", "folder": "/f", "losses": {}, "message": "m", "forced": False, "begun": 0.0, "ended": 1.0,
        "grace_s": 30.0, "stop_s": None, "launcher": False, "struck": False,
    }  # fmt: skip
    return Attempt(codes=codes, lives=(life(*lines),) if lines else (), **{**values, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [(), ("job.yaml",), ("--strike", "one")])
def test_strikes_are_listed_a_line_each(more: tuple[str, ...]) -> None:
    done = CliRunner().invoke(build(), ["drill", "--strike", "list", *more])
    assert done.exit_code == 0 and done.stderr == "", done.output
    assert dict(line.split(maxsplit=1) for line in done.stdout.splitlines()) == plan.STRIKES
    shown = CliRunner().invoke(build(), ["drill", "--strike", "list", "--json", *more])
    assert json.loads(shown.stdout) == {"strikes": plan.STRIKES}


KEY = "sk-" + "abcdefghijklmnop1234567890"


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("--", "env", f"API_KEY={KEY}", "python3", "train.py"), "command[1]"),
        (("--", "python3", "train.py", f"--token={KEY}"), "command[2]"),
        (("--resume-command", f"python3 train.py --token {KEY}", "--", "python3", "t.py"), "--resume-command[3]"),
        (("job.yaml", "env.API_KEY=" + KEY), "env.API_KEY"),
    ],
)
def test_a_secret_is_refused_and_never_shown(
    words: tuple[str, ...], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("name: mine\ncommand: [python3, train.py]\n")
    with pytest.raises(UsageError, match="export it as a variable before the drill") as raised:
        build()(["drill", "--out", "proof", *words], standalone_mode=False)
    assert str(raised.value).startswith(f"{place}: ") and KEY not in str(raised.value)
    assert not Path("proof").exists()


def test_a_plan_is_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(engine.subprocess, "Popen", stop)
    spec = JobSpec(name="x", command=("true",))
    job = Plan(attempt="a.1", spec=spec, folder=str(tmp_path / "a"), checkpoints="/c", work="/w")
    with pytest.raises(InterruptedError):
        engine.run(job, variables={}, look=lambda _: None)
    assert (tmp_path / "a" / PLAN_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("seed", range(20))
def test_strikes_come_in_order_between_the_saves(seed: int) -> None:
    strikes = plan.make(SHAPE, wanted=plan.STRIKES, seed=seed)
    assert [strike.name for strike in strikes] == list(plan.STRIKES)
    assert strikes == plan.make(SHAPE, wanted=plan.STRIKES, seed=seed)
    by_name = {strike.name: strike for strike in strikes}
    assert by_name["before-save"].after <= 5 < by_name["after-save"].after == 6
    spread = [by_name[name].after for name in ("one", "all", "launcher", "twice")]
    assert spread == sorted(spread)
    assert spread[0] > 6 and spread[-1] < 40
    assert by_name["one"].rank in (0, 1)


def test_what_a_program_has_no_place_for_is_left_out() -> None:
    alone = replace(SHAPE, world=1, launcher=False, fewer=None)
    names = {strike.name for strike in plan.make(alone, wanted=plan.STRIKES, seed=0)}
    assert set(plan.STRIKES) - names == {"all", "launcher", "ranks"} == set(plan.left_out(alone))
    assert [strike.name for strike in plan.make(alone, wanted=["all"], seed=0)] == ["one"], "never none at all"


def test_damage_alone_needs_a_run_that_was_killed() -> None:
    names = [strike.name for strike in plan.make(SHAPE, wanted=["flipped"], seed=0)]
    assert names == ["one", "flipped"]


def test_lines_are_read_past_a_torn_one_and_optimizers_are_joined(tmp_path: Path) -> None:
    def item(n: int, optimizer: int, state: str) -> dict[str, object]:
        return {
            "k": "step", "n": n, "o": optimizer, "r": 3, "w": 4, "t": n, "lr": [0.1], "p": f"p{optimizer}", "s": state,
            "g": {}, "b": [["d", f"{n}"]] if optimizer == 0 else [],
        }  # fmt: skip

    items = [item(1, 0, "empty"), item(1, 1, "empty"), item(2, 0, "s"), item(2, 1, "t"), item(3, 0, "s")]
    text = "\n".join(json.dumps(one) for one in [*items, {"k": "save", "n": 2, "i": 4, "r": 3, "t": 9, "path": "/p"}])
    (tmp_path / "77.jsonl").write_text(text + '\n{"k": "st')
    (one,) = witness_log.read(tmp_path)
    assert (one.pid, one.rank, one.world) == (77, 3, 4)
    assert [(each.state, each.weights, each.rates) for each in one.lines] == [
        (None, "p0+p1", (0.1, 0.1)), ("s+t", "p0+p1", (0.1, 0.1)),
    ]  # fmt: skip
    assert one.saves == (Save(after=2, at=9.0, path="/p"),)


def test_programs_that_cannot_be_drilled_are_not_struck(tmp_path: Path) -> None:
    unseen = verdict.unfit(attempt(), tmp_path)
    assert unseen is not None and unseen.verdict is Verdict.ERROR
    outside = replace(attempt(line(1)), lives=(life(line(1), saves=[1]),))
    found = verdict.unfit(outside, tmp_path)
    assert found is not None and "it saves to /x" in found.reason
    assert verdict.unfit(outside, Path("/")) is None
    shared = verdict.unlike(attempt(line(1), line(2)), attempt(line(2)))
    assert shared is not None and "outside the drill's folders" in shared.reason
    never = verdict.too_few_saves(replace(SHAPE, saves=()))
    assert never is not None and never.verdict is Verdict.FAIL
    few = verdict.too_few_saves(replace(SHAPE, saves=(40,)))
    assert few is not None and few.verdict is Verdict.ERROR
    assert verdict.too_few_saves(SHAPE) is None


def test_only_what_two_undisturbed_runs_share_is_asked() -> None:
    first, second = [line(1), line(2)], [line(1), replace(line(2), random={"torch": "r2", "python": "x"})]
    ground = make_ground(attempt(*first), attempt(*second))
    assert (ground.repeatable, ground.random, ground.data, ground.source) == (True, {"torch"}, True, "data")
    moved = make_ground(attempt(*first), attempt(line(1), replace(line(2), weights="x", batches=())))
    assert (moved.repeatable, moved.data) == (False, False)


@pytest.mark.parametrize(
    ("kind", "codes", "lines", "outcome", "words"),
    [
        ("truncated", (1,), [], Verdict.WARN, "somebody must remove it"),
        ("truncated", (0,), [], Verdict.FAIL, "ended with 0"),
        ("truncated", (-9,), lines_from(0), Verdict.FAIL, "began at step 0, silently"),
        ("truncated", (-9,), lines_from(5), Verdict.PASS, "went on from step 5"),
        ("truncated", (-9,), lines_from(10), Verdict.PASS, "did not need it"),
        ("missing", (-9,), lines_from(10, state=None), Verdict.FAIL, "optimizer is empty"),
        ("flipped", (-9,), lines_from(10), Verdict.FAIL, "loaded without a word"),
        ("flipped", (-9,), lines_from(5), Verdict.PASS, "went on from step 5"),
    ],
)
def test_a_damaged_checkpoint(
    kind: str, codes: tuple[int, ...], lines: list[Line], outcome: Verdict, words: str
) -> None:
    struck = Struck(
        strike=Strike(name=kind, after=0), reached=True, died_at=12, resumes=tuple(resumes(*lines)) if lines else (),
        branch=attempt(*lines, codes=codes), damaged="a.pt", newest=10, older=1,
    )  # fmt: skip
    finding = verdict.damage(struck, GROUND)
    assert finding.verdict is outcome
    assert words in finding.reason


def test_a_flipped_bit_in_a_file_that_no_resume_reads_is_no_fault() -> None:
    strikes = [Strike(name=name, after=0) for name in ("flipped", "missing")]
    struck = [
        Struck(
            strike=strike, reached=True, died_at=12, resumes=tuple(resumes(*lines_from(10))), damaged="export.bin",
            branch=attempt(*lines_from(10), codes=(-9,)), newest=10, older=1,
        )
        for strike in strikes
    ]  # fmt: skip
    run = attempt(*lines_of(1, 40))
    found = dict(
        verdict.judge_all(
            run, run, SHAPE, struck=struck, attempts=[run], resumes=[], planned=strikes, reached=40
        )
    )  # fmt: skip
    assert (found["flipped"].verdict, found["missing"].verdict) == (Verdict.PASS, Verdict.PASS)
    needed = dict(
        verdict.judge_all(
            run, run, SHAPE, struck=struck[:1], attempts=[run], resumes=[], planned=strikes, reached=40
        )
    )  # fmt: skip
    assert needed["flipped"].verdict is Verdict.FAIL


def test_a_single_file_that_is_missing_is_no_damage() -> None:
    struck = Struck(strike=Strike(name="missing", after=0), reached=False, died_at=1, skipped="one file")
    assert verdict.damage(struck, GROUND).verdict is Verdict.SKIP
    nothing = replace(struck, skipped=None)
    assert verdict.damage(nothing, GROUND).verdict is Verdict.ERROR


@pytest.mark.parametrize(
    ("losses", "reference", "start"),
    [
        ({11: 1.0}, {1: 1.0, 2: 1.0}, 10),
        ({10: 1.0}, {0: 1.0, 1: 1.0}, 10),
        ({}, {1: 1.0}, None),
        ({20: 1.0}, {10: 1.0, 20: 1.0}, None),
    ],
)
def test_printed_steps_place_a_start_where_every_step_is_printed(
    losses: dict[int, float], reference: dict[int, float], start: int | None
) -> None:
    assert judge_end.printed_start(losses, reference) == start


def proof_of(second: list[Line], *, codes: tuple[int, ...] = (0,), printed: dict[int, float] | None = None) -> Proof:
    """A run of 40 steps, killed in step 13 and gone on with these lines; `printed`: losses after the resume."""
    reference = attempt(*lines_of(1, 40), losses={step: 1.0 / step for step in range(1, 41)})
    found = resumes(*second) if second else []
    attempts = [
        attempt(*lines_of(1, 13), codes=(-9,), struck=True),
        attempt(*second, codes=codes, before="SIGKILL", losses=printed or {step: 1.0 / step for step in range(11, 41)}),
    ]
    strike = Strike(name="one", after=13, rank=0)
    struck = [Struck(strike=strike, reached=True, died_at=12, resumes=tuple(found))]
    shape = replace(SHAPE, world=1, launcher=False)
    reached = 10 + len(second) if second else None
    findings = verdict.judge_all(
        reference, reference, shape, struck=struck, attempts=attempts, resumes=found, planned=[strike], reached=reached
    )
    return Proof(
        setup=Setup(spec=JobSpec(name="x", command=("python3", "train.py", "a|b"))),
        shape=shape,
        planned=(strike,),
        struck=tuple(struck),
        left_out=plan.left_out(shape),
        results=tuple(CheckResult(check=name, findings=(finding,), took_s=0.0) for name, finding in findings),
        reference=reference,
        attempts=tuple(attempts),
        begun=1_000_000_000.0,
        took_s=3.0,
    )


def lines_of(first: int, last: int) -> list[Line]:
    return [line(step) for step in range(first, last + 1)]


def claims(proof: Proof) -> dict[str, Verdict]:
    return {result.check: result.verdict for result in proof.results}


def test_a_whole_run_passes_and_its_report_says_what_was_not_tried() -> None:
    proof = proof_of(lines_of(11, 40))
    assert proof.overall is Overall.PASS
    report = command_proof.report(proof)
    assert report.rows == [("1", "SIGKILL of rank 0, in step 13", "12", "10", "10", "2")]
    text = drill_report.markdown(report)
    assert f"Not tried: {plan.NOT_TRIED}." in text
    assert "Left out: launcher" in text
    page = drill_report.render_html(report)
    assert "killed and resumed" in page and "a|b" in page
    document = json.loads(json.dumps(to_plain(report.document)))
    assert document["strikes"][0]["resumes"] == [
        {"rank": 0, "newest_save": 10, "resumed_from": 10, "lost_steps": 2}
    ]  # fmt: skip
    assert {claim["claim"] for claim in document["claims"]} <= set(command_proof.DOES)


def test_a_failed_drill_is_repeated_by_its_commands_and_fails_a_pipeline() -> None:
    proof = proof_of([], codes=(1,))
    proof = replace(proof, setup=replace(proof.setup, seed=7, strikes=("one", "saving"), links=("my data",)))
    bad = replace(next(one for one in proof.results if one.check == "restart").findings[0], reason="a \x1b[31m word")
    proof = replace(proof, results=(*proof.results[:2], replace(proof.results[2], findings=(bad,)), *proof.results[3:]))
    report = command_proof.report(proof)
    command = "-- python3 train.py 'a|b'"
    assert report.repeat == [
        f"trainmaster drill --seed 7 --link 'my data' {command}",
        f"trainmaster drill --seed 7 --link 'my data' --strike saving {command}",
    ]
    assert report.repeat[1] in drill_report.markdown(report) and "--strike saving" in drill_report.render_html(report)
    suite = ElementTree.fromstring(drill_report.junit(report))
    failures = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    assert failures == ["it starts again by itself"]
    assert int(suite.get("errors", "0")) == sum(result.verdict is Verdict.ERROR for result in proof.results) > 0
    assert suite.find(".//failure").get("message") == "a ?[31m word"  # type: ignore[union-attr]


def test_a_loss_that_is_no_number_is_no_difference_and_spoils_no_report() -> None:
    proof = proof_of(lines_of(11, 40))
    broken = dict.fromkeys(range(1, 41), math.nan)
    proof = replace(proof, reference=replace(proof.reference, losses=broken))
    report = command_proof.report(proof)
    document = json.loads(json.dumps(to_plain(report.document), allow_nan=False))
    assert document["losses"]["undisturbed"][0] == [1, None]
    assert "nan" not in drill_report.render_html(report).lower().split("<svg", 1)[-1].split("</svg", 1)[0]


def test_a_start_that_hangs_where_one_rank_read_no_checkpoint_names_that_rank() -> None:
    run = attempt(*lines_of(1, 40))
    hung = attempt(hung=True, loaded=frozenset({0}), before="SIGKILL", codes=(-9, -9))
    found = dict(
        verdict.judge_all(
            run, run, SHAPE, struck=[], attempts=[run, hung], resumes=[], planned=[], reached=12
        )
    )  # fmt: skip
    assert "rank 1 had read no checkpoint, the others had" in found["ranks"].reason
    assert [name for name, one in found.items() if one.verdict is Verdict.FAIL] == ["ranks", "end"]


def test_batches_of_ranks_that_did_not_load_alike_are_not_judged() -> None:
    run = attempt(*lines_of(1, 40))
    timeline = Timeline(reference={0: REFERENCE, 1: REFERENCE}, savers=frozenset({0}))
    timeline.add("the start", [life(*lines_of(1, 13), saves=[5, 10]), life(*lines_of(1, 13), rank=1)])
    empty = [replace(one, state=None, batches=()) for one in lines_of(11, 11)] + lines_of(12, 16)
    other = [replace(one, batches=one.batches[1:]) for one in lines_of(11, 16)]
    found = timeline.add("SIGKILL", [life(*other), life(*empty, rank=1)])
    claims_ = dict(
        verdict.judge_all(
            run, run, SHAPE, struck=[], attempts=[run, run], resumes=found, planned=[], reached=40
        )
    )  # fmt: skip
    assert [name for name, one in claims_.items() if one.verdict is Verdict.FAIL] == ["ranks"]
    assert "not judged" in claims_["accumulation"].reason


MEANS = dict.fromkeys(range(11, 41), 0.5)  # a mean that began anew


@pytest.mark.parametrize(
    ("lines", "printed", "outcome"),
    [
        (lines_of(11, 40), MEANS, Verdict.WARN),
        ([*lines_of(11, 39), replace(line(40), state="x")], MEANS, Verdict.FAIL),
        ([*lines_of(11, 39), replace(line(40), random={"torch": "x"})], MEANS, Verdict.FAIL),
        ([*lines_of(11, 39), replace(line(40), weights="x")], MEANS, Verdict.FAIL),
        (lines_of(11, 11), {11: 0.5}, Verdict.FAIL),  # no line shows what that step did
        (lines_of(11, 30), MEANS, Verdict.FAIL),  # ten losses of steps that nobody has seen
    ],
)
def test_a_printed_mean_is_no_fault_where_every_step_is_seen_bit_equal(
    lines: list[Line], printed: dict[int, float], outcome: Verdict
) -> None:
    proof = proof_of(lines, printed=printed)
    (losses,) = [result.findings[0] for result in proof.results if result.check == "losses"]
    assert losses.verdict is outcome, losses.reason
    assert "first at step 11: 0.5 instead of" in losses.reason
    assert ("is a mean over steps" in losses.reason) == (outcome is Verdict.WARN)


def test_losses_whose_counter_restarts_are_not_compared(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    points = [(1, 0.9), (2, 0.8), (2, 0.8), (1, 0.7), (3, math.nan)]
    events.write_text(
        "\n".join(json.dumps({"phase": "STEP", "data": {"step": step, "loss": loss}}) for step, loss in points)
    )
    losses, repeated = read_losses(events)
    assert (set(losses), losses[1], repeated) == ({1, 2, 3}, 0.7, {1})
    first = attempt(*lines_of(1, 40), losses=losses, repeated=repeated)
    assert set(first.clear_losses) == {2, 3}
    found = resumes(*lines_of(11, 40))
    second = attempt(*lines_of(11, 40), before="SIGKILL", losses={1: 0.1, 2: 0.8})
    claims_ = dict(
        verdict.judge_all(
            first, first, SHAPE, struck=[], attempts=[first, second], resumes=found, planned=[], reached=40
        )
    )  # fmt: skip
    assert claims_["losses"].verdict is Verdict.PASS and claims_["losses"].reason.startswith("1 losses")


def test_losses_follow_from_what_was_not_restored() -> None:
    proof = proof_of([replace(one, weights="x", state="x") if one.at > 11 else one for one in lines_of(11, 40)])
    assert proof.overall is Overall.FAIL
    losses = next(result.findings[0] for result in proof.results if result.check == "losses")
    assert "from step 12 on" in losses.reason
    assert "does not see" in (losses.action or "")


def test_a_run_that_does_not_start_again_or_come_to_its_end_fails() -> None:
    dead = claims(proof_of([], codes=(1,)))
    assert (dead["restart"], dead["end"], dead["weights"]) == (Verdict.FAIL, Verdict.ERROR, Verdict.ERROR)
    assert claims(proof_of(lines_of(11, 30)))["end"] is Verdict.FAIL
    assert claims(proof_of(lines_of(11, 40), codes=(1,)))["end"] is Verdict.FAIL
    assert claims(proof_of(lines_of(11, 40)))["end"] is Verdict.PASS


def test_a_loop_that_does_all_of_its_steps_again_after_a_resume_fails() -> None:
    proof = proof_of(lines_of(11, 50))
    (end,) = [result.findings[0] for result in proof.results if result.check == "end"]
    assert end.verdict is Verdict.FAIL and "it did 50 steps instead of 40" in end.reason
    assert proof.overall is Overall.FAIL


def test_a_resume_that_hangs_is_killed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, killed = [100.0], list[set[int]]()
    monkeypatch.setattr(outside.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(outside, "_send", lambda pids, _: killed.append(set(pids)))
    watched = outside.Outside(strike=None, folder=tmp_path, witness=tmp_path, quiet_s=60.0)
    for seconds, grows in ((0, True), (50, False), (20, True), (55, False)):
        now[0] += seconds
        if grows:
            (tmp_path / "1.jsonl").write_text(f"{now[0]}" * seconds)
        watched.look(1)
    assert not watched.hung
    now[0] += 10
    watched.look(1)
    watched.look(1)
    assert watched.hung and len(killed) == 1
    run = attempt(*lines_of(1, 40))
    for place, claim in ((1, "restart"), (2, "end")):
        attempts = [replace(run, hung=number == place) for number in range(3)]
        findings = verdict.judge_all(
            run, run, SHAPE, struck=[], attempts=attempts, resumes=[], planned=[], reached=12
        )  # fmt: skip
        assert "hung" in dict(findings)[claim].reason


def test_a_failed_attempt_names_no_log_that_is_removed_with_the_drill(tmp_path: Path) -> None:
    folder = tmp_path / "reference" / "attempt-1"
    folder.mkdir(parents=True)
    (folder / "exit.json").write_text('{"message": "rank 0 exited with 1"}')
    assert last_words(folder) == ("rank 0 exited with 1; --out DIR keeps its log, reference/attempt-1/rank-0.log")


def test_samples_are_told_only_to_a_drill(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    sample([1, 2])
    monkeypatch.setitem(sys.modules, "trainmaster_witness", SimpleNamespace(sample=told.append))  # type: ignore[arg-type]
    sample([3])
    assert told == [[3]]
