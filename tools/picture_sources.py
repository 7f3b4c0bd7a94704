"""What the pictures of the dashboard are made from: a hash of each template, style and script, kept beside them.

    python tools/picture_sources.py --check     whether docs/pictures/ was made from the files as they are

A changed file makes every picture old: `tools/write_pictures.py` makes them again and writes the list. Pictures are not
compared: fonts and the browser differ from machine to machine.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
LIST = PICTURES / "made-from.txt"
SOURCES = (
    "src/trainmaster/web/templates/*.html", "src/trainmaster/web/static/*", "src/trainmaster/report/templates/*.html",
    "src/trainmaster/report/*.css", "src/trainmaster/report/*.js", "tools/write_pictures.py",
)  # fmt: skip
COMMAND = "PYTHONPATH=src:tests .venv/bin/python tools/write_pictures.py"


def render() -> str:
    """The list as it should be."""
    files = sorted({path for pattern in SOURCES for path in ROOT.glob(pattern)})
    # Text without line ends of one system or another.
    hashes = {path: hashlib.sha256(path.read_text(encoding="utf-8").encode()).hexdigest()[:16] for path in files}
    return "".join(f"{value}  {path.relative_to(ROOT).as_posix()}\n" for path, value in hashes.items())


def find_changed(kept: str) -> list[str]:
    """Files that are not as they were when the pictures were made."""
    before, now = ({line[18:]: line[:16] for line in text.splitlines()} for text in (kept, render()))
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))


def find_names() -> set[str]:
    """Names of the pictures that the command makes."""
    return set(re.findall(r'"(dashboard-[a-z-]+)"', (ROOT / "tools" / "write_pictures.py").read_text(encoding="utf-8")))


def main() -> None:
    changed = find_changed(LIST.read_text(encoding="utf-8") if LIST.exists() else "")
    if changed:
        sys.exit(
            f"docs/pictures/ is older than {', '.join(changed)}; look at the pictures that this makes:\n  {COMMAND}"
        )
    if (there := {path.stem for path in PICTURES.glob("dashboard-*.png")}) != find_names():
        sys.exit(f"docs/pictures/ and tools/write_pictures.py differ in {sorted(there ^ find_names())}")


if __name__ == "__main__":
    main()
