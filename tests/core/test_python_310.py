"""The node half runs on Python 3.10: stand-ins answer as the library of 3.11 does, and nothing goes past them."""

from __future__ import annotations

import ast
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from trainmaster.core.compat.toml_subset import read_toml
from trainmaster.core.plan import EXIT_FILE, Plan
from trainmaster.core.spec import parse_spec
from trainmaster.remote.package import FOLDERS, pack

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "trainmaster"
# New in 3.11 or later, by module.
NEW = {
    "datetime": {"UTC"},
    "enum": {"StrEnum", "ReprEnum", "verify", "member", "nonmember", "global_enum"},
    "hashlib": {"file_digest"},
    "asyncio": {"timeout", "timeout_at", "TaskGroup", "Runner", "Barrier"},
    "contextlib": {"chdir"},
    "typing": {"Self", "Never", "assert_never", "LiteralString", "Required", "NotRequired", "override", "reveal_type"},
    "operator": {"call"},
    "itertools": {"batched"},
    "logging": {"getLevelNamesMapping"},
    "math": {"cbrt", "exp2", "sumprod"},
}
NEW_MODULES = {"tomllib", "wsgiref.types"}


def find_310() -> str | None:
    """A Python 3.10 of this machine; a shim of pyenv alone may lead to none."""
    for name in (shutil.which("python3.10"), *map(str, Path("/root/.pyenv/versions").glob("3.10.*/bin/python3.10"))):
        if name and subprocess.run([name, "-c", ""], capture_output=True, check=False).returncode == 0:
            return name
    return None


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.toml")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_table_is_read_as_tomllib_reads_it(path: Path) -> None:
    assert read_toml(path.read_text()) == tomllib.loads(path.read_text())


@pytest.mark.parametrize(
    "text",
    [
        "a = 1\n[b.c]\n'd e' = -1_000 # c\n\"f\" = 1.5e3\n", "a.b = true\na.c = [1, 2.5,\n # x\n 'y', {z = []}, ]\n",
        "[[r]]\nn = 1\n[r.s]\nm = \"\\u00e4\\n\"\n[[r]]\nn = inf\n", "x = { a = 1, b.c = 'q' }", "", "\n# only\r\n",
    ],
)  # fmt: skip
def test_the_reader_agrees_with_tomllib(text: str) -> None:
    assert read_toml(text) == tomllib.loads(text)


@pytest.mark.parametrize("text", ["a = ", "a = 1 2", "a = 1\na = 2", "[a", "a = 2026-11-17", 'a = """x"""', "a = 0o17"])
def test_what_the_reader_does_not_know_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"line [12]: "):
        read_toml(text)


def find_new(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name in NEW_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [f"{node.module}.{name.name}" for name in node.names if name.name in NEW.get(node.module, ())]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [f"{node.value.id}.{node.attr}"] if node.attr in NEW.get(node.value.id, ()) else []
        elif isinstance(node, ast.TryStar) or (isinstance(node, ast.Name) and node.id.endswith("ExceptionGroup")):
            found.append("exception groups")
    return found


def test_the_node_half_names_nothing_that_is_new_in_python_3_11() -> None:
    files = [path for folder in FOLDERS for path in (SOURCE / folder).rglob("*.py") if path.parent.name != "compat"]
    found = {str(path.relative_to(SOURCE)): new for path in files if (new := find_new(ast.parse(path.read_text())))}
    assert found == {}
    assert len(find_new(ast.parse("import tomllib\nfrom datetime import UTC\nasyncio.timeout(1)\n"))) == 3


IMPORT_ALL = """
import importlib, pathlib, sys
root, wrong = pathlib.Path(sys.argv[1]) / "trainmaster", []
sys.path.append(str(root / "drill" / "inject"))  # these modules are found there by a program that is drilled
for path in sorted(root.rglob("*.py")):
    name = ".".join(("trainmaster", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
    try:
        importlib.import_module(name) if not name.endswith("__main__") else None
    except ModuleNotFoundError as error:
        wrong += [f"{name}: {error}"] if error.name not in ("torch", "safetensors", "numpy") else []
    except Exception as error:
        wrong.append(f"{name}: {error!r}")
from datetime import datetime
from trainmaster.core.compat import UTC, StrEnum, parse_iso_time
from trainmaster.core.results import Verdict
for text in ("2026-11-17T10:00:00Z", "2026-11-17T10:00:00.5Z", "2026-11-17T15:30:00.1234567+0530"):
    wrong += [text] if parse_iso_time(text).utcoffset() is None else []
wrong += ["enum"] if f"{Verdict.PASS} {Verdict.PASS!s:>5}" != "pass  pass" else []
import asyncio
from trainmaster.core.compat.waiting import timeout
async def late():
    try:
        async with timeout(0.01):
            await asyncio.sleep(5)
    except TimeoutError:
        async with timeout(5):
            return
    wrong.append("timeout")
asyncio.run(late())
print(sys.version_info[:2], wrong)
"""


@pytest.mark.spawns
def test_the_agent_and_the_checks_run_on_python_3_10(tmp_path: Path) -> None:
    python = find_310()
    if python is None:
        pytest.skip("no Python 3.10 on this machine")
    with zipfile.ZipFile(io.BytesIO(gzip.decompress(pack().data))) as archive:
        archive.extractall(tmp_path / "half")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "half"), "HOME": str(tmp_path)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, *words], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
        )

    every = run("-c", IMPORT_ALL, str(tmp_path / "half"))
    assert every.stdout == "(3, 10) []\n", every.stdout + every.stderr
    spec = parse_spec({"name": "a", "command": ["sh", "-c", "echo Loss: 1"], "preflight": {"allow_incomplete": True}})
    folder = tmp_path / "jobs" / "x" / "attempts" / "1"
    folder.mkdir(parents=True)
    plan = Plan(
        attempt=f"{'0' * 8}-0000-4000-8000-{'0' * 12}.1", spec=spec, folder=str(folder), checkpoints=str(tmp_path)
    )
    (folder / "plan.json").write_text(plan.to_json())
    done = run("-m", "trainmaster.agent", str(folder / "plan.json"))
    record = json.loads((folder / EXIT_FILE).read_text())
    assert record["ok"] or record["reason"] == "check_failed", (record, done.stderr)
    assert "the agent failed" not in (folder / "agent.log").read_text() if (folder / "agent.log").exists() else True
    phases = [json.loads(line)["phase"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert phases[0] == phases[-1] == "PROJECT" and phases.count("PREFLIGHT") > 10
    assert sys.version_info >= (3, 11), "this test itself runs on the control half's Python"
