"""Optuna asked by ask and tell: the same rows give the same proposal and the same verdict, in any process."""

from __future__ import annotations

import builtins
import subprocess
import sys
from typing import Any

import pytest

from trainmaster.control.queueing import study
from trainmaster.control.queueing.study import Seen
from trainmaster.core.config.search import Search
from trainmaster.core.errors import MissingExtra
from trainmaster.core.schema import build

PARAMETERS: dict[str, Any] = {
    "lr": {"float": [0.0001, 0.1], "log": True}, "width": {"int": [8, 64], "step": 8},
    "mix": [1, True, "1", None, [1, 2], {"a": 1}], "drop": {"float": [0.0, 0.5], "step": 0.25},
}  # fmt: skip


def make(**more: Any) -> Search:
    return build(Search, {"parameters": PARAMETERS, "trials": 20, "startup_trials": 3, **more})


def loss(values: dict[str, Any]) -> float:
    return abs(values["lr"] - 0.01) + values["width"] / 100 + values["drop"]


def run(search: Search, count: int = 12) -> list[dict[str, Any]]:
    """Proposals, each after the result of the one before."""
    seen: list[Seen] = []
    for _ in range(count):
        values = study.propose(search, seen)
        seen.append(Seen(values=values, state="complete", value=loss(values)))
    return [dict(trial.values) for trial in seen]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_proposals_are_of_the_space_and_follow_from_seed_and_results(sampler: str) -> None:
    made = run(make(sampler=sampler))
    assert made == run(make(sampler=sampler)) != run(make(sampler=sampler, seed=1))
    for values in made:
        assert 0.0001 <= values["lr"] <= 0.1 and values["width"] in range(8, 65, 8)
        assert values["drop"] in (0.0, 0.25, 0.5) and isinstance(values["width"], int)
        assert any(values["mix"] is choice or values["mix"] == choice for choice in PARAMETERS["mix"])
    assert len({str(values) for values in made}) > 6, "each trial has a seed of its own"
    assert {type(values["mix"]) for values in made} - {str}, "choices come back as they were written"


def test_tpe_learns_from_results_and_sees_what_runs() -> None:
    """The same trials with other results, or still running, give other proposals: not with every seed, by chance."""
    learns, sees = 0, 0
    for seed in range(6):
        search = make(seed=seed)
        done = [Seen(values=values, state="complete", value=loss(values)) for values in run(search, 8)]
        other = [Seen(values=trial.values, state="complete", value=-(trial.value or 0)) for trial in done]
        best = min(trial.value for trial in done if trial.value is not None)
        going = [Seen(values=trial.values) if trial.value == best else trial for trial in done]
        proposals = [study.propose(search, trials) for trials in (done, other, going)]
        learns, sees = learns + (proposals[0] != proposals[1]), sees + (proposals[0] != proposals[2])
        assert study.propose(make(goal="max", seed=seed), other) == proposals[0], "goal: max is the mirror of min"
    assert learns >= 4 and sees >= 3, (learns, sees)


def test_a_grid_proposes_every_combination_once() -> None:
    parameters = {"lr": {"float": [0.1, 0.3], "step": 0.1}, "mix": [1, True, None]}
    search = build(Search, {"parameters": parameters, "sampler": "grid", "seed": 7})
    seen: list[Seen] = []
    for number in range(search.total):
        state = ("running", "complete", "failed")[number % 3]
        value = 1.0 if state == "complete" else None
        seen.append(Seen(values=study.propose(search, seen), state=state, value=value))
    made = [(trial.values["lr"], repr(trial.values["mix"])) for trial in seen]
    assert sorted(made) == [(lr, mix) for lr in (0.1, 0.2, 0.3) for mix in ("1", "None", "True")]


@pytest.mark.spawns
def test_another_process_with_other_hashes_proposes_the_same() -> None:
    code = "from control.test_study import make, run; print(run(make(), 8))"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in (1, 2)
    }  # fmt: skip
    assert texts == {f"{run(make(), 8)}\n"}


def complete(values: dict[str, Any], *reports: float) -> Seen:
    told = dict(enumerate(reports, 1))
    return Seen(values=values, state="complete", value=reports[-1], reports=told)


@pytest.mark.parametrize("sizes", [[1] * 6, [6], [2, 4], [3, 3]])
@pytest.mark.parametrize(("pruner", "stop"), [("none", None), ("median", 4), ("asha", 4)])
def test_a_verdict_does_not_depend_on_how_many_reports_come_at_once(
    pruner: str, stop: int | None, sizes: list[int]
) -> None:
    search = make(pruner=pruner, warmup_steps=2, reduction=2)
    values = run(search, 5)
    seen = [complete(one, 5.0, 4.0, 3.0, 2.0, 1.0, 0.5) for one in values[:4]]
    if pruner == "asha":  # what the pruner kept with the others, when they passed its rungs
        kept = {"completed_rung_0": 4.0, "completed_rung_1": 2.0}
        seen = [Seen(values=one.values, state="complete", value=0.5, attributes=kept) for one in seen]
    reports = [(step, 3.0) for step in range(1, 7)]  # as good as the others up to step 3
    told: dict[int, float] = {}
    attributes: dict[str, Any] = {}
    for size in sizes:
        new = [report for report in reports if report[0] not in told][:size]
        mine = Seen(values=values[4], reports=told, attributes=attributes)
        stopped, attributes = study.find_stop(search, [*seen, mine], 5, new)
        told |= dict(new)
        if stopped is not None:
            break
    assert stopped == stop


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "optuna":
            raise ModuleNotFoundError(name)
        return load(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtra, match=r"search needs packages .*\[search\]"):
        study.propose(make(), [])
