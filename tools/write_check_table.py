"""Write the table of all checks into docs/how/checks.md: python tools/write_check_table.py [--check]."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from trainmaster import checks

PAGE = Path(__file__).parents[1] / "docs" / "how" / "checks.md"
HEAD = "| check | level | GPU | holds when it passes | expectations | compared between nodes |\n" + "|---" * 6 + "|\n"


def render() -> str:
    """The table, one row for each check."""
    return HEAD + "".join(map(_row, checks.names()))


def _row(name: str) -> str:
    check = checks.load(name)
    first = (check.__doc__ or "").splitlines()[0]
    cells = [
        name,
        str(check.LEVEL),
        "yes" if check.GPU else "",
        first,
        ", ".join(f"`{field}`" for field in check.EXPECTS),
        ", ".join(f"`{rule.name}`" for rule in check.COMPARES),
    ]
    return f"| {' | '.join(cells)} |\n"


def refresh(page: str) -> str:
    """The page with the table of today."""
    return re.sub(rf"{re.escape(HEAD)}(\|.*\n)*", lambda _: render(), page, count=1)


if __name__ == "__main__":
    new = refresh(PAGE.read_text())
    if "--check" in sys.argv:
        sys.exit(None if PAGE.read_text() == new else "docs/how/checks.md is old; run tools/write_check_table.py")
    PAGE.write_text(new)
