"""Rules that leave files out mean what git means by them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from pathspec import GitIgnoreSpec

from trainmaster.client.workdir import compile_rules

RULES = ["*.log", "!keep.log", "/top", "cache/", "a/**/z", "deep/*.txt", "[ab].bin", "[!c]x.dat", "q?.md", "# no", "",
         "**/any", "out/**", r"\#odd", "[z-a].py", "!", r"end\ ", r"\!bang"]  # fmt: skip
PATHS = ["x.log", "d/x.log", "keep.log", "d/keep.log", "top", "d/top", "cache/f", "d/cache/f", "a/z", "a/b/c/z", "a/b",
         "deep/a.txt", "deep/d/a.txt", "a.bin", "c.bin", "cx.dat", "dx.dat", "q1.md", "q/.md", "any", "d/e/any",
         "out/f", "# no", "#odd", "train.py", "end ", "end", "!bang"]  # fmt: skip


@pytest.mark.spawns
@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_the_same_paths_are_left_out_as_by_git(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("\n".join(RULES) + "\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    asked = subprocess.run(
        ["git", "-C", tmp_path, "check-ignore", "--no-index", "-z", "--stdin"],
        input="\0".join(PATHS).encode(), capture_output=True, check=False,
    )  # fmt: skip
    theirs = set(asked.stdout.decode().split("\0")) - {""}
    ignore = compile_rules(RULES)
    ours = {path for path in PATHS if _left_out(ignore, path)}
    assert ours == theirs and len(ours) > 10


def _left_out(ignore: GitIgnoreSpec, path: str) -> bool:
    """Whether a path or a folder above it is left out, as a walk from the top finds it."""
    parts = path.split("/")
    above = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
    return any(ignore.match_file(f"{folder}/") for folder in above) or ignore.match_file(path)
