"""The client's answers and the server's document are written apart; here they are held together."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from trainmaster.client import answers
from trainmaster.store import open_database
from trainmaster.web.app import create_app

# What the document calls each of them.
NAMES = {
    answers.JobLine: "JobLine",
    answers.Jobs: "JobsPage",
    answers.Submitted: "Job",
    answers.Run: "Run",
    answers.Job: "JobPage",
    answers.Step: "Step",
    answers.Iteration: "Iteration",
    answers.Details: "Details",
    answers.Epoch: "EpochRow",
    answers.Evaluation: "Evaluation",
    answers.Event: "EventRow",
    answers.LogStream: "LogStream",
    answers.Artifact: "Artifact",
    answers.Check: "CheckRow",
    answers.Cost: "Cost",
    answers.Spending: "CostPage",
    answers.BudgetSpent: "BudgetLine",
    answers.Budget: "Budget",
    answers.Token: "TokenRow",
    answers.Health: "Health",
}
# Shapes of pages and of rows that have a name twice: found by where they stand.
INSIDE = {
    answers.Attempt: ("JobPage", "attempts"),
    answers.Curves: ("Run", "curves"),
    answers.Preflight: ("Run", "preflight"),
    answers.JobSpent: ("CostPage", "jobs"),
    answers.ProjectSpent: ("CostPage", "projects"),
    answers.ProjectCost: ("Costs", "projects"),
}
OF_THE_CLIENT = {(answers.Submitted, "new")}  # told by the status code


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("home")
    app = create_app(open_database(folder / "trainmaster.db"), folder, reconcile=False)
    found: dict[str, Any] = app.openapi()["components"]["schemas"]
    return found


def test_every_answer_of_the_client_is_compared() -> None:
    kinds = {kind for kind in vars(answers).values() if dataclasses.is_dataclass(kind) and isinstance(kind, type)}
    assert kinds - NAMES.keys() - INSIDE.keys() == {answers.JobCost}
    assert kinds >= NAMES.keys() | INSIDE.keys()


@pytest.mark.parametrize("kind", [*NAMES, *INSIDE], ids=lambda kind: kind.__name__)
def test_what_the_client_reads_is_what_the_server_promises(kind: type[Any], shapes: dict[str, Any]) -> None:
    shape = shapes[NAMES[kind]] if kind in NAMES else _inside(shapes, *INSIDE[kind])
    promised, always = shape["properties"].keys(), set(shape.get("required", ()))
    for field in dataclasses.fields(kind):
        if (kind, field.name) in OF_THE_CLIENT:
            continue
        assert field.name in promised, f"{kind.__name__}.{field.name} is in no answer"
        if field.default is dataclasses.MISSING:
            assert field.name in always, f"{kind.__name__}.{field.name} may be missing in an answer"


def _inside(shapes: dict[str, Any], name: str, field: str) -> dict[str, Any]:
    """The shape that a field refers to, through lists and through "or null"."""
    here = shapes[name]["properties"][field]
    here = here.get("items", here)
    here = next((part for part in here.get("anyOf", ()) if "$ref" in part), here)
    found: dict[str, Any] = shapes[here["$ref"].rpartition("/")[2]]
    return found
