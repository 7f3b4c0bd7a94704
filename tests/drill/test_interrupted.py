"""Ctrl-C in a drill of any program: what was found until then is told and kept, and nothing runs on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainmaster.cli._views import command_proof, drill_report
from trainmaster.cli.main import build
from trainmaster.core.results import Overall, Verdict
from trainmaster.core.spec import JobSpec
from trainmaster.drill import attempt as drill_attempt
from trainmaster.drill.record import Attempt, Interrupted, Proof, References, Setup
from trainmaster.drill.run import CommandDrill
from trainmaster.drill.starts import Starts

from .test_drill_parts import SHAPE, attempt, lines_of
from .test_judge import life, line

RUN = replace(attempt(*lines_of(1, 40)), lives=(life(*lines_of(1, 40), saves=[5, 10, 15, 20, 25, 30, 35, 40]),))
REFERENCES = References(first=RUN, second=RUN, shape=replace(SHAPE, world=1, launcher=False, fewer=None))


def interrupt_at(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch, *, lost: bool = False) -> Proof:
    """The proof of a drill that is interrupted in this start of its struck run. `lost`: it begins at step 0 again."""
    setup = Setup(spec=JobSpec(name="x", command=("true",)), strikes=("after-save", "one", "truncated", "term"))
    drill, begun = CommandDrill(setup, folder), list[str]()

    def start(_self: Starts, _run: str, label: str, **_: object) -> Attempt:
        begun.append(label)
        if len(begun) == number:
            raise KeyboardInterrupt
        first = 0 if len(begun) == 1 or lost else 5
        lines = [replace(line(step), at=100.0 * len(begun) + step) for step in range(first + 1, 9)]
        done = attempt(codes=(-9,), struck=True, begun=100.0 * len(begun))
        return replace(done, lives=(life(*lines, saves=[5] if first == 0 else []),))

    monkeypatch.setattr(Starts, "start", start)
    with pytest.raises(Interrupted) as raised:
        drill.run(REFERENCES)
    assert raised.value.proof.interrupted
    return raised.value.proof


def test_what_was_found_is_told_and_the_rest_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = interrupt_at(3, tmp_path, monkeypatch)
    assert [one.strike.name for one in proof.struck] == ["after-save"], "the resume after the second was not seen"
    found = {result.check: result.findings[0] for result in proof.results}
    for name in ("start", "lost", "weights", "optimizer", "random", "data"):
        assert found[name].verdict is Verdict.PASS, (name, found[name])
    for name in ("truncated", "stop", "end", "processes"):
        assert "not run: the drill was interrupted" in found[name].reason
    words = found["strikes"].reason
    assert words.startswith("interrupted, and not run to the end: SIGKILL of rank 0, in step ")
    assert "SIGTERM" in words and "truncated" in words and "right after the first save" not in words
    assert proof.overall is Overall.INCOMPLETE


def test_a_fault_that_was_seen_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = interrupt_at(3, tmp_path, monkeypatch, lost=True)
    found = {result.check: result.findings[0] for result in proof.results}
    assert found["start"].verdict is Verdict.FAIL and proof.overall is Overall.FAIL
    assert found["end"].verdict is Verdict.ERROR


def test_before_any_resume_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = interrupt_at(2, tmp_path, monkeypatch)
    assert proof.struck == () and proof.overall is Overall.INCOMPLETE
    found = {result.check: result.findings[0] for result in proof.results}
    assert found.pop("reference").verdict is Verdict.PASS
    assert {finding.verdict for finding in found.values()} == {Verdict.ERROR, Verdict.SKIP}
    assert {one.reason for name, one in found.items() if one.verdict is Verdict.ERROR and name != "strikes"} == {
        "not run: the drill was interrupted"
    }


def test_claims_that_were_not_judged_are_one_line_and_a_table_without_rows_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = command_proof.report(interrupt_at(2, tmp_path, monkeypatch))
    unjudged = [claim for claim, finding in report.claims if finding.reason == "not run: the drill was interrupted"]
    assert report.rows == [] and len(unjudged) > 5
    drill_report.show(report)
    shown = capsys.readouterr().out
    page = drill_report.render_html(report).partition("<main>")[2]
    for text in (shown, drill_report.markdown(report), page):
        assert "resumed from" not in text and "Kills" not in text
        assert text.count("the drill was interrupted") == 1
        (line,) = [line for line in text.split("<tr>" if text == page else "\n") if "not judged" in line]
        assert "; ".join(unjudged) in line and drill_attempt.AGAIN in line
    assert drill_report.junit(report).count("<error") > len(unjudged), "each is a case of its own"
    seen = command_proof.report(interrupt_at(3, tmp_path / "seen", monkeypatch))
    drill_report.show(seen)
    assert "resumed from" in capsys.readouterr().out
    assert "resumed from" in drill_report.markdown(seen) and "Kills" in drill_report.render_html(seen)


@pytest.mark.parametrize("keep", [True, False])
def test_the_verb_keeps_the_report_and_ends_as_an_interrupt_does(
    keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = interrupt_at(3, tmp_path / "drill", monkeypatch)

    def stop(_self: CommandDrill) -> Proof:
        raise Interrupted(proof)

    monkeypatch.setattr(CommandDrill, "run", stop)
    monkeypatch.chdir(tmp_path)
    words = ["--out", "proof"] if keep else []
    done = CliRunner().invoke(build(), ["drill", *words, "--", "true"])
    assert done.exit_code == 130, done.output
    assert "interrupted: " in done.stdout and "INCOMPLETE" in done.stdout
    assert ("are in proof" if keep else "nothing of it is kept: --out DIR") in " ".join(done.stderr.split())
    if keep:
        document = json.loads(Path("proof/drill.json").read_text())
        assert (document["interrupted"], document["overall"]) == (True, "INCOMPLETE")
        assert len(document["strikes"]) == 1
        assert {path.name for path in Path("proof").iterdir()} >= {"drill.md", "junit.xml"}
    shown = CliRunner().invoke(build(), ["drill", "--json", "--", "true"])
    assert (shown.exit_code, json.loads(shown.stdout)["interrupted"]) == (130, True)


@pytest.mark.proof
@pytest.mark.spawns
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_in_its_first_run_it_leaves_a_report_and_no_process(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    words = [sys.executable, "-c", "import time; open('begun', 'w').close(); time.sleep(600)"]
    drill = subprocess.Popen(
        [sys.executable, "-m", "trainmaster", "drill", "--out", str(tmp_path / "proof"), "--", *words],
        cwd=tmp_path / "work",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "proof" / "reference" / "work" / "begun").exists():
        assert drill.poll() is None, drill.communicate()
        time.sleep(0.02)
    drill.send_signal(number)
    told, errors = drill.communicate()
    assert drill.returncode == 130, errors
    assert "interrupted: no strike was run to its end" in told and str(tmp_path / "proof") in "".join(errors.split())
    document = json.loads((tmp_path / "proof/drill.json").read_text())
    assert (document["overall"], document["interrupted"]) == ("INCOMPLETE", True)
    mark = str(tmp_path).encode()
    assert [path for path in Path("/proc").glob("[0-9]*/environ") if mark in read_or_nothing(path)] == []


def read_or_nothing(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""
