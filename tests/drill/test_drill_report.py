"""The report of a drill: when and with what it was made, and one count of its strikes in every line."""

from __future__ import annotations

import importlib.util
import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from trainmaster import __version__
from trainmaster.cli._views import command_proof, drill_report
from trainmaster.cli.training import _command_drill
from trainmaster.core.results import Verdict
from trainmaster.core.schema import to_plain
from trainmaster.core.spec import JobSpec
from trainmaster.drill import plan, verdict, witness_log
from trainmaster.drill.plan import Strike
from trainmaster.drill.record import Setup, Struck

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


def test_every_line_counts_the_strikes_in_one_way() -> None:
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
    assert report.sentence == "3 of 3 strikes, 3 left out, 2 attempts, in 3 s"
    assert [row[0] for row in report.rows] == ["1", "2", "2", "", "3"]
    assert report.document["counts"] == {"planned": 3, "done": 3, "left_out": 3}
    half = (*struck[:2], replace(struck[2], reached=False), *struck[3:])
    assert verdict._strikes(half, strikes).verdict is Verdict.ERROR, "the second kill did not happen"
    assert command_proof.report(replace(proof, struck=half)).sentence.startswith("2 of 3 strikes, 3 left out")


@pytest.mark.parametrize(("names", "words"), [(("one",), "1 strike,"), (("flipped",), "up to 2 strikes,")])
def test_the_plan_counts_the_kill_that_a_copy_needs(
    names: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _command_drill.show_plan(Setup(spec=JobSpec(name="x", command=("true",)), strikes=names))
    assert f"then {words}" in " ".join(capsys.readouterr().err.split())
