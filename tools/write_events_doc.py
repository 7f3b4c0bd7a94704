"""Write docs/reference/events.md from core/event_catalog.py: python tools/write_events_doc.py [--check]."""

from __future__ import annotations

import sys
from pathlib import Path

from trainmaster.core.event_catalog import CATALOG, EventField, EventType

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "events.md"
HEAD = """# Events

One event is one JSON object on one line of the attempt's `events.jsonl`:

```json
{"v":1,"ts":"2026-01-31T12:00:00.000000Z","seq":7,"phase":"TRAINING","event":"epoch_complete","iteration":1,"epoch":3,"data":{"step":600,"avg_loss":1.93}}
```

`ts` is the time of writing, `seq` numbers the lines of the file. `iteration` and `epoch` are present where they apply.
The fields below are those of `data`. A number that JSON cannot write is text: `NaN`, `Infinity`, `-Infinity`.

The **agent** writes its events on every node, the **trainer** on rank 0. A **workload** is any other program: it may
append lines of the same form to the file that `TRAINMASTER_EVENTS` names. Its fields are read where they are present;
unknown phases, events and fields are stored unchanged.

This page is written by `python tools/write_events_doc.py` from `core/event_catalog.py`; a test keeps it so.
"""


def render() -> str:
    """The whole page."""
    return HEAD + "".join(_section(entry) for entry in CATALOG)


def _section(entry: EventType) -> str:
    lines = [f"\n## {entry.phase} {entry.event}", "", f"{entry.doc} Written by: {', '.join(entry.writers)}."]
    if entry.has_epoch:
        lines.append("Has `epoch`.")
    if entry.fields:
        lines += ["", "| field | type | meaning |", "|---|---|---|"]
        lines += [f"| `{field.name}` | {_type(field)} | {field.doc} |" for field in entry.fields]
    return "\n".join(lines) + "\n"


def _type(field: EventField) -> str:
    words = [field.kind]
    if field.nullable:
        words.append("null")
    return " or ".join(words) + ("" if field.required else ", optional")


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(None if PAGE.read_text() == render() else f"{PAGE} is old; run tools/write_events_doc.py")
    PAGE.write_text(render())
