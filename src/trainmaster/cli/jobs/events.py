"""`trainmaster events`: the events of a job, each once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect
from trainmaster.cli._server import ServerOption
from trainmaster.core.errors import UsageError
from trainmaster.core.events import Phase

if TYPE_CHECKING:
    from trainmaster.api.events import Event

_WORST = ("fail", "error", "warn", "pass", "skip")


def events(
    job: Annotated[str, typer.Argument(help="Job id, its unique beginning, or a name.")],
    phase: Annotated[str | None, typer.Option(help="Only this phase, for example CHECKPOINT.")] = None,
    node: Annotated[int, typer.Option(min=0, help="Which node of a job on several.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Print a job's events, one line each; --json has every field.

    A malformed line is printed unchanged, with its fault.

    [bold]Examples[/]

      trainmaster events 3f2a --phase CHECKPOINT

      trainmaster events 3f2a -f --json | jq .data.loss
    """
    with connect(home, server, reads=True) as jobs:
        job_id, printed = jobs.find(job), False
        phase = phase.upper() if phase is not None else None
        for event in jobs.events(job_id, phase=phase, follow=follow, node=node):
            _print(event, json=json)
            printed = True
        if phase is not None and not printed:
            there = sorted({event.phase for event in jobs.events(job_id, node=node) if event.phase})
            text = f"no event of phase {phase}; this job has {', '.join(there) or 'no events yet'}"
            if phase not in Phase.__members__:
                raise UsageError(text)
            _console.note(_console.plain(text))


def _print(event: Event, *, json: bool) -> None:
    if json:
        _console.json_line(event)
        return
    when = event.ts.astimezone().strftime("%H:%M:%S") if event.ts else "--:--:--"
    if event.phase:
        what = describe(event.phase, event.event or "", event.data)
    else:
        what = f"malformed ({event.fault}): {event.text}"
    _console.out.out(f"{when} {what}".rstrip())


def describe(phase: str, event: str, data: Mapping[str, Any]) -> str:
    """`PREFLIGHT cpu pass: 2 CPUs usable`; other events as `PHASE event name=value …` without nested values."""
    findings = data.get("findings") if (phase, event) == ("PREFLIGHT", "check") else None
    valid = [item for item in findings if isinstance(item, Mapping)] if isinstance(findings, list) else []
    if valid:
        return _describe_check(data, valid)
    words = (f"{name}={_text(value)}" for name, value in data.items() if _is_plain(value) and name != "message")
    message = data.get("message")
    return " ".join([phase, event, *words]) + (f": {message}" if message else "")


def _describe_check(data: Mapping[str, Any], findings: Sequence[Mapping[str, Any]]) -> str:
    """The worst finding; a check of eight GPUs has eight, which are often the same."""
    worst = min(findings, key=_rank)
    device = f" {worst['device']}" if worst.get("device") else ""
    more = sum(_rank(item) == _rank(worst) for item in findings) - 1
    rest = f" (and {more} more)" if more else ""
    return f"PREFLIGHT {data.get('check')}{device} {data.get('verdict')}: {worst.get('reason')}{rest}"


def _rank(finding: Mapping[str, Any]) -> int:
    word = str(finding.get("verdict"))
    return _WORST.index(word) if word in _WORST else 0


def _is_plain(value: object) -> bool:
    return value is not None and not isinstance(value, (Mapping, list, tuple))


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return str(value)
