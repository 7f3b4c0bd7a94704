"""The report of a drill: when and with what it was made, and one count of its strikes in every line."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from trainmaster import __version__
from trainmaster.cli._views import command_proof, drill_report
from trainmaster.cli.main import build
from trainmaster.cli.training import _command_drill
from trainmaster.cli.training import drill as drill_verb
from trainmaster.core.errors import UsageError
from trainmaster.core.results import CheckResult, Overall, Verdict, fail
from trainmaster.core.schema import to_plain
from trainmaster.core.spec import JobSpec
from trainmaster.drill import attempt, plan, verdict, witness_log
from trainmaster.drill.attempt import DrillFailed
from trainmaster.drill.plan import NOT_SEEN, Strike
from trainmaster.drill.record import Setup, Struck
from trainmaster.drill.run import CommandDrill

from .test_drill_parts import lines_of, proof_of


def test_a_report_says_when_and_with_which_versions_it_was_made() -> None:
    proof = proof_of(lines_of(11, 40))
    assert proof.reference is not None
    seen = replace(proof, reference=replace(proof.reference, versions={"python": "3.12.1", "torch": "2.9<b>"}))
    report = command_proof.report(seen)
    words = f"Begun 2001-09-09 01:46:40 UTC with trainmaster {__version__}, python 3.12.1, torch 2.9"
    assert words in drill_report.markdown(report)
    assert f"{words}&lt;b&gt;." in drill_report.render_html(report)
    document = json.loads(json.dumps(to_plain(report.document)))
    assert document["at"] == "2001-09-09T01:46:40Z"
    assert document["versions"] == {"trainmaster": __version__, "python": "3.12.1", "torch": "2.9<b>"}
    unseen = drill_report.markdown(command_proof.report(replace(proof, reference=None)))
    assert "no version of the program was seen" in unseen


def test_versions_are_those_that_the_program_itself_has_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject = Path(plan.__file__).parent / "inject"
    spec = importlib.util.spec_from_file_location("digests", inject / "trainmaster_digests.py")
    assert spec is not None and spec.loader is not None
    digests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digests)
    fake = importlib.util.module_from_spec(importlib.util.spec_from_loader("lightning", loader=None))  # type: ignore[arg-type]
    fake.__version__ = "9.8"  # type: ignore[attr-defined]
    monkeypatch.setitem(digests.sys.modules, "lightning", fake)
    monkeypatch.delitem(digests.sys.modules, "accelerate", raising=False)
    found = digests.versions()
    assert (found["python"], found["lightning"]) == (platform.python_version(), "9.8") and "accelerate" not in found
    assert witness_log.read_versions(tmp_path) == {}
    (tmp_path / "7.jsonl").write_text(json.dumps({"k": "versions", "versions": found}) + "\n")
    assert witness_log.read_versions(tmp_path) == found


def test_every_line_counts_the_strikes_in_one_way(capsys: pytest.CaptureFixture[str]) -> None:
    """Two kills of one strike were two in the last line and one in the claim; one that was left out was not reached."""
    proof = proof_of(lines_of(11, 40))
    (one,) = proof.struck
    strikes = [Strike(name=name, after=0) for name in ("one", "twice", "missing", "stop")]
    struck = (
        replace(one, strike=strikes[0]),
        replace(one, strike=strikes[1]),
        replace(one, strike=strikes[1]),
        Struck(strike=strikes[2], reached=False, died_at=12, skipped="one file"),
        Struck(strike=strikes[3], reached=True, died_at=None),
    )
    proof = replace(proof, planned=tuple(strikes), struck=struck, left_out={"all": "one rank", "ranks": "one rank"})
    finding = verdict._strikes(struck, strikes)
    report = command_proof.report(proof)
    assert (finding.verdict, finding.reason) == (Verdict.PASS, "3 strikes, each where it was planned")
    assert report.sentence == "3 of 3 strikes run, 3 left out, 2 attempts of the struck run, in 3 s"
    assert report.left_out == ["all (one rank)", "ranks (one rank)", "missing (one file)"]
    assert report.document["left_out"] == {"all": "one rank", "ranks": "one rank", "missing": "one file"}
    assert "Left out: missing (one file)." in report.setting
    drill_report.show(report)
    shown = capsys.readouterr().out
    assert "left out: all (one rank); ranks (one rank); missing (one file)" in shown
    assert f"not seen: {NOT_SEEN}" in shown, "what a PASS says nothing of stands beside it"
    assert len({row[1] for row in report.rows}) == len(report.rows), "a row stood there twice"
    assert report.rows[2][1] == "the second SIGKILL of strike 2"
    assert [row[0] for row in report.rows] == ["1", "2", "2", "", "3"]
    assert report.document["counts"] == {"planned": 3, "done": 3, "left_out": 3}
    half = (*struck[:2], replace(struck[2], reached=False), *struck[3:])
    assert verdict._strikes(half, strikes).verdict is Verdict.ERROR, "the second kill did not happen"
    assert command_proof.report(replace(proof, struck=half)).sentence.startswith("2 of 3 strikes run, 3 left out")


@pytest.mark.parametrize(("names", "words"), [(("one",), "1 strike,"), (("flipped",), "up to 2 strikes,")])
def test_the_plan_counts_the_kill_that_a_copy_needs(
    names: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _command_drill.show_plan(Setup(spec=JobSpec(name="x", command=("true",)), strikes=names))
    assert f"then {words}" in " ".join(capsys.readouterr().err.split())


def test_a_lost_optimizer_sends_nobody_to_his_data_where_no_loader_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two undisturbed runs were bit-equal, and the report said that the weights were not repeatable."""
    made = verdict.make_ground
    monkeypatch.setattr(verdict, "make_ground", lambda *runs: replace(made(*runs), source=None))
    second = [replace(one, state=None if at == 0 else one.state, weights=f"x{at}" if at else one.weights)
              for at, one in enumerate(lines_of(11, 40))]  # fmt: skip
    found = {result.check: result.findings[0] for result in proof_of(second).results}
    assert found["optimizer"].verdict is Verdict.FAIL
    assert found["data"].action == found["buffers"].action == "mend first what failed"


def test_the_last_line_tells_a_right_resume_from_a_damaged_disk() -> None:
    """It read `FAIL  12 of 12 strikes`, as if all of them had failed."""
    right = proof_of(lines_of(11, 40))
    right = replace(right, results=tuple(one for one in right.results if one.verdict is not Verdict.ERROR))
    bad = [CheckResult(check=name, findings=(fail("x", action="y"),), took_s=0.0) for name in ("flipped", "power")]
    proof = replace(right, results=(*right.results, *bad))
    words = (
        "it resumes right, but is not safe against a damaged or failing disk: 2 claims fail (a flipped bit; a power "
    )
    assert proof.overall is Overall.FAIL
    assert command_proof.report(proof).sentence.startswith(f"{words}cut). 1 of 1 strikes run, 2 left out")
    bad = [CheckResult(check="optimizer", findings=(fail("x", action="y"),), took_s=0.0), *bad[:1]]
    proof = replace(proof, results=(*(one for one in right.results if one.check != "optimizer"), *bad))
    assert command_proof.report(proof).sentence.startswith("2 claims fail (optimizer state; a flipped bit). 1 of 1")
    assert command_proof.report(replace(proof, results=right.results)).sentence.startswith("1 of 1 strikes run")


def test_a_start_that_is_judged_by_another_claim_is_not_counted_as_one_that_needed_no_help() -> None:
    proof = proof_of(lines_of(11, 40))
    (one,) = proof.struck
    dead = replace(proof.attempts[1], lives=(), codes=(1,))
    power = Struck(strike=Strike(name="power", after=0), reached=True, died_at=12, branch=dead)
    flipped = replace(one, strike=Strike(name="flipped", after=0), branch=proof.attempts[1])
    found = verdict._restarts(proof.attempts, [one, power, flipped])
    assert (found.verdict, found.reason) == (
        Verdict.PASS,
        "1 start with the checkpoints as they were saved, none needed help; judged below, each by its own claim: "
        "2 after damage, strikes at the disk or with fewer ranks",
    )


def test_a_line_of_progress_says_up_to_which_step_the_run_goes(capsys: pytest.CaptureFixture[str]) -> None:
    """`100 steps` stood behind a start that did six of them."""
    with drill_verb._progress(quiet=False) as say:
        say("undisturbed run", 0, 1)
        say("to the end", 26, 40)
        say("to the end", 27, 40)
    assert capsys.readouterr().err.splitlines() == ["undisturbed run", "to the end: up to step 40"]


def test_an_option_of_drill_behind_the_dashes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "rank 0 of 1 exited with 2: train.py: error: unrecognized arguments: --strike list"

    def fails(_drill: CommandDrill) -> None:
        raise DrillFailed(said)

    monkeypatch.setattr(CommandDrill, "run", fails)
    setup = Setup(spec=JobSpec(name="x", command=("python3", "train.py", "--strike", "list", "--seed", "3")))
    with pytest.raises(DrillFailed, match=r"; --strike went to the program: options of drill stand before --$"):
        _command_drill.run(setup, tmp_path, lambda *_: None)
    said = "rank 0 of 1 exited with 1: ValueError: --seed must be odd"
    with pytest.raises(DrillFailed, match=r"must be odd$"):
        _command_drill.run(setup, tmp_path, lambda *_: None)


def fail_with(error: Exception, monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    """The verb, where its drill ends with an error."""

    def fails(_drill: CommandDrill) -> None:
        raise error

    monkeypatch.setattr(CommandDrill, "run", fails)
    return CliRunner().invoke(build(guarded=True), ["drill", *words, "--", "python3", "train.py"])


def test_json_is_printed_where_the_undisturbed_run_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    done = fail_with(DrillFailed("the undisturbed run failed: it exited with 5"), monkeypatch, "--json")
    assert done.exit_code == 3
    document = json.loads(done.stdout)
    assert (document["overall"], document["interrupted"]) == ("INCOMPLETE", False)
    assert document["reason"] == "the undisturbed run failed: it exited with 5"
    assert document["claims"][0]["verdict"] == "error" and document["claims"][0]["action"]
    assert "exited with 5" in done.stderr
    assert fail_with(DrillFailed("x"), monkeypatch).stdout == ""


@pytest.mark.parametrize(
    "cause",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        shutil.Error([("a", "b", "[Errno 28] No space left on device: 'a' -> 'b'")]),
    ],
)
def test_a_full_disk_is_named_with_its_folder(
    cause: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = fail_with(cause, monkeypatch, "--json", "--out", str(tmp_path / "proof"))
    said = " ".join(done.stderr.split())
    assert done.exit_code == 3 and f"{tmp_path / 'proof'}: No space left on device" in said, done.stderr
    assert "name a folder on another disk with --out" in said
    assert "No space left" in json.loads(done.stdout)["reason"]


def test_a_record_that_is_missing_on_a_full_disk_is_not_the_fault_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attempt.no_room(tmp_path, DrillFailed("no record")) is None
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    assert "4 KiB free" in str(attempt.no_room(tmp_path, DrillFailed("no record")))


def test_a_report_that_cannot_be_kept_is_shown_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(CommandDrill, "run", lambda _: proof_of(lines_of(11, 40)))
    monkeypatch.setattr(drill_report, "save", save)
    words = ["drill", "--out", str(tmp_path / "proof"), "--", "python3", "train.py"]
    done = CliRunner().invoke(build(guarded=True), words)
    assert done.exit_code == 3 and "PASS" in done.stdout and "No space left on device" in done.stderr


def test_a_folder_of_a_drill_that_failed_undisturbed_is_used_again(tmp_path: Path) -> None:
    """Nothing was proved in it; it was refused as not empty."""
    out = tmp_path / "proof"
    for name in ("witness", "reference/attempt-1"):
        (out / name).mkdir(parents=True)
    (out / "witness" / "trainmaster_witness.py").touch()
    drill_verb._refuse_full(out)
    with drill_verb._folder(out) as folder:
        assert list(folder.iterdir()) == []
    for name in ("reference", "struck", "notes.txt"):
        (out / "witness").mkdir(exist_ok=True)
        (out / "witness" / "trainmaster_witness.py").touch()
        (out / name).mkdir()
        if name != "reference":
            with pytest.raises(UsageError, match="not empty; name a new folder, or remove it"):
                drill_verb._refuse_full(out)
            with drill_verb._folder(out) as folder:
                assert (folder / name).exists()
            (out / name).rmdir()
    shutil.rmtree(out / "witness")
    with pytest.raises(UsageError, match="not empty"):
        drill_verb._refuse_full(out)
