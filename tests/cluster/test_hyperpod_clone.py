"""The framework of a clone: each part that is missing is named with what mends it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trainmaster.cluster.hyperpod import framework
from trainmaster.core.results import Finding

CLONE = Path(__file__).parents[2] / framework.PLACE


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files in a folder of their own, beside programs that stand in for kubectl and make."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("kubectl", "make"):
        (programs / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(programs))
    shutil.copytree(CLONE, tmp_path / "clone" / framework.PLACE)
    return tmp_path / "clone"


def failed(clone: Path) -> dict[str, Finding]:
    found = {result.check: result.findings[0] for result in framework.check_framework(clone)}
    return {name: finding for name, finding in found.items() if finding.verdict == "fail"}


def test_a_whole_clone_passes(clone: Path) -> None:
    assert failed(clone) == {}


@pytest.mark.parametrize(
    ("name", "check", "words", "action"),
    [
        ("bin/kubectl", "programs", "not installed: kubectl", "install it"),
        (f"clone/{framework.PLACE}/{framework.MANIFEST}", "files", framework.MANIFEST, "whole clone"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(clone: Path, name: str, check: str, words: str, action: str) -> None:
    (clone.parent / name).unlink()
    (finding,) = failed(clone).values()
    assert list(failed(clone)) == [check] and words in finding.reason
    assert action in (finding.action or "")


def test_scripts_that_cannot_be_started_are_told_with_the_command_that_mends_it(clone: Path) -> None:
    (clone / framework.PLACE / framework.SCRIPTS[0]).chmod(0o644)
    assert "chmod +x" in (failed(clone)["scripts"].action or "")


def test_a_target_without_a_rule_is_named(clone: Path) -> None:
    (clone / framework.PLACE / framework.TARGETS).write_text("run:\n\ttrue\n")
    assert "test-quick" in failed(clone)["make_targets"].reason
