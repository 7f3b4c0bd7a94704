"""Run the tests that a change can affect: those whose import closure holds a changed file. `make affected BASE=HEAD~1`.

Imports are read from the source, those inside functions too, and no code is run. What no import shows counts as well:

- a module that finds others by folder (pkgutil, importlib) depends on all modules below its own folder;
- a text such as "trainmaster.agent" or "trainmaster.checks." names that module, or all modules below it;
- a file that is no Python belongs to the modules that name it, and one inside a package to the modules beside it;
- a fixture of a conftest.py counts for the tests that name it, with what it uses; its other lines count for all.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("src", "tests", "tools", "benchmarks", "examples", "deploy")
_WORD = re.compile(r"\w+")
FINDERS = frozenset({"pkgutil", "importlib"})
READ_ALL = ("tests/test_docs.py", "tests/test_layers.py")  # they look at every file of the clone
NO_TESTS = 5  # pytest's exit code where nothing was left to run


class Conftest:
    """The top-level definitions of a conftest.py, each with the names that it uses."""

    def __init__(self, tree: ast.Module) -> None:
        self._imports: dict[str, ast.Import | ast.ImportFrom] = {}
        self._parts: dict[str, ast.stmt] = {}
        self._always: list[ast.stmt] = []
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    name = (alias.asname or alias.name).partition(".")[0]
                    self._imports[name] = _only(node, alias)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._parts[node.name] = node
                if node.name.startswith("pytest_") or "autouse=True" in map(ast.unparse, _keywords(node)):
                    self._always.append(node)
            else:
                self._always.append(node)

    def nodes_for(self, words: Collection[str]) -> Iterator[ast.AST]:
        """Nodes that count for a file of tests with these words, the imports that they use included."""
        todo = [*self._always, *(part for name, part in self._parts.items() if name in words)]
        seen: set[int] = set()
        while todo:
            part = todo.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            for node in ast.walk(part):
                yield node
                name = getattr(node, "id", None) or getattr(node, "arg", None)
                if name in self._imports:
                    yield self._imports[name]
                if name in self._parts:
                    todo.append(self._parts[name])


def _only(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.Import | ast.ImportFrom:
    """The import of one of its names."""
    if isinstance(node, ast.Import):
        return ast.Import(names=[alias])
    return ast.ImportFrom(module=node.module, names=[alias], level=node.level)


def _keywords(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[ast.keyword]:
    for decorator in node.decorator_list:
        yield from (found for found in ast.walk(decorator) if isinstance(found, ast.keyword))


class Tree:
    """The Python files of a clone, and which of them each one needs directly."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = sorted(path for top in SOURCES for path in (root / top).rglob("*.py"))
        self.texts = {path: path.read_text() for path in self.files}
        self._conftests: dict[Path, Conftest] = {}
        self._modules: dict[str, Path] = {}
        for path in self.files:
            for name in self._names(path):
                self._modules.setdefault(name, path)

    def _names(self, path: Path) -> Iterator[str]:
        """Names that import this file: below src, below tests, and, for a helper beside a test, its bare name."""
        for top in ("src", "tests"):
            if path.is_relative_to(self.root / top):
                parts = path.relative_to(self.root / top).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if path.is_relative_to(self.root / "tests") and not (path.parent / "__init__.py").exists():
            yield f"{path.parent}:{path.stem}"

    def needs(self) -> dict[Path, set[Path]]:
        return {path: set(self._needs(path)) - {path} for path in self.files}

    def _needs(self, path: Path) -> Iterator[Path]:
        tree = ast.parse(self.texts[path])
        if path.name == "conftest.py" or path == self.root / "src" / "trainmaster" / "__init__.py":
            return  # parts of the one count where they are used; the other imports the client for who asks it for that
        yield from self._used(path, list(ast.walk(tree)))
        if path.is_relative_to(self.root / "tests"):
            words = set(_WORD.findall(self.texts[path]))
            for conftest in (folder / "conftest.py" for folder in path.parents if folder / "conftest.py" in self.texts):
                yield conftest
                yield from self._used(conftest, [*self._conftest(conftest).nodes_for(words)])

    def _conftest(self, path: Path) -> Conftest:
        if path not in self._conftests:
            self._conftests[path] = Conftest(ast.parse(self.texts[path]))
        return self._conftests[path]

    def _used(self, path: Path, nodes: list[ast.AST]) -> Iterator[Path]:
        """Files that these nodes of a file import or name."""
        for name in _imported(nodes, _package(path, self.root)):
            yield from self._find(name, beside=path.parent)
            if name.partition(".")[0] in FINDERS and path.parent.parent.is_relative_to(
                self.root / "src" / "trainmaster"
            ):
                yield from (other for other in self.files if other.is_relative_to(path.parent))
        for text in _texts(nodes):
            yield from self._named(text)
        if path.is_relative_to(self.root / "tests") and any(
            getattr(node, "value", 0) == "trainmaster" for node in nodes
        ):
            yield from filter(None, [self._modules.get("trainmaster.__main__")])  # as in `python -m trainmaster`

    def _find(self, name: str, *, beside: Path) -> Iterator[Path]:
        """The file of a module, and the `__init__` of every package on the way to it."""
        parts = name.split(".")
        found = [
            self._modules[".".join(parts[:end])]
            for end in range(1, len(parts) + 1)
            if ".".join(parts[:end]) in self._modules
        ]
        yield from found or filter(None, [self._modules.get(f"{beside}:{parts[0]}")])

    def _named(self, text: str) -> Iterator[Path]:
        if text.startswith("trainmaster.") and text.endswith("."):
            yield from (path for name, path in self._modules.items() if name.startswith(text))
        elif text in self._modules and "." in text:
            yield self._modules[text]
            yield from filter(None, [self._modules.get(f"{text}.__main__")])

    def holders(self, changed: Path) -> Iterator[Path]:
        """Modules that a changed file belongs to."""
        if changed.suffix == ".py":
            yield changed
        if changed.suffix == ".py" and any(changed.is_relative_to(self.root / top) for top in ("src", "tests")):
            return
        package = next((folder for folder in changed.parents if (folder / "__init__.py").exists()), None)
        for path, text in self.texts.items():  # a script, a page, a template
            if changed.name in text or path.parent == package:
                yield path


def _package(path: Path, root: Path) -> tuple[str, ...]:
    """The package that a relative import of this file starts from."""
    top = next((root / top for top in ("src", "tests") if path.is_relative_to(root / top)), root)
    return path.parent.relative_to(top).parts


def _imported(nodes: list[ast.AST], package: tuple[str, ...]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _texts(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            yield from node.value.replace("'", " ").replace('"', " ").split()


def affected(tree: Tree, changed: Collection[Path]) -> list[Path]:
    """Test files whose closure holds a changed file, in order."""
    users: dict[Path, set[Path]] = {}
    for path, needed in tree.needs().items():
        for other in needed:
            users.setdefault(other, set()).add(path)
    if not changed:
        return []
    always = {tree.root / name for name in READ_ALL}
    reached = always | _closure({module for path in changed for module in tree.holders(path)}, users)
    return sorted(path for path in reached if path.name.startswith("test_") and path in tree.texts)


def _closure(first: Collection[Path], users: Mapping[Path, Collection[Path]]) -> set[Path]:
    reached, todo = set(first), list(first)
    while todo:
        new = set(users.get(todo.pop(), ())) - reached
        reached |= new
        todo += new
    return reached


def changed_files(root: Path, base: str) -> list[Path]:
    """What differs from the commit where this branch left `base`, with what is not committed yet."""
    lines = [
        *_git(root, "diff", "--name-only", _git(root, "merge-base", base, "HEAD")[0]),
        *_git(root, "ls-files", "--others", "--exclude-standard"),
    ]
    return [root / line for line in lines]


def _git(root: Path, *words: str) -> list[str]:
    ran = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"affected: git {' '.join(words)}: {ran.stderr.strip()}. Name a commit: make affected BASE=HEAD~1")
    return ran.stdout.splitlines()


def main(base: str, *options: str) -> int:
    """Run what is affected, the tests that depend on timing last and one at a time; the worst exit code."""
    changed = changed_files(ROOT, base)
    tests = [str(path.relative_to(ROOT)) for path in affected(Tree(ROOT), changed)]
    print(f"{len(changed)} files differ from {base}: {len(tests)} files of tests", flush=True)
    if not tests:
        return 0
    pytest = [sys.executable, "-m", "pytest", *tests]
    parts = (("not alone", *options), ("alone",))
    codes = [subprocess.run([*pytest, "-m", *part], cwd=ROOT, check=False).returncode for part in parts]
    return max(0 if code == NO_TESTS else code for code in codes)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
