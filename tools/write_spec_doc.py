"""Write docs/reference/spec.md from the spec's own dataclasses: python tools/write_spec_doc.py [--check]."""

from __future__ import annotations

import sys
from pathlib import Path

from trainmaster.core.schema import describe
from trainmaster.core.spec import JobSpec

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "spec.md"
HEAD = """# The spec of a job

A spec is YAML. Exactly one of `train` and `command` says what it runs, or `container`; everything else has a default.
A bad spec is refused with every fault at once, each with its line and what to write instead. Examples are in
[examples/jobs](../../examples/jobs/).

This table is written by `python tools/write_spec_doc.py` from the dataclasses in `core/`; a test keeps it so.

| field | type | default | what for |
|---|---|---|---|
"""


def render() -> str:
    rows = (
        f"| `{row.path}` | {_cell(row.type)} | {_cell(row.default)} | {_cell(row.doc)} |" for row in describe(JobSpec)
    )
    return HEAD + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(None if PAGE.read_text() == render() else f"{PAGE} is old; run: python tools/write_spec_doc.py")
    PAGE.write_text(render())
