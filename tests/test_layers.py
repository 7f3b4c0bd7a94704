"""The import table is the architecture: every import of the package is held to it.

Also refused: import cycles between modules, imports of another package's private names, and files, functions and
folders that have grown too large.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "trainmaster"
FILES = sorted(PACKAGE.rglob("*.py"))
SOURCES = {path: path.read_text() for path in FILES}


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
        "core node checks models datasets train bench estimate agent remote targets storage cluster sagemaker_job "
        "drill store control pages report web sim client cli api documents queueing"
    ).split()
)

TABLE = {
    "core": rule(),
    "queueing": rule(),
    "documents": rule("core", "yaml"),
    "node": rule("core"),
    "checks": rule("core node"),
    "models": rule("core", "torch", "safetensors"),
    "datasets": rule("core", "torch", "tokenizers datasets huggingface_hub pyarrow PIL"),
    # The witness is put into a stranger's process: it has torch, and whatever else is imported there already.
    "drill": rule("core node", third_lazy="torch"),
    "train": rule(
        "core node models datasets storage drill", "torch", "amzn_sagemaker_checkpointing", ours_lazy="documents"
    ),
    "bench": rule("core node models datasets train", "torch"),
    "estimate": rule("core models"),  # only what needs no torch: tests/models/test_numerics.py runs a plan without it
    "remote": rule("core", third_lazy="boto3"),  # boto3 is in every SageMaker container
    "agent": rule(NODE_HALF + " remote"),
    "storage": rule("core", third_lazy="obstore"),
    "targets": rule(
        "core queueing remote storage",
        third_lazy="asyncssh boto3 botocore httpx websockets yaml",
        ours_lazy="documents",
    ),
    "cluster": rule("core node checks bench estimate remote targets storage", third_lazy="asyncssh"),
    "sagemaker_job": rule("core node checks bench storage cluster report"),
    "store": rule("core queueing api", "sqlalchemy alembic"),
    "control": rule(
        "core queueing targets storage store api", third_lazy="httpx apprise optuna yaml", ours_lazy="documents"
    ),
    "api": rule("core"),
    # The history of GPUs and the rules of remedy and readmit are one code, for the command line and the pages.
    "pages": rule("core queueing store api targets", ours_lazy="cluster"),
    "report": rule("core checks store api pages", "jinja2 markupsafe"),
    "web": rule(
        "core store storage control targets api pages report",
        "fastapi starlette anyio jinja2 markupsafe pydantic prometheus_client uvicorn",
        third_lazy="httpx joserfc opentelemetry",
        ours_lazy="cluster documents",
    ),
    "sim": rule("core remote targets", "fastapi", "xxhash"),
    "cli": rule(
        "core api documents", "typer rich yaml", "uvicorn httpx joserfc opentelemetry", ours_lazy=" ".join(ALL)
    ),
    "client": rule("core api", third_lazy="httpx pathspec"),
    "__main__": rule("cli"),
    "__init__": rule(ours_lazy="client"),
}


@dataclass(frozen=True, kw_only=True)
class Import:
    """One import: the module's dotted name, its line, and whether it waits inside a function."""

    name: str
    line: int
    lazy: bool


@functools.cache
def parse(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def imports_of(source: str) -> tuple[Import, ...]:
    return tuple(imports(parse(source)))


def imports(tree: ast.AST, *, lazy: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name=alias.name, line=node.lineno, lazy=lazy)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide where a thing comes from"
            for alias in node.names:
                yield Import(name=f"{node.module}.{alias.name}", line=node.lineno, lazy=lazy)
        elif not isinstance(node, ast.expr):  # no expression holds an import, and most of a file is expressions
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _type_checking(node)
            yield from imports(node, lazy=lazy or inside)


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def offences(folder: str, source: str) -> list[str]:
    """What in this source the table forbids a file of this folder."""
    allowed, found = TABLE[folder], []
    for item in imports_of(source):
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


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted({folder_of(path) for path in FILES}))
def test_imports_follow_the_table(folder: str) -> None:
    assert folder in TABLE, f"{folder} has no row in the import table: decide what it may import"
    files = {path: source for path, source in SOURCES.items() if folder_of(path) == folder}
    found = {str(path.relative_to(PACKAGE)): offences(folder, source) for path, source in files.items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


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
        ("targets", "from trainmaster.documents import yaml_file"),
    ],
)
def test_an_upward_import_is_an_offence(folder: str, source: str) -> None:
    assert offences(folder, source)


def test_every_row_of_the_table_is_a_folder_or_still_to_come() -> None:
    still_to_come: set[str] = set()
    there = {folder_of(path) for path in FILES}
    assert set(TABLE) - there <= still_to_come


# Cycles between modules


def module_of(path: Path) -> str:
    parts = ["trainmaster", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def arrows(source: str, modules: Collection[str]) -> set[str]:
    """The modules that this source imports, anywhere in it.

    `from package import name` is an arrow to `package.name` where that is a module, otherwise to the package itself.
    Python also runs the packages around an imported module; that is no arrow, as no name of them is used.
    """
    found = set()
    for item in imports_of(source):
        name = item.name
        while name and name not in modules:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {""}


def cycles(graph: Mapping[str, Collection[str]]) -> list[str]:
    """Each group of modules that reach one another, as sorted names (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[str] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            at = stack.index(name)
            group = sorted(stack[at:])
            del stack[at:]
            if len(group) > 1 or name in graph[name]:
                found.append(" <-> ".join(group))

    for name in sorted(graph):
        if name not in number:
            visit(name)
    return found


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle() -> None:
    sources = {module_of(path): source for path, source in SOURCES.items()}
    assert_known("cycle", cycles({name: arrows(source, sources) for name, source in sources.items()}))


@pytest.mark.parametrize(
    "sources",
    [
        {"trainmaster.a": "from trainmaster.b import x", "trainmaster.b": "def f():\n    import trainmaster.a"},
        {"trainmaster.p": "from trainmaster.p.q import x", "trainmaster.p.q": "from trainmaster.p import y"},
        {
            "trainmaster.a": "import trainmaster.b",
            "trainmaster.b": "from trainmaster import c",
            "trainmaster.c": "from __future__ import annotations\nif TYPE_CHECKING:\n    from trainmaster.a import x",
        },
    ],
    ids=["inside a function", "a module and its package", "three, one for its types"],
)
def test_a_circle_is_found(sources: dict[str, str]) -> None:
    assert cycles({name: arrows(source, sources) for name, source in sources.items()}) == [
        " <-> ".join(sorted(sources))
    ]


def test_a_package_that_gathers_its_modules_is_no_circle() -> None:
    sources = {
        "trainmaster.p": "from trainmaster.p.a import x\nfrom trainmaster.p import b",
        "trainmaster.p.a": "from trainmaster.p import b",
        "trainmaster.p.b": "import json",
    }
    assert cycles({name: arrows(source, sources) for name, source in sources.items()}) == []


def folder_arrows(sources: Mapping[str, str], package: str) -> dict[str, set[str]]:
    """What the folders and modules of a package import of each other; its own `__init__` is the contract of all."""

    def member(module: str) -> str | None:
        return module.removeprefix(f"{package}.").partition(".")[0] if module.startswith(f"{package}.") else None

    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        if (importer := member(name)) is not None:
            imported = {member(module) for module in arrows(source, sources)} - {importer, None}
            graph.setdefault(importer, set()).update(filter(None, imported))
    return graph


@pytest.mark.slow
def test_the_folders_of_targets_do_not_import_each_other_in_a_circle() -> None:
    sources = {module_of(path): source for path, source in SOURCES.items()}
    assert cycles(folder_arrows(sources, "trainmaster.targets")) == []


def test_a_circle_of_folders_is_found_where_no_module_is_in_one() -> None:
    sources = {
        "trainmaster.p": "",
        "trainmaster.p.a.x": "def f():\n    from trainmaster.p.b.x import y",
        "trainmaster.p.b.x": "from trainmaster.p import Contract",
        "trainmaster.p.b.z": "import trainmaster.p.a.w",
        "trainmaster.p.a.w": "",
    }
    assert cycles({name: arrows(source, sources) for name, source in sources.items()}) == []
    assert cycles(folder_arrows(sources, "trainmaster.p")) == ["a <-> b"]


# Private names


def private_imports(path: Path, source: str) -> list[str]:
    """Imports of a name with a leading underscore by a file outside the folder that holds it, or a folder in that."""
    own = ("trainmaster", *path.relative_to(PACKAGE).parent.parts)
    found = []
    for item in imports_of(source):
        parts = item.name.split(".")
        at = next((at for at, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")), None)
        if parts[0] != "trainmaster" or at is None:
            continue
        folder = parts[:at] if PACKAGE.joinpath(*parts[1:at]).is_dir() else parts[: at - 1]
        if own[: len(folder)] != tuple(folder):
            found.append(item.name)
    return found


@pytest.mark.slow
def test_no_file_imports_another_packages_private_names() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, source in SOURCES.items()
        for name in private_imports(path, source)
    ]
    assert_known("private", found)


@pytest.mark.parametrize(
    ("file", "source", "offence"),
    [
        ("cli/health/check.py", "from trainmaster.checks import _probe", True),
        ("cli/health/check.py", "from trainmaster.checks.gpu._rows import row", True),
        ("cli/health/check.py", "from trainmaster.checks.runner import _run", True),
        ("cli/health/check.py", "from trainmaster.cli import _console", False),
        ("checks/gpu/ecc.py", "from trainmaster.checks import _probe", False),
        ("checks/gpu/ecc.py", "from trainmaster.checks.fabric import _ports", True),
        ("checks/runner.py", "from trainmaster.checks.gpu import _rows", True),
        ("checks/runner.py", "from trainmaster.checks.contract import _limit", False),
        ("cli/health/check.py", "from trainmaster import __version__", False),
        ("cli/health/check.py", "from os import _exit", False),
    ],
)
def test_a_private_import_is_an_offence_from_outside_its_folder(file: str, source: str, offence: bool) -> None:
    assert bool(private_imports(PACKAGE / file, source)) == offence


# Sizes: what no longer fits on a few screens has more than one subject


MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_FOLDER_ENTRIES = 30


def long_functions(source: str) -> list[str]:
    return [
        node.name
        for node in statements(parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr):
            yield node
            yield from statements(node)


def test_no_file_is_too_long() -> None:
    everything = [*FILES, *(PACKAGE.parents[1] / "tests").rglob("*.py")]
    long = [path for path in everything if len(path.read_text().splitlines()) > MAX_FILE_LINES]
    assert_known("file", [str(path.relative_to(PACKAGE.parents[1])) for path in long])


@pytest.mark.slow
def test_no_function_is_too_long() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {name}" for path, source in SOURCES.items() for name in long_functions(source)
    ]
    assert_known("function", found)


def test_a_long_function_is_found() -> None:
    body = "    x = 1\n" * (MAX_FUNCTION_LINES - 1)
    assert long_functions(f"def fits():\n{body}") == []
    assert long_functions(f"async def too_long():\n{body}    return\n") == ["too_long"]


def test_no_folder_has_too_many_entries() -> None:
    folders = [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir() and path.name != "__pycache__")]
    entries = {path: [entry for entry in path.iterdir() if entry.name != "__pycache__"] for path in folders}
    assert_known("folder", [path.name for path, found in entries.items() if len(found) > MAX_FOLDER_ENTRIES])


# Offences that are allowed, by kind. Empty, and to stay so: mend the code instead.
KNOWN: dict[str, list[str]] = {"cycle": [], "private": [], "file": [], "function": [], "folder": []}


def assert_known(kind: str, found: Collection[str]) -> None:
    """No offence but the known ones."""
    assert sorted(set(found) - set(KNOWN[kind])) == []


def test_no_signal_handler_sets_an_event() -> None:
    """It runs in the main thread, which may hold the lock of that very event in `wait`: both would wait for ever."""
    assert [str(path) for path, text in SOURCES.items() if re.search(r"signal\.signal\(.*\.set\(\)", text)] == []
