"""YAML at the border: faults carry file and line, a key written twice is a fault, overrides go in by path."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.core.errors import SpecError, UsageError
from trainmaster.core.spec import parse_spec
from trainmaster.documents import yaml_file


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def faults(path: Path) -> list[str]:
    with pytest.raises(SpecError) as caught:
        yaml_file.load(path).read(parse_spec)
    return [str(fault) for fault in caught.value.faults]


def test_a_fault_names_its_line(tmp_path: Path) -> None:
    text = "name: a\ncommand:\n  - ok\n  - 7\nresources:\n  nodes: 0\n"
    assert [fault.split(" ")[0] for fault in faults(write(tmp_path, text))] == ["job.yaml:4:", "job.yaml:6:"]


def test_a_missing_field_stands_where_its_section_begins(tmp_path: Path) -> None:
    (fault,) = faults(write(tmp_path, "# a comment\ncommand: [ok]\n"))
    assert fault.startswith("job.yaml:1: name: missing")


def test_a_key_written_twice_is_a_fault(tmp_path: Path) -> None:
    (fault,) = faults(write(tmp_path, "name: a\nname: b\ncommand: [ok]\n"))
    assert fault == "job.yaml:2: name: written twice (first on line 1); keep one"


@pytest.mark.parametrize(
    "text", ["name: [", "name: a\n  b: c", "\tname: a", "a: &x [*x]", "!!python/object:os.system {}"]
)
def test_what_is_not_yaml_is_told_with_its_line(tmp_path: Path, text: str) -> None:
    assert faults(write(tmp_path, text))


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words"])
def test_what_is_not_a_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert faults(write(tmp_path, text))


def test_a_billion_laughs_are_not_laughed(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40)]
    assert faults(write(tmp_path, "\n".join(lines)))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        yaml_file.load(tmp_path / "no.yaml")


def test_overrides_go_in_by_path() -> None:
    value = yaml_file.override({"train": {"steps": 1}}, ["train.steps=20", "train.optimizer.lr=0.5", "name=x"])
    assert value == {"train": {"steps": 20, "optimizer": {"lr": 0.5}}, "name": "x"}
    with pytest.raises(UsageError, match="key=value"):
        yaml_file.override({}, ["steps"])
    with pytest.raises(UsageError, match="no fields"):
        yaml_file.override({"a": 1}, ["a.b=1"])


def test_a_fault_of_an_override_names_the_command_line_and_not_the_file(tmp_path: Path) -> None:
    document = yaml_file.load(write(tmp_path, "name: a\ncommand: [ok]\nresources:\n  nodes: 0\n"))
    words = ["limits.timeout_s=soon", "nmae=b", "env.X=7"]
    with pytest.raises(SpecError) as caught:
        document.read(lambda value: parse_spec(yaml_file.override(value, words)), words)
    found = sorted(str(fault).partition(": ")[0] + ": " + str(fault).split(": ")[1] for fault in caught.value.faults)
    assert found == [
        "command line: env.X", "command line: limits.timeout_s", "command line: nmae", "job.yaml:4: resources.nodes",
    ]  # fmt: skip
    (text,) = (str(fault) for fault in caught.value.faults if "env.X" in str(fault))
    assert text == "command line: env.X: expected text, got 7; write env.X='\"7\"'"


def test_a_key_that_yaml_takes_for_true_is_the_text_that_is_written(tmp_path: Path) -> None:
    """`on:` of a spec, and environment variables named NO or ON."""
    text = "after: {jobs: [a], on: always}\nenv: {NO: '1', yes: '2'}\nflag: on\n"
    assert yaml_file.load(write(tmp_path, text)).value == {
        "after": {"jobs": ["a"], "on": "always"}, "env": {"NO": "1", "yes": "2"}, "flag": True
    }  # fmt: skip
