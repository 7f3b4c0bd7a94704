"""What the documents say is true: generated pages are fresh, examples are valid, links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import typer
import yaml

from test_layers import FILES, PACKAGE, TABLE
from trainmaster.cli.main import build as build_cli
from trainmaster.core.config.sweep import KEYS, is_sweep, parse_sweep
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.events import parse
from trainmaster.core.schema import build
from trainmaster.core.spec import parse_spec
from trainmaster.documents import yaml_file

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("compat/**/*.md")])
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))


@pytest.mark.spawns
def test_the_spec_page_is_what_the_code_says() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "write_spec_doc.py"), "--check"], check=True)


@pytest.mark.spawns
def test_the_events_page_is_what_the_catalogue_says() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "write_events_doc.py"), "--check"], check=True)


@pytest.mark.spawns
def test_the_table_of_checks_is_what_the_checks_state() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "write_check_table.py"), "--check"], check=True)


@pytest.mark.spawns
def test_the_page_of_who_resumes_is_what_its_evidence_says() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "write_who_resumes.py"), "--check"], check=True)


@pytest.mark.spawns
def test_the_pictures_are_of_the_pages_as_they_are() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "picture_sources.py"), "--check"], check=True)


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_valid_spec(path: Path) -> None:
    document = yaml_file.load(path)
    if "name" in document.value:
        assert document.read(parse_sweep if is_sweep(document.value) else parse_spec).name
    else:
        assert document.read(lambda value: build(TrainConfig, value)).steps


def _job_blocks(page: Path) -> list[dict[str, Any]]:
    """The YAML blocks of a page that are jobs or sets; those without a job's fields are files of other kinds."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in map(yaml.safe_load, blocks) if {"name", "command", "train", *KEYS} & set(block)]


@pytest.mark.parametrize("page", [page for page in GUIDES if _job_blocks(page)], ids=lambda page: page.name)
def test_every_job_of_the_guides_is_accepted_as_it_stands(page: Path) -> None:
    for block in _job_blocks(page):
        assert (parse_sweep if is_sweep(block) else parse_spec)(block).name


def test_the_function_of_the_script_guide_writes_when_a_step_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its time a step is in no goodput and gives no forecast."""
    page = (ROOT / "docs" / "guides" / "script.md").read_text()
    (code,) = [
        block for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "def report" in block
    ]
    names: dict[str, Any] = {}
    exec(code, names)
    monkeypatch.setenv("TRAINMASTER_EVENTS", str(tmp_path / "events"))
    before = datetime.now(UTC)
    names["report"](10, loss=2.31)
    event, fault = parse((tmp_path / "events").read_bytes(), zone=UTC)
    assert event is not None and fault is None and event.data == {"step": 10, "loss": 2.31}
    assert event.ts is not None and before - timedelta(seconds=1) <= event.ts <= datetime.now(UTC)


def test_the_guides_have_jobs() -> None:
    assert {"sweep.md", "script.md", "lambda.md"} <= {page.name for page in GUIDES if _job_blocks(page)}


def test_what_the_commands_of_the_readme_leave_in_a_clone_is_ignored() -> None:
    folders = set(re.findall(r"--out (\w+)/", (ROOT / "README.md").read_text()))
    assert folders, "the README has such commands"
    assert {f"/{folder}/" for folder in folders} <= set((ROOT / ".gitignore").read_text().splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text()):
        assert (page.parent / unquote(link)).exists(), f"{page.name} links to {link}"


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_into_a_page_names_one_of_its_headings(page: Path) -> None:
    for link, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        to = page.parent / unquote(link) if link else page
        assert to.suffix != ".md" or anchor in _anchors(to), f"{page.name} links to {link}#{anchor}"


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDES], ids=lambda page: page.name)
def test_every_command_of_the_readme_and_the_guides_is_one_the_command_line_takes(page: Path) -> None:
    # Every block is matched with its language: else the end of one in YAML is taken for the beginning of the next.
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    text = "".join(block for language, block in blocks if language in {"", "bash"}).replace("\\\n", " ")
    lines = re.findall(r"^trainmaster ([a-z].*)$", text, re.MULTILINE)
    assert len(lines) >= (10 if page.name == "README.md" else 0)
    for line in lines:
        command: Any = typer.main.get_command(build_cli())
        words = shlex.split(re.split(r" [|>] | && | {4,}or: ", line)[0], comments=True)
        while hasattr(command, "get_command") and (words or not command.invoke_without_command):
            name, *words = words
            command = command.get_command(None, name)
        context = command.make_context(command.name, words)  # it parses, runs nothing
        if page.name == "script.md" and command.name == "fetch":
            assert Path("..") in context.params["to"].parents, "the next submit uploads what lies beside the spec"


def test_the_readme_compares_with_every_peer_of_the_benchmark() -> None:
    """The best peer of the same run is quoted, not the weakest."""
    source = ast.parse((ROOT / "benchmarks" / "train_gpu.py").read_text())
    (peers,) = (
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["PEERS"]
    )
    assert set(peers) >= {"hf", "liger", "titan"}
    (line,) = (
        line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("Measured on one H200")
    )
    for name in ("torchtitan 0.2.2", "Liger"):
        assert name in line.partition("Against transformers compiled")[0]


def test_every_make_target_in_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z0-9-]+)`|^make ([a-z0-9-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {first or second for first, second in named} <= targets


ARCHITECTURE = ROOT / "docs" / "ARCHITECTURE.md"


def import_table() -> str:
    """The table of tests/test_layers.py as the page shows it; a failing test prints what to write."""
    lines = [
        "| folder | ours | ours, inside functions | third-party | third-party, inside functions |",
        "|---|---|---|---|---|",
    ]
    everything = {folder for folder in TABLE if not folder.startswith("__")}
    for folder, rule in TABLE.items():
        if folder.startswith("__"):
            continue
        lazy = "everything" if rule.ours_lazy >= everything else ", ".join(sorted(rule.ours_lazy))
        cells = [", ".join(sorted(rule.ours)), lazy, ", ".join(sorted(rule.third)), ", ".join(sorted(rule.third_lazy))]
        lines.append(f"| {folder} | " + " | ".join(cell or "–" for cell in cells) + " |")
    return "\n".join(lines)


def test_the_architecture_page_has_the_import_table() -> None:
    assert import_table() in ARCHITECTURE.read_text(), f"docs/ARCHITECTURE.md should hold:\n{import_table()}"


def test_the_architecture_page_has_the_tree() -> None:
    listed = re.findall(r"^\| `(\w+)/` \|", ARCHITECTURE.read_text(), re.MULTILINE)
    folders = {path.parent.relative_to(PACKAGE).parts[0] for path in FILES if path.parent != PACKAGE}
    assert len(listed) == len(set(listed))
    assert set(listed) == folders == {folder for folder in TABLE if not folder.startswith("__")}


def test_every_file_that_the_architecture_page_names_exists() -> None:
    named = re.findall(r"`([a-z_]+/[\w/]+\.py)`", ARCHITECTURE.read_text())
    assert len(named) > 50
    assert [name for name in named if not ((PACKAGE / name).exists() or (ROOT / name).exists())] == []


def test_each_tour_counts_its_files() -> None:
    tours = re.findall(
        r"^### [^\n]* \((\d+) files\)\n(.*?)(?=^#|\Z)", ARCHITECTURE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(tours) == 4
    for count, text in tours:
        steps = "\n".join(line for line in text.splitlines() if re.match(r"\d+\. ", line))
        assert len(set(re.findall(r"`([a-z_]+/[\w/]+\.py)`", steps))) == int(count), text


def test_every_word_of_the_glossary_has_one_meaning() -> None:
    words = re.findall(r"^\| ([a-z -]+) \|", (ROOT / "docs" / "GLOSSARY.md").read_text(), re.MULTILINE)[1:]
    assert len(words) >= 30
    assert words == sorted(set(words))


def test_every_page_that_the_code_refers_to_exists() -> None:
    named = {page for path in FILES for page in re.findall(r"docs/[\w/-]+\.md", path.read_text())}
    assert named
    assert [page for page in sorted(named) if not (ROOT / page).exists()] == []


def test_the_workflows_call_targets_that_exist() -> None:
    folder = ROOT / ".github" / "workflows"
    every_push, nightly = (yaml.safe_load((folder / name).read_text()) for name in ("ci.yml", "nightly.yml"))
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [step["run"] for step in every_push["jobs"]["test"]["steps"] if "run" in step]
    assert commands == ["make test"] and "test" in targets
    whole = [name for words in nightly["jobs"]["whole"]["strategy"]["matrix"]["target"] for name in words.split()]
    assert "matrices" in whole and set(whole) <= targets
    assert f"`make {' '.join(whole)}`" in (ROOT / "CONTRIBUTING.md").read_text()
