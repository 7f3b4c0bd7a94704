"""Write docs/reference/spec.md from the spec's own dataclasses: python tools/write_spec_doc.py [--check]."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from trainmaster.core.config.cron import Schedule
from trainmaster.core.config.search import Search
from trainmaster.core.config.spec_places import BOUNDS, PLACES, Place
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
SEARCH_HEAD = """
## Of a search

A spec with `search` is a set of runs ([guides/sweep.md](../guides/sweep.md)); `parallel` of them are open at once, one
where it is not stated.

| field | type | default | what for |
|---|---|---|---|
"""
SCHEDULE_HEAD = """
## Of a schedule

A spec with `schedule` is a set whose runs begin again at every time of it ([guides/sweep.md](../guides/sweep.md)), with
or without `matrix`.

| field | type | default | what for |
|---|---|---|---|
"""
PLACES_HEAD = """
## Whose rights open what a field names

A token of a project never acts with the server's own rights. A field that names a file, an account or another job is
opened in one of these places; `core/config/spec_places.py` classes every field of text; a test fails for one without.

| field | where it is opened | bound |
|---|---|---|
"""


def render() -> str:
    parts = (
        HEAD + "\n".join(_fields(JobSpec)),
        SEARCH_HEAD + "\n".join(_fields(Search, "search")),
        SCHEDULE_HEAD + "\n".join(_fields(Schedule, "schedule")),
        PLACES_HEAD + "\n".join(_places()),
    )
    return "".join(part + "\n" for part in parts)


def _fields(cls: type, path: str = "") -> Iterator[str]:
    for row in describe(cls, path=path):
        yield f"| `{row.path}` | {_cell(row.type)} | {_cell(row.default)} | {_cell(row.doc)} |"


def _places() -> Iterator[str]:
    """One row for each place, and one for each field with a bound of its own."""
    for field, bound in BOUNDS.items():
        yield f"| `{field}` | {PLACES[field].value} | {_cell(bound)} |"
    for place in (Place.ACCOUNT, Place.NODE, Place.NOTHING):
        fields = ", ".join(f"`{field}`" for field, its in PLACES.items() if its is place)
        yield f"| {fields} | {place.value} | |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(None if PAGE.read_text() == render() else f"{PAGE} is old; run: python tools/write_spec_doc.py")
    PAGE.write_text(render())
