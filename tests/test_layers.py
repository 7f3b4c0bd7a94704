"""Who may import whom. The table is the architecture; this reads every import of the package and holds it to it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "trainmaster"
FILES = sorted(PACKAGE.rglob("*.py"))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a folder may import: ours anywhere, third-party on import, third-party inside functions."""

    ours: frozenset[str] = frozenset()
    third: frozenset[str] = frozenset()
    third_lazy: frozenset[str] = frozenset()
    ours_lazy: frozenset[str] = frozenset()


def rule(ours: str = "", third: str = "", third_lazy: str = "", ours_lazy: str = "") -> Rule:
    words = (ours, third, third_lazy, ours_lazy)
    ours_, third_, third_lazy_, ours_lazy_ = (frozenset(text.split()) for text in words)
    return Rule(ours=ours_, third=third_, third_lazy=third_lazy_, ours_lazy=ours_lazy_)


NODE_HALF = "core node checks models datasets train"
ALL = frozenset(
    (
        "core node checks models datasets train bench estimate agent targets storage cluster store control pages "
        "report web sim client cli"
    ).split()
)

TABLE = {
    "core": rule(),
    "node": rule("core"),
    "checks": rule("core node"),
    "models": rule("core", "torch", "safetensors"),
    "datasets": rule("core", "torch", "tokenizers datasets huggingface_hub pyarrow"),
    "train": rule("core node models datasets storage", "torch", "amzn_sagemaker_checkpointing"),
    "bench": rule("core node models datasets train", "torch"),
    "estimate": rule("core bench"),
    "agent": rule(NODE_HALF),
    "storage": rule("core", third_lazy="obstore"),
    "targets": rule("core storage", third_lazy="asyncssh kr8s boto3 httpx"),
    "cluster": rule("core node checks bench targets storage", third_lazy="asyncssh"),
    "store": rule("core", "sqlalchemy alembic"),
    "control": rule("core targets storage store", third_lazy="httpx apprise yaml"),
    "pages": rule("core store"),
    "report": rule("core store pages", "jinja2 markupsafe"),
    "web": rule(
        "core store storage control pages report",
        "fastapi starlette anyio jinja2 markupsafe pydantic prometheus_client",
    ),
    "sim": rule("core targets", "fastapi", "xxhash"),
    "cli": rule("core cluster", "typer rich yaml", "uvicorn httpx", ours_lazy=" ".join(ALL)),
    "client": rule("core", third_lazy="httpx"),
    "__main__": rule("cli"),
    "__init__": rule(ours_lazy="client"),
}


@dataclass(frozen=True, kw_only=True)
class Import:
    """One import: the module's dotted name, its line, and whether it waits inside a function."""

    name: str
    line: int
    lazy: bool


def imports(tree: ast.AST, *, lazy: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name=alias.name, line=node.lineno, lazy=lazy)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide where a thing comes from"
            for alias in node.names:
                yield Import(name=f"{node.module}.{alias.name}", line=node.lineno, lazy=lazy)
        else:
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _type_checking(node)
            yield from imports(node, lazy=lazy or inside)


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def offences(folder: str, source: str) -> list[str]:
    """What in this source the table forbids a file of this folder."""
    allowed, found = TABLE[folder], []
    for item in imports(ast.parse(source)):
        top, *rest = item.name.split(".")
        if top == "trainmaster":
            other = rest[0] if rest else ""
            fine = other in {folder, "__version__"} | allowed.ours | (allowed.ours_lazy if item.lazy else set())
            # `from trainmaster import cli` names a folder; `from trainmaster import X` of anything else is ours too.
            if not fine:
                found.append(f"line {item.line}: {folder} may not import {other or 'the whole package'}")
        elif top not in sys.stdlib_module_names | allowed.third | (allowed.third_lazy if item.lazy else set()):
            where = "inside a function" if item.lazy else "on import"
            found.append(f"line {item.line}: {folder} may not import {top} {where}")
    return found


def folder_of(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_follow_the_table(path: Path) -> None:
    folder = folder_of(path)
    assert folder in TABLE, f"{folder} has no row in the import table: decide what it may import"
    assert offences(folder, path.read_text()) == []


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("core", "from trainmaster.node.host import Host"),
        ("core", "import torch"),
        ("core", "def f():\n    import yaml"),
        ("node", "from trainmaster.checks import run"),
        ("checks", "import torch"),
        ("train", "from trainmaster import control"),
        ("agent", "import torch"),
        ("agent", "from trainmaster.store import reads"),
        ("targets", "import boto3"),
        ("store", "from trainmaster.control.submit import submit"),
        ("control", "import fastapi"),
        ("pages", "from trainmaster.web import app"),
        ("cli", "from trainmaster.store import reads"),
        ("cli", "import uvicorn"),
        ("store", "import trainmaster"),
    ],
)
def test_an_upward_import_is_an_offence(folder: str, source: str) -> None:
    assert offences(folder, source)


def test_every_row_of_the_table_is_a_folder_or_still_to_come() -> None:
    still_to_come: set[str] = set()
    there = {folder_of(path) for path in FILES}
    assert set(TABLE) - there <= still_to_come
