"""`search:` of a spec: spaces of values, and mistakes named by their place."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from trainmaster.core.config import presets
from trainmaster.core.config.search import FloatRange, IntRange, Search, parse_space
from trainmaster.core.config.sweep import fill, is_sweep, parse_sweep
from trainmaster.core.errors import SpecError
from trainmaster.core.schema import build, to_plain
from trainmaster.core.spec import parse_spec

PLAIN: dict[str, Any] = {"name": "a", "command": ["train", "--lr={lr}"], "env": {"SEED": "0"}}
PARAMETERS: dict[str, Any] = {
    "lr": {"float": ["1e-4", 0.1], "log": True}, "resources.nodes": {"int": [1, 4]}, "env.SEED": ["1", "2", "3"],
}  # fmt: skip


def test_a_search_holds_its_space_and_checks_every_end_and_choice() -> None:
    document = {**PLAIN, "search": {"parameters": PARAMETERS, "trials": 30}, "parallel": 3}
    assert is_sweep(document)
    sweep = parse_sweep(document)
    assert sweep.search is not None and (sweep.total, sweep.parallel, sweep.name) == (30, 3, "a")
    assert sweep.search.spaces["lr"] == FloatRange(low=1e-4, high=0.1, log=True)
    assert sweep.search.spaces["resources.nodes"] == IntRange(low=1, high=4)
    tried = {key: {trial.values[key] for trial in sweep.trials} for key in PARAMETERS}
    assert tried == {"lr": {1e-4, 0.1}, "resources.nodes": {1, 4}, "env.SEED": {"1", "2", "3"}}
    assert parse_sweep({**document, "parallel": None}).parallel == 1
    assert build(Search, to_plain(sweep.search)) == sweep.search, "as it comes back from a row"


def test_a_trial_is_made_of_the_template_with_what_the_submission_changed() -> None:
    """A preset is read anew for each trial: fields of the first one's preset do not stay."""
    first, second = sorted(presets.names())[:2]
    document = {
        "name": "a", "train": {"steps": 5, "model": {"preset": first}},
        "search": {"parameters": {"train.model.preset": [first, second]}, "sampler": "grid"},
    }  # fmt: skip
    sweep = parse_sweep(document)
    assert sweep.total == 2 and sweep.template["target"] == "local" and "search" not in sweep.template
    for number, preset in enumerate((first, second), 1):
        spec = parse_spec(fill(sweep.template, {"train.model.preset": preset}, number))
        alone = parse_spec({"name": f"a-{number}", "train": {"steps": 5, "model": {"preset": preset}}})
        assert spec.train == alone.train and spec.name == alone.name


def test_a_grid_counts_its_combinations() -> None:
    parameters = {"lr": {"float": [0.1, 0.5], "step": 0.1}, "resources.nodes": {"int": [2, 6], "step": 2}}
    search = build(Search, {"parameters": parameters, "sampler": "grid"})
    assert search.total == 15
    assert parse_space(parameters["lr"], path="").grid() == (0.1, 0.2, 0.3, 0.4, 0.5)
    assert parse_space({"int": [2, 6], "step": 2}, path="").grid() == (2, 4, 6)


def one(space: Any, **more: Any) -> dict[str, Any]:
    return {"search": {"parameters": {"lr": space}, "trials": 4, **more}}


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"search": None}, "search"),
        ({"search": {"trials": 4}}, "search.parameters"),
        ({"search": {"parameters": {}, "trials": 4}}, "search.parameters"),
        ({"search": {"parameters": {"lr": [1]}}}, "search.trials"),
        ({**one([1]), "matrix": {"lr": [1]}}, "matrix"),
        ({**one([1]), "parallel": 0}, "parallel"),
        ({**one([1]), "name": "x" * 62}, "name"),
        (one([1], trials=0), "search.trials"),
        (one([1], trials=1001), "search.trials"),
        (one([1], trials=True), "search.trials"),
        (one([1], seed=-1), "search.seed"),
        (one([1], seed=2**32), "search.seed"),
        (one([1], goal="best"), "search.goal"),
        (one([1], sampler="tpee"), "search.sampler"),
        (one([1], pruner="mean"), "search.pruner"),
        (one([1], metric="a b"), "search.metric"),
        (one([1], metric="sk-proj-4f9aQ2xL8vB7nC3d"), "search.metric"),
        (one([1], warmup_steps=0), "search.warmup_steps"),
        (one([1], reduction=1), "search.reduction"),
        (one([1], startup_trials=0), "search.startup_trials"),
        (one([1], budget=3), "search.budget"),
        (one([]), "search.parameters.lr"),
        (one(list(range(101))), "search.parameters.lr"),
        (one([1, 2, 1]), "search.parameters.lr"),
        (one([date(2026, 1, 1)]), "search.parameters.lr"),
        (one([float("nan")]), "search.parameters.lr"),
        (one(["\x00"]), "search.parameters.lr"),
        (one(0.1), "search.parameters.lr"),
        (one({"float": 1}), "search.parameters.lr.float"),
        (one({"float": [0, 1, 2]}), "search.parameters.lr.float"),
        (one({"float": [0, 1], "int": [0, 1]}), "search.parameters.lr"),
        (one({"float": [0, 1], "low": 0}), "search.parameters.lr.low"),
        (one({"float": [0, 1], "stpe": 1}), "search.parameters.lr.stpe"),
        (one({"float": [0, float("inf")]}), "search.parameters.lr.high"),
        (one({"float": [0, 1e301]}), "search.parameters.lr.high"),
        (one({"int": [0, 10**16]}), "search.parameters.lr.high"),
        (one({"int": [0.5, 3]}), "search.parameters.lr.low"),
        (one({"float": [1, 1]}), "search.parameters.lr"),
        (one({"float": [0, 1], "log": True}), "search.parameters.lr.log"),
        (one({"int": [1, 9], "log": True, "step": 2}), "search.parameters.lr.step"),
        (one({"int": [1, 4], "step": 2}), "search.parameters.lr.step"),
        (one({"float": [0, 1], "step": 0.3}), "search.parameters.lr.step"),
        (one({"float": [0, 1]}, sampler="grid"), "search.parameters.lr"),
        (one({"int": [1, 2000]}, sampler="grid"), "search.parameters.lr"),
        (one([1, 2, 3], sampler="grid"), "search.trials"),
        ({"search": {"parameters": {f"env.A{n}": ["1"] for n in range(33)}, "trials": 1}}, "search.parameters"),
        ({"search": {"parameters": {f"env.A{n}": [str(m) for m in range(100)] for n in range(11)}, "trials": 1}},
         "search.parameters"),
        ({"search": {"parameters": {"unused": [1]}, "trials": 1}}, "search.parameters.unused"),
        ({"search": {"parameters": {"trian.steps": [1]}, "trials": 1}}, "search.parameters.trian.steps"),
        ({"search": {"parameters": {"command.x": [1]}, "trials": 1}}, "search.parameters.command.x"),
        ({"search": {"parameters": {"resources.nodes": {"int": [-1, 2]}}, "trials": 1}},
         "search.parameters.resources.nodes"),
        ({"search": {"parameters": {"resources.nodes": {"float": [1, 2]}}, "trials": 1}},
         "search.parameters.resources.nodes"),
        *(
            ({"search": {"parameters": {key: ["x"]}, "trials": 1}}, f"search.parameters.{key}")
            for key in ("name", "project", "target", "workdir", "allow", "rent", "rent.gpu", "resume_from")
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_named_by_its_place(more: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_sweep({**PLAIN, **more})
    assert path in [fault.path for fault in refused.value.faults]


@pytest.mark.parametrize("step", [1e-300, 1e-25, 5e-324])
def test_a_step_that_is_too_small_is_a_fault_and_no_crash(step: float) -> None:
    with pytest.raises(SpecError, match="is too small"):
        parse_space({"float": [0, 1], "step": step}, path="x")
