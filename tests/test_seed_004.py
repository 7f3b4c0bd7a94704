"""tests/seed_004.md holds: every checkbox of its list has one row, each named test exists, and none is skipped."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "tests" / "seed_004.md").read_text()
ROWS = [
    (section, checkbox, file, name)
    for section, part in re.findall(r"^## (\d\.\d) [^\n]*\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    for checkbox, file, name in re.findall(r"^\| (.+?) \| `([\w/.]+)::(\w+)` \|$", part, re.MULTILINE)
]
# How many checkboxes each section of the seed has, counted there.
SECTIONS = {
    "1.1": 9, "1.2": 9, "1.3": 8, "2.1": 10, "2.2": 9, "2.3": 8, "3.1": 8, "3.2": 10, "3.3": 8, "4.1": 4,
    "4.2": 4, "4.3": 3, "4.4": 5, "4.5": 4, "4.6": 7, "5.1": 12, "5.2": 8, "6.1": 16, "6.2": 9, "6.3": 7,
    "7.1": 7, "7.2": 6, "7.3": 7, "7.4": 7, "8.1": 6, "8.2": 6,
}  # fmt: skip


def functions(file: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_checkbox_of_the_list_has_its_row() -> None:
    listed = re.findall(r"^(\d\.\d) (.+)$", PAGE.partition("## The list")[2], re.MULTILINE)
    assert [(section, checkbox) for section, checkbox, _, _ in ROWS] == listed
    assert {section: sum(1 for row in listed if row[0] == section) for section in SECTIONS} == SECTIONS


@pytest.mark.parametrize("file", sorted({file for _, _, file, _ in ROWS}))
def test_every_named_test_exists_and_runs(file: str) -> None:
    there = functions(file)
    for _, checkbox, where, name in ROWS:
        if where == file:
            assert name in there, f"{checkbox}: {file} has no {name}"
            text = ast.unparse(there[name])
            assert "mark.skip" not in text and "mark.xfail" not in text, f"{name} does not run"


def test_no_two_checkboxes_share_a_test() -> None:
    named = [(file, name) for _, _, file, name in ROWS]
    assert len(set(named)) == len(named)
