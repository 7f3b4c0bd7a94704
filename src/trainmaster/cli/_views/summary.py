"""Last lines of a followed job: status, duration, cost, and the commands for its log and its outputs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trainmaster.cli import _console
from trainmaster.core.money.cost import dollars

if TYPE_CHECKING:
    from trainmaster.api.jobs import JobLine
    from trainmaster.cli._jobs import Jobs

# Files that the job wrote; not the records of its second and later nodes, which lie beside them (targets/ssh).
_OUTPUT = re.compile(r"outputs/(?!node-\d+/(events\.jsonl|exit\.json|agent\.log)$)")


def show(jobs: Jobs, ended: JobLine) -> None:
    """Print how the job ended and what can be done next."""
    from trainmaster.report.formats import duration

    page, completed = jobs.show(ended.id), ended.status == "completed"
    figures = [f"after {duration(page.duration_s)}"] if page.duration_s is not None else []
    figures += [f"cost {dollars(ended.cost_cents)}"] if ended.cost_cents is not None else []
    first = " ".join([_console.paint(ended.status), ", ".join(figures)]).strip()
    message = _console.plain(ended.message)
    _line(f"{first}: {message}" if message else first)
    if page.to_do and not completed:
        _line(f"to do: {_console.plain(page.to_do)}")
    name = _console.plain(ended.name)
    _line(f"log: trainmaster logs {name}" + ("" if completed else " --tail 50"))
    if outputs := sum(1 for artifact in jobs.artifacts(ended.id) if _OUTPUT.match(artifact.path)):
        _line(f"{outputs:,} {'output' if outputs == 1 else 'outputs'}: trainmaster fetch {name}")


def _line(text: str) -> None:
    _console.out.print(text, soft_wrap=True)
