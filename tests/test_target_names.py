"""No file outside `targets/` asks a target for its name: what a target is, it states itself (targets.traits)."""

from __future__ import annotations

import ast

import pytest

from test_layers import FILES, PACKAGE, SOURCES, folder_of, imports_of, parse

TARGET_NAMES = frozenset(
    path.stem.removesuffix("_cloud")
    for path in (PACKAGE / "targets").iterdir()
    if not path.name.startswith("_") and (path.suffix == ".py" or path.is_dir())
)


def target_questions(source: str) -> list[int]:
    """Lines that compare a target's name, look it up in a table, or ask for a target's class."""
    tree = parse(source)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def names_target(node: ast.AST | None) -> bool:
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return any(names_target(item) for item in node.elts)
        value = node.value if isinstance(node, ast.Constant) else constants.get(getattr(node, "id", ""))
        return isinstance(value, str) and value.removesuffix(":") in TARGET_NAMES

    classes = {item.name.rpartition(".")[2] for item in imports_of(source) if item.name.startswith("trainmaster.")}
    classes = {name for name in classes if name.lower().startswith((*TARGET_NAMES, "kube"))}

    def asks(node: ast.AST) -> bool:
        if isinstance(node, ast.Compare):
            return any(map(names_target, (node.left, *node.comparators)))
        if isinstance(node, ast.Dict):
            return any(map(names_target, node.keys))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr in ("startswith", "removeprefix") and any(map(names_target, node.args))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            return any(isinstance(name, ast.Name) and name.id in classes for name in ast.walk(node.args[1]))
        return False

    return sorted(node.lineno for node in ast.walk(tree) if isinstance(node, ast.expr) and asks(node))


@pytest.mark.slow
def test_no_file_outside_targets_asks_a_target_for_its_name() -> None:
    inside = {path: str(path.relative_to(PACKAGE)) for path in FILES if folder_of(path) != "targets"}
    asking = {name: lines for path, name in inside.items() if (lines := target_questions(SOURCES[path]))}
    assert asking == {}, "ask targets.traits(word) instead"


@pytest.mark.parametrize(
    ("source", "asks"),
    [
        ("free = job.target == 'local'", True),
        ("word.partition(':')[0] not in ('ssh', 'slurm')", True),
        ("_WORD = 'sagemaker'\nif on.partition(':')[0] != _WORD: pass", True),
        ("job.target.startswith(('ssh:', 'pool:'))", True),
        ("_INSTEAD = {('isolate', 'local'): 'use several nodes'}", True),
        ("query.where(_JOBS.target == 'local')", True),
        ("from trainmaster.targets.slurm.target import Slurm\nassert isinstance(target, Slurm)", True),
        ("from trainmaster.targets import Rents\nassert isinstance(target, Rents)", False),
        ("target = JobSpec(target='local')", False),
        ("print('submit it --on slurm')", False),
        ("engine == 'docker'", False),
    ],
)
def test_a_question_for_a_name_is_found(source: str, asks: bool) -> None:
    assert bool(target_questions(source)) == asks
