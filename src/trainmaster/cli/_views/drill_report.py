"""A drill's report as a table on the terminal, as JSON, Markdown, JUnit, and as one HTML file with the loss curves."""

from __future__ import annotations

import html
import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainmaster import __version__
from trainmaster.cli import _console
from trainmaster.core.errors import TrainmasterError
from trainmaster.core.results import Finding, Overall, Verdict, error
from trainmaster.core.schema import to_plain

Curve = Mapping[int, float]
_ALONE = "mend what the reason tells, so that the program comes to its end by itself, and drill again"
_JUNIT = {Verdict.FAIL: "failure", Verdict.ERROR: "error", Verdict.SKIP: "skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a drill has to tell, of whichever program."""

    overall: Overall
    sentence: str
    setting: str
    head: tuple[str, ...]
    words: tuple[str, ...]  # columns of `head` that hold words; the others hold numbers
    rows: Sequence[tuple[str, ...]]
    claims: Sequence[tuple[str, Finding]]
    undisturbed: Curve
    struck: Sequence[Curve]
    marks: Sequence[int]  # steps at which it was struck
    document: Mapping[str, Any]
    repeat: Sequence[str] = ()  # commands: this drill once more, and single strikes of it
    interrupted: bool = False
    left_out: Sequence[str] = ()  # strikes that were not done, each with why
    made: str = ""  # when, and with which versions


def document_of_none(failed: TrainmasterError) -> dict[str, Any]:
    """The JSON of a drill that could not be done, with the names of one that was."""
    reason = " ".join(str(failed).split())
    return {
        "overall": Overall.INCOMPLETE,
        "interrupted": False,
        "reason": reason,
        "claims": [{"claim": "reference", **to_plain(error(reason, action=_ALONE))}],
    }


def stamp(at: float) -> str:
    """Seconds since 1970 as a date and time."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def describe_making(begun: float, versions: Mapping[str, str]) -> str:
    """When a drill began, and the versions of what it drilled: Python, torch and others that the program had loaded."""
    day, _, hour = stamp(begun).rstrip("Z").partition("T")
    known = "".join(f", {name} {version}" for name, version in versions.items())
    return f"Begun {day} {hour} UTC with trainmaster {__version__}{known or '; no version of the program was seen'}."


def show(report: Report) -> None:
    """The table, the judgements, the verdict."""
    if report.rows:
        table = _console.table(*report.head, right=frozenset(report.head) - frozenset(report.words))
        for cells in report.rows:
            table.add_row(*(_console.plain(cell) for cell in cells))
        _console.out.print(table)
        if report.left_out:
            _console.out.print(f"[dim]left out: {_console.plain('; '.join(report.left_out))}[/]", soft_wrap=True)
        _console.out.print()
    for claim, finding in told(report):
        to_do = f"  [dim]→ {_console.plain(finding.action)}[/]" if finding.action else ""
        verdict = _console.paint(finding.verdict, width=6)
        _console.out.print(f"{verdict} {claim}: {_console.plain(finding.reason)}{to_do}", soft_wrap=True)
    if unseen := report.document.get("not_seen"):
        _console.out.print(f"[dim]not seen: {_console.plain(unseen)}[/]", soft_wrap=True)
    _console.out.print(f"{_console.paint(report.overall)}  {_console.plain(report.sentence)}", soft_wrap=True)


def told(report: Report) -> list[tuple[str, Finding]]:
    """The claims as people read them: those that an interrupt left unjudged are one line, the last."""
    from trainmaster.drill.attempt import AGAIN, NOT_RUN

    unjudged = [claim for claim, finding in report.claims if finding == NOT_RUN]
    if len(unjudged) < 2:
        return list(report.claims)
    rest = error(f"the drill was interrupted: {'; '.join(unjudged)}", action=AGAIN)
    return [*(pair for pair in report.claims if pair[1] != NOT_RUN), ("not judged", rest)]


def save(report: Report, folder: Path) -> None:
    """drill.json, drill.md, junit.xml, and drill.html where the packages that draw are installed."""
    (folder / "drill.json").write_text(json.dumps(to_plain(report.document), indent=2) + "\n")
    (folder / "drill.md").write_text(markdown(report))
    (folder / "junit.xml").write_text(junit(report))
    try:
        page = render_html(report)
    except ImportError:
        _console.note("no drill.html: its drawing needs pip install 'trainmaster[server]'")
        return
    (folder / "drill.html").write_text(page)


def markdown(report: Report) -> str:
    lines = [f"# Drill: {report.overall}", "", report.sentence, "", report.setting, ""]
    lines += [report.made, ""] if report.made else []
    if report.rows:
        lines += [f"| {' | '.join(report.head)} |", f"|{'---|' * len(report.head)}"]
        lines += [*(_bars(*cells) for cells in report.rows), ""]
    lines += ["| claim | verdict | found |", "|---|---|---|"]
    lines += [_bars(claim, finding.verdict, _found(finding)) for claim, finding in told(report)]
    if report.repeat:
        lines += ["", "To repeat it, in the folder of the program:", "", "```", *report.repeat, "```"]
    return "\n".join(lines) + "\n"


def junit(report: Report) -> str:
    """One case for each claim; a warning passes with its words, what was not seen is an error."""
    verdicts = [finding.verdict for _, finding in report.claims]
    counts = {
        "tests": str(len(verdicts)),
        "failures": str(verdicts.count(Verdict.FAIL)),
        "errors": str(verdicts.count(Verdict.ERROR)),
        "skipped": str(verdicts.count(Verdict.SKIP)),
        "time": f"{float(report.document.get('took_s') or 0.0):.1f}",
    }
    root = ET.Element("testsuites", name="trainmaster", attrib=counts)
    suite = ET.SubElement(root, "testsuite", name="drill", attrib=counts)
    for claim, finding in report.claims:
        case = ET.SubElement(suite, "testcase", classname="trainmaster.drill", name=claim)
        words = _xml(finding.reason + (f"\nwhat to do: {finding.action}" if finding.action else ""))
        if tag := _JUNIT.get(finding.verdict):
            ET.SubElement(case, tag, message=_xml(finding.reason)).text = words
        else:
            ET.SubElement(case, "system-out").text = f"{finding.verdict}: {words}"
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    """Without what XML cannot hold: the message of a program may carry anything."""
    return "".join(
        letter if letter in "\t\n" or " " <= letter < "\ud800" or letter > "\ue000" else "?" for letter in text
    )


def _bars(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _found(finding: Finding) -> str:
    return f"{finding.reason} → {finding.action}" if finding.action else finding.reason


def render_html(report: Report) -> str:
    """One file that needs nothing else, in the manner of the other reports."""
    from trainmaster.report import chart
    from trainmaster.report.html import asset, style_policy

    style = asset("style.css")
    drawn = chart.render(
        key="loss",
        title="Loss",
        x_name="step",
        lines=[
            chart.Line(name="undisturbed", points=_line(report.undisturbed)),
            chart.Line(
                name="killed and resumed", points=[point for losses in report.struck for point in _line(losses)]
            ),
        ],
        marks=[chart.Mark(x=step, label="kill") for step in report.marks],
    )
    tone = {"PASS": "good", "FAIL": "bad"}.get(report.overall, "warn")
    kills = f'<section class="card"><header><h2>Kills</h2></header>{_table(report.head, report.rows)}</section>\n'
    claims = [(claim, finding.verdict.value, _found(finding)) for claim, finding in told(report)]
    repeat = html.escape("\n".join(report.repeat))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(style_policy(style))}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{report.overall}: Trainmaster drill</title><style>{style}</style></head><body><main>\n"
        f'<section class="card verdict {tone}"><div class="word">{report.overall}</div><h1>Drill</h1>'
        f'<p class="say">{html.escape(report.sentence)}</p>'
        f'<p class="quiet">{html.escape(report.setting)}</p>'
        f'<p class="quiet">{html.escape(report.made)}</p></section>\n'
        f'<section class="card">{drawn}</section>\n'
        f"{kills if report.rows else ''}"
        f'<section class="card"><header><h2>Claims</h2></header>'
        f"{_table(('claim', 'verdict', 'found'), claims)}</section>\n"
        + (
            f'<section class="card"><header><h2>Repeat it</h2></header><pre>{repeat}</pre></section>\n'
            if repeat
            else ""
        )
        + f"</main><footer>Trainmaster {__version__} · this file is self-contained: "
        "it needs no network and no server.</footer>"
        "</body></html>\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="stack"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


def points(losses: Curve) -> list[list[float | None]]:
    """A loss curve as plain data; JSON has no number that is none."""
    return [[step, _finite(loss)] for step, loss in sorted(losses.items())]


def _line(losses: Curve) -> list[tuple[float, float | None]]:
    return [(float(step), _finite(loss)) for step, loss in sorted(losses.items())]


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
