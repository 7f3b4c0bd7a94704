"""`make affected` finds every test that a changed file can reach, and leaves out the others."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.spawns
FILES = {
    "src/trainmaster/__init__.py": "def __getattr__(name):\n    from trainmaster.client import Client\n",
    "src/trainmaster/__main__.py": "from trainmaster.cli import main\n",
    "src/trainmaster/client.py": "",
    "src/trainmaster/cli/__init__.py": "",
    "src/trainmaster/cli/main.py": "def verb():\n    from trainmaster.core import lazy\n",
    "src/trainmaster/core/__init__.py": "",
    "src/trainmaster/core/deep.py": "",
    "src/trainmaster/core/lazy.py": "from trainmaster.core import deep\n",
    "src/trainmaster/checks/__init__.py": "import pkgutil\n",
    "src/trainmaster/checks/disk.py": "",
    "src/trainmaster/agent/__init__.py": "",
    "src/trainmaster/agent/__main__.py": "",
    "src/trainmaster/pages/__init__.py": "",
    "src/trainmaster/pages/page.html": "",
    "tests/conftest.py": "from heavy import start\nimport pytest\n@pytest.fixture\ndef server():\n    return start()\n",
    "tests/heavy.py": "",
    "tests/rows.json": "",
    "tests/test_command.py": 'words = ["-m", "trainmaster", "verb"]\n',
    "tests/test_checks.py": "from trainmaster import checks\n",
    "tests/test_agent.py": 'words = ["-m", "trainmaster.agent"]\n',
    "tests/test_server.py": "def test_it(server): pass\n",
    "tests/test_page.py": "import trainmaster.pages\n",
    "tests/test_rows.py": 'open("rows.json")\n',
    "tests/test_script.py": 'run("script.py")\n',
    "tools/script.py": "",
    "tests/part/helper.py": "from trainmaster.core.deep import x\n",
    "tests/part/test_beside.py": "from helper import y\n",
    "tests/pack/__init__.py": "",
    "tests/pack/rows.py": "import trainmaster.client\n",
    "tests/pack/test_relative.py": "from .rows import x\n",
    "tests/test_docs.py": "",
    "tests/test_layers.py": "",
}
ALWAYS = {"test_docs", "test_layers"}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("affected", ROOT / "tools" / "affected.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


AFFECTED = load()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("src/trainmaster/core/deep.py", {"test_command", "test_beside"}),
        ("src/trainmaster/core/lazy.py", {"test_command"}),
        ("src/trainmaster/checks/disk.py", {"test_checks"}),
        ("src/trainmaster/agent/__main__.py", {"test_agent"}),
        ("src/trainmaster/pages/page.html", {"test_page"}),
        ("src/trainmaster/client.py", {"test_relative"}),
        ("tests/heavy.py", {"test_server"}),
        ("tests/rows.json", {"test_rows"}),
        ("tests/part/test_beside.py", {"test_beside"}),
        ("tools/script.py", {"test_script"}),
        ("docs/new.md", set()),
    ],
)
def test_what_a_changed_file_reaches(clone: Path, changed: str, tests: set[str]) -> None:
    reached = AFFECTED.affected(AFFECTED.Tree(clone), [clone / changed])
    assert {path.stem for path in reached} == tests | ALWAYS


def test_a_conftest_reaches_every_test_below_it(clone: Path) -> None:
    reached = AFFECTED.affected(AFFECTED.Tree(clone), [clone / "tests" / "conftest.py"])
    assert {path.stem for path in reached} == {Path(name).stem for name in FILES if "/test_" in name}


def test_nothing_changed_reaches_nothing(clone: Path) -> None:
    assert AFFECTED.affected(AFFECTED.Tree(clone), []) == []


def test_changes_since_the_branch_was_made(clone: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], cwd=clone, check=True, capture_output=True)

    git("init", "-b", "main")
    git("add", "-A")
    git("commit", "-m", "first")
    git("checkout", "-b", "mine")
    (clone / "tests" / "heavy.py").write_text("x = 1\n")
    git("commit", "-am", "second")
    (clone / "tests" / "rows.json").write_text("1\n")
    (clone / "new.py").write_text("")
    changed = AFFECTED.changed_files(clone, "main")
    assert {path.relative_to(clone).as_posix() for path in changed} == {"tests/heavy.py", "tests/rows.json", "new.py"}
    with pytest.raises(SystemExit, match="Name a commit"):
        AFFECTED.changed_files(clone, "nowhere")
