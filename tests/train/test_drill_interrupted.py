"""Ctrl-C in a drill of our trainer: what was found until then is told, and nothing is left in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainmaster.cli._views import drill_proof
from trainmaster.core.results import Overall, Verdict
from trainmaster.train.drill import plan as plans
from trainmaster.train.drill.record import Attempt
from trainmaster.train.drill.run import CLAIMS, Drill, Interrupted, Proof

from .test_drill_judge import KILLED, OVER, REFERENCE, RESUMED
from .test_drill_plan import CONFIG


def interrupt_after(*attempts: Attempt, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Proof:
    left, memory = list(attempts), set[Path]()

    def start(self: Drill, _label: str, _folder: Path, config: object, **_: object) -> Attempt:
        memory.add(Path(config.checkpoint.memory.folder).parent)  # type: ignore[attr-defined]
        if not left:
            raise KeyboardInterrupt
        return left.pop(0)

    monkeypatch.setattr(Drill, "_attempt", start)
    plan = plans.make(CONFIG, processes=2, other=0, kills=3, seed=0)
    first = replace(plan.attempts[0], damage=False)
    plan = replace(plan, attempts=(first, *(replace(one, damage=False) for one in plan.attempts[1:])))
    with pytest.raises(Interrupted) as raised:
        Drill(plan, folder).run()
    assert memory and not any(path.exists() for path in memory)
    assert raised.value.proof.interrupted
    return raised.value.proof


def test_what_was_found_is_told_and_the_rest_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = replace(RESUMED, codes=(-9, 1))
    proof = interrupt_after(REFERENCE, KILLED, killed, folder=tmp_path, monkeypatch=monkeypatch)
    found = {result.check: result.findings[0] for result in proof.results}
    assert tuple(found) == CLAIMS and proof.overall is Overall.INCOMPLETE
    for name in ("start", "acknowledged", "losses"):
        assert found[name].verdict is Verdict.PASS, found[name]
    for name in ("strikes", "samples", "end", "in place", "processes", "damage"):
        assert found[name].reason == "not run: the drill was interrupted"
    report = drill_proof.report(proof)
    assert report.sentence.startswith("interrupted: 2 of 3 kills, 2 attempts") and report.interrupted
    assert report.document["interrupted"] is True


def test_a_fault_that_was_seen_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = replace(OVER, codes=(-9, 1))
    proof = interrupt_after(REFERENCE, KILLED, again, folder=tmp_path, monkeypatch=monkeypatch)
    assert proof.overall is Overall.FAIL


def test_in_its_first_run_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = interrupt_after(folder=tmp_path, monkeypatch=monkeypatch)
    assert {result.findings[0].reason for result in proof.results} == {"not run: the drill was interrupted"}
    assert drill_proof.report(proof).undisturbed == {}
