"""What the documents say is true: generated pages are fresh, examples are valid, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from trainmaster.cli import _yaml_file
from trainmaster.cli.main import build as build_cli
from trainmaster.core.schema import build
from trainmaster.core.spec import parse_spec
from trainmaster.core.train_config import TrainConfig

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_spec_page_is_what_the_code_says() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "write_spec_doc.py"), "--check"], check=True)


def test_the_events_page_is_what_the_catalogue_says() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "write_events_doc.py"), "--check"], check=True)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_valid_spec(path: Path) -> None:
    document = _yaml_file.load(path)
    if "name" in document.value:
        assert document.read(parse_spec).name
    else:
        assert document.read(lambda value: build(TrainConfig, value)).steps


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_command_in_the_readme_is_one_the_command_line_takes() -> None:
    command = typer.main.get_command(build_cli())
    lines = re.findall(r"^trainmaster ([a-z].*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) >= 10
    for line in lines:
        verb, *words = shlex.split(line, comments=True)
        command.commands[verb].make_context(verb, words)  # type: ignore[attr-defined]  # a group; it parses, runs nothing


def test_every_make_target_in_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z0-9-]+)`|^make ([a-z0-9-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {first or second for first, second in named} <= targets
