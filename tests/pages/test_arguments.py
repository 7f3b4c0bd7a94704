"""Commands taken apart: a flag, a setting, or a word by its place, and only what differs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmaster.pages.compare import find_differences
from trainmaster.pages.parts.arguments import find_different, name_arguments


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["python", "train.py", "--lr", "0.1"], {"word 1": "python", "word 2": "train.py", "--lr": "0.1"}),
        (["x", "--lr=0.1", "--name=a=b"], {"word 1": "x", "--lr": "0.1", "--name": "a=b"}),
        (["x", "--bf16", "--seed", "-3", "-v"], {"word 1": "x", "--bf16": "given", "--seed": "-3", "-v": "given"}),
        (["x", "model.lr=1e-3", "+a=b"], {"word 1": "x", "model.lr": "1e-3", "+a": "b"}),
        (["x", "--data", "a", "--data", "b"], {"word 1": "x", "--data": "a b"}),
        (["x", "--empty="], {"word 1": "x", "--empty": ""}),
        (["bash", "-c", "python t.py --lr 0.1"],
         {"word 1": "bash", "-c": "python", "word 2": "t.py", "--lr": "0.1"}),
        (["bash", "-c", "echo it's --lr 0.1"], {"word 1": "bash", "-c": "echo it's --lr 0.1"}),
        (["x", "--" + "a" * 200 + "=1"], {"word 1": "x", "word 2": "--" + "a" * 200 + "=1"}),
    ],
)  # fmt: skip
def test_arguments_by_name(words: list[str], named: dict[str, str]) -> None:
    assert name_arguments(words) == named


def test_only_what_differs_is_found() -> None:
    long = [f"--option-{number}={number}" for number in range(40)]
    found = find_different({"a": ["python", *long, "--lr", "0.1"], "b": ["python", *long, "--lr", "0.2", "--bf16"]})
    assert found == {"--lr": {"a": "0.1", "b": "0.2"}, "--bf16": {"b": "given"}}


def test_a_difference_of_specs_names_the_flag_and_the_absent_value() -> None:
    specs = {
        "a": {"command": ["python", "t.py", "--lr", "0.1"]},
        "b": {"command": ["python", "t.py", "--lr", "0.2", "--bf16"]},
    }
    differences, _ = find_differences(specs)
    assert {part.field: part.values for part in differences} == {
        "command --lr": (("0.1", ("a",)), ("0.2", ("b",))),
        "command --bf16": (("given", ("b",)), ("–", ("a",))),
    }


def test_commands_that_differ_in_spelling_alone_are_shown_whole() -> None:
    specs = {"a": {"command": ["t", "--lr", "0.1"]}, "b": {"command": ["t", "--lr=0.1"]}}
    (part,), _ = find_differences(specs)
    assert part.field == "command" and [value for value, _ in part.values] == [
        '["t", "--lr", "0.1"]',
        '["t", "--lr=0.1"]',
    ]


def test_beside_a_run_without_a_command_it_is_shown_whole() -> None:
    (part,), _ = find_differences({"a": {"command": ["t", "--lr", "0.1"]}, "b": {"name": None}})
    assert part.field == "command" and [value for value, _ in part.values] == ['["t", "--lr", "0.1"]', "–"]


words = st.lists(st.text("ab1-=. ", min_size=1, max_size=8), min_size=1, max_size=6)


@given(words, words)
def test_any_two_commands_that_differ_have_a_difference(one: list[str], other: list[str]) -> None:
    differences, _ = find_differences({"a": {"command": one}, "b": {"command": other}})
    assert bool(differences) == (one != other)
    assert all(part.field == "command" or len(part.field) <= 88 for part in differences)


def test_a_difference_behind_what_is_shown_is_a_difference() -> None:
    long = "/data/" + "x" * 200
    specs = {run: {"name": "a", "command": ["train.py", "--data", long + run]} for run in ("1", "2")}
    ((part,), _) = find_differences(specs)
    assert part.field == "command --data" and len(part.values) == 2
    assert all(value.startswith("/data/xxx") and len(value) <= 120 for value, _ in part.values)


def test_a_long_script_is_not_split() -> None:
    assert len(name_arguments(["bash", "-c", "echo --lr 1; " * 1000])) <= 3


def test_of_thousands_of_flags_the_whole_command_is_shown() -> None:
    specs = {run: {"command": ["a", *(f"--f{run}_{n}=1" for n in range(5000))]} for run in ("1", "2")}
    ((part,), _) = find_differences(specs)
    assert part.field == "command" and len(part.values) == 2


def test_a_value_that_reads_like_none_is_told_from_a_flag_that_is_absent() -> None:
    (part,) = find_differences({"a": {"command": ["t", "--a=–"]}, "b": {"command": ["t"]}})[0]
    assert dict(part.values) == {'"–"': ("a",), "–": ("b",)}
