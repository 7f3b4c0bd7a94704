"""Half as many ranks after a kill: which commands tell their number, and how the resume is judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainmaster.core.results import Verdict
from trainmaster.core.spec import JobSpec, Resources
from trainmaster.drill import plan, ranks
from trainmaster.drill.plan import Strike
from trainmaster.drill.record import Struck

from . import matrix, recipes
from .test_drill_parts import SHAPE, attempt
from .test_judge import lines_from, resumes


@pytest.mark.parametrize(
    ("words", "halved"),
    [
        ("torchrun --nproc-per-node 8 train.py --lr 1", "torchrun --nproc-per-node 4 train.py --lr 1"),
        ("torchrun --nproc_per_node=3 train.py", "torchrun --nproc_per_node=1 train.py"),
        ("accelerate launch --num_processes 2 train.py", "accelerate launch --num_processes 1 train.py"),
        ("torchrun --nproc-per-node 1 train.py", None),
        ("torchrun --nproc-per-node gpu train.py", None),
        ("torchrun train.py --nproc-per-node", None),
        ("python train.py", None),
    ],
)
def test_the_number_of_ranks_in_a_command(words: str, halved: str | None) -> None:
    found = ranks.halve(JobSpec(name="x", command=tuple(words.split())))
    assert (None if found is None else " ".join(found[0].command or ())) == halved


def test_ranks_that_the_agent_starts_are_halved_too() -> None:
    spec = JobSpec(name="x", command=("python",), resources=Resources(processes_per_node=4))
    found = ranks.halve(spec)
    assert found is not None and (found[0].resources.processes_per_node, found[1]) == (2, 2)


def test_the_strike_is_left_out_with_its_reason() -> None:
    assert "no fewer" in plan.left_out(replace(SHAPE, world=1, fewer=None))["ranks"]
    assert "does not tell" in plan.left_out(replace(SHAPE, fewer=None))["ranks"]
    assert "ranks" not in plan.left_out(SHAPE)


@pytest.mark.parametrize(
    ("start", "codes", "printed", "outcome", "words"),
    [
        (10, (-9,), None, Verdict.PASS, "went on from step 10, on 1 rank"),
        (5, (-9,), None, Verdict.FAIL, "from step 5, although step 10 was saved"),
        (0, (-9,), None, Verdict.FAIL, "began at step 0, although step 10"),
        (None, (1,), None, Verdict.WARN, "ended with 1: the run needs as many ranks"),
        (None, (0,), None, Verdict.FAIL, "trained nothing"),
        (-1, (-9,), None, Verdict.ERROR, "was not seen"),
        (-1, (-9,), 10, Verdict.PASS, "went on from step 10"),
        (-2, (-9,), None, Verdict.FAIL, "the state of the optimizer is empty"),
    ],
)
def test_a_resume_on_other_ranks(
    start: int | None, codes: tuple[int, ...], printed: int | None, outcome: Verdict, words: str
) -> None:
    """A start of -1 is one of weights and states that nobody had, as shards are; -2 one at step 10 without momentum."""
    changes: dict[int, dict[str, object]] = {-1: {"weights": "x", "state": "y"}, -2: {"state": None}}
    lines = [] if start is None else lines_from(max(start, 10 if start < 0 else 0), **changes.get(start, {}))
    one = Struck(
        strike=Strike(name="ranks", after=0), reached=True, died_at=12, newest=10, branch=attempt(*lines, codes=codes),
        resumes=tuple(resumes(*lines)) if lines else (),
    )  # fmt: skip
    finding = ranks.judge(one, printed)
    assert (finding.verdict, words in finding.reason) == (outcome, True), finding.reason
    assert ranks.judge(replace(one, branch=replace(attempt(), hung=True)), printed).verdict is Verdict.FAIL


@pytest.mark.spawns
@pytest.mark.matrix(one_in=36, of="drills of the scripts of others")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", [False, True])
def test_a_run_goes_on_with_half_of_its_ranks(fault: bool, tmp_path: Path) -> None:
    """Broken, it finds its files by the number of ranks, and begins anew with another one."""
    changes = recipes.OTHER_WORLD if fault else ()
    with recipes.warm_python("torchrun") as python:
        proof = recipes.drill(
            tmp_path, "torchrun", strikes=("ranks", "unfinished"), changes=changes, python=(python, "-m"), ranks=2
        )
    found = {one.check: one.findings[0] for one in proof.results}
    if fault:
        assert found["other ranks"].verdict is Verdict.FAIL, found["other ranks"].reason
        assert "the run began at step 0" in found["other ranks"].reason
        return
    assert matrix.judge(proof, "none") is None
    assert "on 1 rank" in found["other ranks"].reason
    assert "`latest` naming" in found["unfinished"].reason and "went on from step" in found["unfinished"].reason
