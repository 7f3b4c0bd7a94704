"""A matrix is expanded to specs, and its mistakes are named by their place."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from trainmaster.core.config.sweep import MOST_BYTES, is_sweep, parse_sweep
from trainmaster.core.errors import SpecError

PLAIN: dict[str, Any] = {"name": "a", "command": ["train", "--lr={lr}"], "env": {"SIZE": "{size}"}}


def test_fields_variables_and_order() -> None:
    assert is_sweep({"matrix": {}}) and not is_sweep(PLAIN) and not is_sweep(None)
    matrix = {"lr": [0.1, 0.2], "size": ["s"], "resources.nodes": [1, 2], "target": ["local"]}
    sweep = parse_sweep({**PLAIN, "matrix": matrix})
    assert (sweep.name, sweep.parallel, len(sweep.trials)) == ("a", 4, 4)
    assert [dict(trial.values)["lr"] for trial in sweep.trials] == [0.1, 0.1, 0.2, 0.2]
    second = sweep.trials[1].spec
    assert (second.name, second.command, second.env) == ("a-2", ("train", "--lr=0.1"), {"SIZE": "s"})
    assert second.resources.nodes == 2
    # The trainer's fields, in a spec of its own.
    document = {"name": "t", "train": {"steps": 5}, "matrix": {"train.optimizer.lr": [0.1, 0.3]}, "parallel": 1}
    trained = parse_sweep(document)
    assert [trial.spec.train.optimizer.lr for trial in trained.trials if trial.spec.train] == [0.1, 0.3]
    assert trained.parallel == 1


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"matrix": None}, "matrix"),
        ({"matrix": {}}, "matrix"),
        ({"parallel": 2}, "matrix"),
        ({"matrix": {"lr": []}}, "matrix.lr"),
        ({"matrix": {"lr": 0.1}}, "matrix.lr"),
        ({"matrix": {"name": ["b"]}}, "matrix.name"),
        ({"matrix": {"trian.steps": [1]}}, "matrix.trian.steps"),
        ({"matrix": {"unused": [1]}}, "matrix.unused"),
        ({"matrix": {"NO": [1]}}, "matrix.NO"),
        ({"matrix": {"command.x": [1]}}, "matrix.command.x"),
        ({"matrix": {"lr": [1]}, "parallel": 0}, "parallel"),
        ({"matrix": {"lr": [1]}, "parallel": True}, "parallel"),
        ({"matrix": {"lr": [1]}, "parallel": 10**23}, "parallel"),
        ({"matrix": {"lr": [date(2026, 1, 1)]}}, "matrix.lr"),
        ({"matrix": {"lr": [None]}}, "matrix.lr"),
        ({"matrix": {"env.A": ["1"], "env": [{"B": "2"}]}}, "matrix.env"),
        ({"matrix": {"lr": list(range(101)), "size": list(range(10))}}, "matrix"),
        ({"matrix": {"lr": [1]}, "name": "x" * 63}, "name"),
        ({"matrix": {"resources.nodes": [1, -1]}}, "resources.nodes"),
    ],
)
def test_a_mistake_is_named_by_its_place(more: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_sweep({**PLAIN, **more})
    assert path in [fault.path for fault in refused.value.faults]


@pytest.mark.slow
@pytest.mark.parametrize("section", ["matrix", "search"])
def test_the_specs_of_a_set_are_bounded_together(section: str) -> None:
    """A request is multiplied by its trials; so is a value by the places where it stands."""
    many: dict[str, Any] = {"matrix": {"lr": list(range(1000))}}
    if section == "search":
        many = {"search": {"parameters": {"lr": {"int": [1, 9]}}, "trials": 1000}}
    assert parse_sweep({**PLAIN, "env": {"PAD": "x" * 9_000}, **many}).total == 1000
    with pytest.raises(SpecError) as caught:
        parse_sweep({**PLAIN, "env": {"PAD": "x" * 900_000}, **many})
    assert [fault.path for fault in caught.value.faults] == [section]
    assert f"{MOST_BYTES:,}" in caught.value.faults[0].message
    with pytest.raises(SpecError, match="a set has at most"):
        parse_sweep({**PLAIN, "command": ["{lr}" * 100_000], "matrix": {"lr": ["x" * 1000]}})


def test_a_value_is_no_template() -> None:
    """Values that name each other would be a gigabyte after ten of them."""
    matrix = {"a": ["{b}"], "b": ["{a}"]}
    (trial,) = parse_sweep({"name": "a", "command": ["{a}", "{b}"], "matrix": matrix}).trials
    assert trial.spec.command == ("{b}", "{a}")


@pytest.mark.parametrize("value", ["a\x00b", ["x", "\x00"], {"A": "\x00"}, {"\x00": "A"}])
def test_a_nul_in_a_value_is_called_one(value: object) -> None:
    document = {"name": "a", "command": ["x"], "matrix": {"env.A": ["1", value]}}
    with pytest.raises(SpecError, match=r"matrix.env.A: a value holds a NUL character"):
        parse_sweep(document)
