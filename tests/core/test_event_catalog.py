"""The catalogue describes every event that this package emits, and refuses any other in tests."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from trainmaster.core.event_catalog import CATALOG, CHECK_VARIABLE, Kind, find, list_faults
from trainmaster.core.events import Phase
from trainmaster.node.emit import Emitter

PACKAGE = Path(__file__).parents[2] / "src" / "trainmaster"


@functools.cache
def emit_calls() -> tuple[tuple[str, str, frozenset[str], str], ...]:
    return tuple(_emit_calls())


def _emit_calls() -> Iterator[tuple[str, str, frozenset[str], str]]:
    """Phase, event and stated keywords of every call of `emit` or `_emit` in the package, with its place."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "emit(" in text else ():
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            words = [word.value for word in node.args if isinstance(word, ast.Constant)]
            if node.func.attr in ("emit", "_emit") and len(words) == 2:
                stated = frozenset(keyword.arg for keyword in node.keywords if keyword.arg is not None)
                yield str(words[0]), str(words[1]), stated, f"{path.name}:{node.lineno}"


def test_every_emitted_event_and_field_is_in_the_catalogue() -> None:
    for phase, event, stated, place in emit_calls():
        entry = find(phase, event)
        assert entry is not None, f"{place}: {phase} {event}"
        fields = {field.name for field in entry.fields} | ({"epoch"} if entry.has_epoch else set())
        assert stated <= fields, f"{place}: {stated - fields}"


def test_every_event_of_ours_in_the_catalogue_is_emitted_somewhere() -> None:
    ours = {(entry.phase, entry.event) for entry in CATALOG if entry.writers != ("workload",)}
    assert {(phase, event) for phase, event, _, _ in emit_calls()} == ours


def test_entries_are_unique_and_their_words_are_known() -> None:
    names = [(entry.phase, entry.event) for entry in CATALOG]
    assert len(names) == len(set(names))
    assert {entry.phase for entry in CATALOG} <= set(Phase)
    assert {field.kind for entry in CATALOG for field in entry.fields} <= set(get_args(Kind))
    for entry in CATALOG:
        fields = [field.name for field in entry.fields]
        assert len(fields) == len(set(fields)), entry


GOOD: dict[str, Any] = {"step": 3, "path": "/x", "seconds": 1.5, "tier": "disk"}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"step": True}, "step: True is not int"),
        ({"step": None}, "step: None is not int"),
        ({"path": 3}, "path: 3 is not text"),
        ({"extra": 1}, "extra: unknown field"),
    ],
)
def test_a_field_of_another_name_or_type_is_a_fault(changes: dict[str, Any], fault: str | None) -> None:
    faults = list_faults("CHECKPOINT", "loaded", {**GOOD, **changes})
    assert faults == ([] if fault is None else [f"CHECKPOINT loaded: {fault}"])


def test_a_missing_field_an_unknown_event_and_a_stray_epoch_are_faults() -> None:
    assert list_faults("CHECKPOINT", "loaded", {}) == [f"CHECKPOINT loaded: {name}: missing" for name in GOOD]
    assert list_faults("CHECKPOINT", "lost", {})
    assert list_faults("ITERATION", "start", {}), "only workloads emit it"
    assert list_faults("CHECKPOINT", "loaded", GOOD, epoch=1) == ["CHECKPOINT loaded: epoch: not a field of this event"]


def test_tests_run_with_the_check_and_users_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Emitter(tmp_path / "events.jsonl") as emitter, pytest.raises(ValueError, match="MOOD good"):
        emitter.emit("MOOD", "good")
    assert (tmp_path / "events.jsonl").read_bytes() == b""
    monkeypatch.delenv(CHECK_VARIABLE)
    with Emitter(tmp_path / "events.jsonl") as emitter:
        assert emitter.emit("MOOD", "good").seq == 1
