"""Parts of a drill of any program: the plan, the folders, the lines of the witness, what is refused."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainmaster.cli._views import command_proof, drill_report
from trainmaster.core.errors import UsageError
from trainmaster.core.results import CheckResult, Overall, Verdict
from trainmaster.core.schema import to_plain
from trainmaster.core.spec import JobSpec
from trainmaster.drill import folders, plan, sample, verdict, witness_log
from trainmaster.drill.attempt import last_words
from trainmaster.drill.plan import Shape, Strike
from trainmaster.drill.run import Proof, Setup
from trainmaster.drill.verdict import Attempt, Struck
from trainmaster.drill.witness_log import Line, Save

from .test_judge import GROUND, life, line, lines_from, resumes

SHAPE = Shape(steps=40, saves=(5, 10, 15, 20, 25, 30, 35, 40), world=2, launcher=True)


def attempt(*lines: Line, codes: tuple[int, ...] = (0,), **more: object) -> Attempt:
    values: dict[str, object] = {
        "label": "", "folder": "/f", "losses": {}, "message": "m", "forced": False, "begun": 0.0, "ended": 1.0,
        "grace_s": 30.0, "stop_s": None, "launcher": False, "struck": False,
    }  # fmt: skip
    return Attempt(codes=codes, lives=(life(*lines),) if lines else (), **{**values, **more})  # type: ignore[arg-type]


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
    alone = replace(SHAPE, world=1, launcher=False)
    names = {strike.name for strike in plan.make(alone, wanted=plan.STRIKES, seed=0)}
    assert set(plan.STRIKES) - names == {"all", "launcher"} == set(plan.left_out(alone))


def test_damage_alone_needs_a_run_that_was_killed() -> None:
    names = [strike.name for strike in plan.make(SHAPE, wanted=["flipped"], seed=0)]
    assert names == ["one", "flipped"]


def test_the_working_folder_is_copied_without_its_tools(tmp_path: Path) -> None:
    work = tmp_path / "work"
    for name in (".git/x", ".venv/x", "a/__pycache__/x", "a/train.py", "data/large"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(name)
    folders.copy_work(work, tmp_path / "copy", links=("data",))
    made = sorted(str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*"))
    assert made == ["a", "a/train.py", "data"]
    assert (tmp_path / "copy/data").readlink() == work / "data"
    folders.copy_work(work, work / "proof" / "work")  # a drill's folder inside it is not copied into itself
    assert not (work / "proof" / "work" / "proof").exists()


def test_a_folder_that_is_too_large_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with (tmp_path / "data").open("wb") as file:
        file.truncate(folders.MOST_BYTES + 1)
    with pytest.raises(UsageError, match="--link NAME"):
        folders.copy_work(tmp_path, tmp_path / "copy")
    folders.copy_work(tmp_path, tmp_path / "linked", links=("data",))
    with pytest.raises(UsageError, match="no such entry"):
        folders.copy_work(tmp_path, tmp_path / "other", links=("data", "nothing"))


def test_checkpoints_are_told_from_logs_and_from_each_other(tmp_path: Path) -> None:
    big = b"x" * 1000
    for name in (
        "checkpoint-5/model.bin",
        "checkpoint-5/optimizer.bin",
        "checkpoint-10/model.bin",
        "run.log",
        "latest",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(big if "/" in name or name == "run.log" else b"10")
    found = folders.find_checkpoints([tmp_path], since=0.0)
    assert sorted([path.name for path in checkpoint.files] for checkpoint in found) == [
        ["model.bin"], ["model.bin", "optimizer.bin"],
    ]  # fmt: skip
    assert folders.find_checkpoints([tmp_path], since=1e12) == []


@pytest.mark.parametrize("kind", plan.DAMAGE)
def test_damage_is_what_it_says(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    file.write_bytes(bytes(1000))
    checkpoint = folders.Checkpoint(name="a", files=(file,), at=0.0)
    assert folders.damage(checkpoint, kind, random.Random(0)) == file
    if kind == "missing":
        assert not file.exists()
    elif kind == "truncated":
        assert file.read_bytes() == bytes(500)
    else:
        assert sum(byte.bit_count() for byte in file.read_bytes()) == 1
        assert len(file.read_bytes()) == 1000


def test_lines_are_read_past_a_torn_one_and_optimizers_are_joined(tmp_path: Path) -> None:
    def item(n: int, optimizer: int, state: str) -> dict[str, object]:
        return {
            "k": "step", "n": n, "o": optimizer, "r": 3, "w": 4, "t": n, "lr": [0.1], "p": f"p{optimizer}", "s": state,
            "g": {}, "b": [["d", f"{n}"]] if optimizer == 0 else [],
        }  # fmt: skip

    items = [item(1, 0, "empty"), item(1, 1, "empty"), item(2, 0, "s"), item(2, 1, "t"), item(3, 0, "s")]
    text = "\n".join(json.dumps(one) for one in [*items, {"k": "save", "n": 2, "r": 3, "t": 9, "path": "/p"}])
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
    ground = verdict.make_ground(attempt(*first), attempt(*second))
    assert (ground.repeatable, ground.random, ground.data, ground.source) == (True, {"torch"}, True, "data")
    moved = verdict.make_ground(attempt(*first), attempt(line(1), replace(line(2), weights="x", batches=())))
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
        ("flipped", (-9,), lines_from(10), Verdict.WARN, "loaded without a word"),
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
    assert verdict.printed_start(losses, reference) == start


def proof_of(second: list[Line], *, codes: tuple[int, ...] = (0,)) -> Proof:
    """A run of 40 steps, killed in step 13 and gone on with these lines."""
    reference = attempt(*lines_of(1, 40), losses={step: 1.0 / step for step in range(1, 41)})
    found = resumes(*second) if second else []
    attempts = [
        attempt(*lines_of(1, 13), codes=(-9,), struck=True),
        attempt(*second, codes=codes, before="SIGKILL", losses={step: 1.0 / step for step in range(11, 41)}),
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
        struck=tuple(struck),
        left_out=plan.left_out(shape),
        results=tuple(CheckResult(check=name, findings=(finding,), took_s=0.0) for name, finding in findings),
        reference=reference,
        attempts=tuple(attempts),
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
    assert "Not tried: a power cut" in text
    assert "Left out: launcher" in text
    page = drill_report.render_html(report)
    assert "killed and resumed" in page and "a|b" in page
    document = json.loads(json.dumps(to_plain(report.document)))
    assert document["strikes"][0]["resumes"] == [
        {"rank": 0, "newest_save": 10, "resumed_from": 10, "lost_steps": 2}
    ]  # fmt: skip
    assert {claim["claim"] for claim in document["claims"]} <= set(command_proof.DOES)


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
