"""What `tools/compare_answers.py` takes for a difference between two answers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "tools" / "compare_answers.py"
ANSWER = {"overall": "PASS", "nodes": [{"node": "a", "took_s": 0.5}, {"node": "b", "took_s": 0.1}], "silent": []}


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("compare_answers", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({}, False),
        ({"nodes": [{"node": "a", "took_s": 7.25}, {"node": "b", "took_s": 3.0}]}, False),  # a figure
        ({"overall": "WARN"}, True),
        ({"nodes": [{"node": "a", "took_s": 0.5}, {"node": "b", "took_s": None}]}, True),  # a type
        ({"nodes": [{"node": "a", "took_s": 0.5}]}, True),
        ({"silent": {}}, True),
        ({"notes": []}, True),
    ],
)
def test_keys_types_and_verdicts_are_compared_and_figures_are_not(
    tool: Any, change: dict[str, Any], differs: bool
) -> None:
    before, after = (sorted(tool.describe(one)) for one in (ANSWER, {**ANSWER, **change}))
    assert (before != after) == differs


@pytest.mark.spawns
def test_both_trees_run_the_command_and_the_lines_of_one_alone_are_printed(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, line in (("before", "by 3"), ("after", "by 4")):
        package = tmp_path / name / "src" / "trainmaster"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        text = f"{tmp_path / name}\nat 2026-01-02T03:04:05Z\n{line}"
        (package / "__main__.py").write_text(f"import sys\nprint({text!r})\nsys.exit(3)\n")
    monkeypatch.setattr(tool, "AFTER", tmp_path / "after")
    assert tool.compare("a row", ("verb --json",), tmp_path / "before", tmp_path / "work")
    assert capsys.readouterr().out == "| a row | 3 | 4 | 2 differ |\n    - by 3\n    + by 4\n"
    assert not tool.compare("a row", ("verb",), tmp_path / "after", tmp_path / "work")
