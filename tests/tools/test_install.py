"""tools/install.sh: torch by pip first, the rest by uv, and by pip where uv is missing or fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools/install.sh"
REST = ["-c constraints.txt -e .[dev]", "--no-deps agent==1"]

pytestmark = pytest.mark.spawns


def install(folder: Path, *, uv: str | None, pip: str = "exit 0", again: bool = False) -> tuple[int, list[str]]:
    """The calls, with programs in place of pip and uv that write down their words; `uv`, `pip`: what they end with."""
    programs = folder / "odd bin"
    programs.mkdir()
    for name, code in (("pip", pip), ("uv", uv), ("python", "exit 0")):
        if code is not None:
            program = programs / name
            program.write_text(f'#!/bin/sh\necho "{name} $*" >> calls\n{code}\n')
            program.chmod(0o755)
    if again:
        (folder / ".installing").touch()
    words = ["sh", str(SCRIPT), str(programs), "dev", "agent==1"]
    code = subprocess.run(words, cwd=folder, capture_output=True, check=False).returncode
    return code, (folder / "calls").read_text().splitlines()


def test_torch_is_there_before_anything_asks_for_it(tmp_path: Path) -> None:
    code, calls = install(tmp_path, uv="exit 0")
    by_uv = f"uv pip install --quiet --python {tmp_path}/odd bin/python"
    assert (code, calls[2:]) == (0, [f"{by_uv} {words}" for words in REST])
    assert calls[0].startswith("pip install") and calls[0].endswith("-c constraints.txt torch numpy")
    assert calls[1].startswith("pip install") and calls[1].endswith("-c constraints.txt uv")


@pytest.mark.parametrize("uv", [None, "exit 2"], ids=["missing", "fails"])
def test_without_uv_pip_installs_everything(tmp_path: Path, uv: str | None) -> None:
    code, calls = install(tmp_path, uv=uv)
    by_pip = "pip install --disable-pip-version-check --no-compile --quiet"
    assert (code, [call for call in calls[2:] if call.startswith("pip")]) == (
        0,
        [f"{by_pip} {words}" for words in REST],
    )


def test_where_pip_fails_nothing_says_that_it_is_installed(tmp_path: Path) -> None:
    assert install(tmp_path, uv="exit 2", pip='case "$*" in *torch*) exit 0;; *) exit 1;; esac')[0] != 0


def test_what_was_killed_half_way_is_begun_anew(tmp_path: Path) -> None:
    assert install(tmp_path, uv="kill -9 $PPID")[0] != 0
    assert (tmp_path / ".installing").exists()
    (tmp_path / "again").mkdir()
    code, calls = install(tmp_path / "again", uv="exit 0", again=True)
    assert code == 0 and calls[0].startswith("python -m venv --clear")
    assert not (tmp_path / "again" / ".installing").exists()
