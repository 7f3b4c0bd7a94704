"""A drill's proof as a table on the terminal, as JSON, as Markdown, and as one HTML file with both loss curves."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmaster import __version__
from trainmaster.cli import _console
from trainmaster.core.schema import to_plain

if TYPE_CHECKING:
    from trainmaster.train.drill.run import Proof, Row

_HEAD = ("kill", "who and where", "died at", "lost", "at most", "resumed from")
_DOES = {
    "strikes": "every kill happened",
    "start": "nothing began at step 0 silently",
    "acknowledged": "what was said to be saved was there",
    "bound": "never more lost than stated",
    "losses": "same ranks: losses bit-equal",
    "other ranks": "other ranks: losses close",
    "samples": "each sample once, in order",
    "damage": "the damaged checkpoint was refused",
    "end": "the run came to its end",
    "in place": "killed ranks went on in place",
    "processes": "no process is left",
}


def show(proof: Proof) -> None:
    """The table, the judgements, the verdict."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in _HEAD:
        table.add_column(name, justify="left" if name in ("who and where", "resumed from") else "right")
    for cells in _rows(proof):
        table.add_row(*(_console.plain(cell) for cell in cells))
    _console.out.print(table)
    _console.out.print()
    for result in proof.results:
        for finding in result.findings:
            to_do = f"  [dim]→ {_console.plain(finding.action)}[/]" if finding.action else ""
            verdict = _console.paint(finding.verdict, width=6)
            _console.out.print(
                f"{verdict} {_DOES[result.check]}: {_console.plain(finding.reason)}{to_do}",
                soft_wrap=True,
            )
    _console.out.print(f"{_console.paint(proof.overall)}  {_sentence(proof)}", soft_wrap=True)


def document(proof: Proof) -> dict[str, Any]:
    """Everything that was found, as plain data."""
    return {
        "overall": proof.overall,
        "took_s": round(proof.took_s, 1),
        "seed": proof.plan.seed,
        "steps": proof.plan.config.steps,
        "ranks": proof.plan.attempts[0].ranks,
        "other_ranks": proof.plan.other,
        "changes": list(proof.plan.changes),
        "kills": [
            {
                "place": row.planned.kill.place,
                "planned_step": row.planned.kill.step,
                "rank": row.planned.kill.rank,
                "reached": row.reached,
                "died_at": row.died_at,
                "lost_steps": row.resume.lost if row.resume and row.resume.began else None,
                "bound_steps": row.resume.bound if row.resume else None,
                "resumed_from": row.resume.resumed_from if row.resume else None,
                "tier": row.resume.tier if row.resume else None,
                "newest_damaged": row.resume.damaged if row.resume else None,
            }
            for row in proof.rows
            if row.planned.kill is not None
        ],
        "claims": [to_plain({"claim": result.check, **to_plain(result.findings[0])}) for result in proof.results],
        "losses": {
            "undisturbed": _points(proof.reference.losses),
            "struck": [
                {"ranks": attempt.ranks, "resumed_from": attempt.resumed_from, "losses": _points(attempt.losses)}
                for attempt in proof.attempts
            ],
        },
    }


def save(proof: Proof, folder: Path) -> None:
    """drill.json, drill.md, and drill.html where the packages that draw are installed."""
    (folder / "drill.json").write_text(json.dumps(to_plain(document(proof)), indent=2) + "\n")
    (folder / "drill.md").write_text(markdown(proof))
    try:
        page = render_html(proof)
    except ImportError:
        _console.note("no drill.html: its drawing needs pip install 'trainmaster[server]'")
        return
    (folder / "drill.html").write_text(page)


def markdown(proof: Proof) -> str:
    lines = [f"# Drill: {proof.overall}", "", _sentence(proof), "", _setting(proof), ""]
    lines += [f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}"]
    lines += [_bars(*cells) for cells in _rows(proof)]
    lines += ["", "| claim | verdict | found |", "|---|---|---|"]
    lines += [
        _bars(_DOES[result.check], result.findings[0].verdict, result.findings[0].reason) for result in proof.results
    ]
    return "\n".join(lines) + "\n"


def _bars(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def render_html(proof: Proof) -> str:
    """One file that needs nothing else, in the manner of the other reports."""
    from trainmaster.report import chart
    from trainmaster.report.html import asset

    style = asset("style.css")
    struck = [point for attempt in proof.attempts for point in _line(attempt.losses)]
    drawn = chart.render(
        key="loss",
        title="Loss",
        x_name="step",
        lines=[
            chart.Line(name="undisturbed", points=_line(proof.reference.losses)),
            chart.Line(name="killed and resumed", points=struck),
        ],
        marks=[chart.Mark(x=row.died_at, label="kill") for row in proof.rows if row.died_at is not None],
    )
    tone = {"PASS": "good", "FAIL": "bad"}.get(proof.overall, "warn")
    allowed = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{allowed}'; base-uri 'none'; form-action 'none'"
    claims = [
        (_DOES[result.check], result.findings[0].verdict.value, result.findings[0].reason) for result in proof.results
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{proof.overall}: Trainmaster drill</title><style>{style}</style></head><body><main>\n"
        f'<section class="card verdict {tone}"><div class="word">{proof.overall}</div><h1>Drill</h1>'
        f'<p class="say">{html.escape(_sentence(proof))}</p>'
        f'<p class="quiet">{html.escape(_setting(proof))}</p></section>\n'
        f'<section class="card">{drawn}</section>\n'
        f'<section class="card"><header><h2>Kills</h2></header>{_table(_HEAD, _rows(proof))}</section>\n'
        f'<section class="card"><header><h2>Claims</h2></header>'
        f"{_table(('claim', 'verdict', 'found'), claims)}</section>\n"
        f"</main><footer>Trainmaster {__version__} · this file is self-contained: "
        "it needs no network and no server.</footer>"
        "</body></html>\n"
    )


def _rows(proof: Proof) -> list[tuple[str, ...]]:
    from trainmaster.train.drill.judge import allowed_for_damage

    allowed = allowed_for_damage(proof.plan.config.checkpoint.every_steps)
    return [_cells(number, row, allowed) for number, row in enumerate(proof.rows, 1)]


def _cells(number: int, row: Row, allowed: int) -> tuple[str, ...]:
    if not row.reached:
        return (str(number), str(row.planned.kill), "not reached", "", "", "")
    resume = row.resume
    # One that died while it resumed has no step of its own: the frontier is that of the attempt before it.
    died = str(resume.died_at if resume else row.died_at)
    if resume is None:
        return (str(number), str(row.planned.kill), died, "", "", "not resumed")
    if not resume.began:
        return (str(number), str(row.planned.kill), died, "", "", "killed again while it resumed")
    bound = "not stated" if resume.bound is None else str(resume.bound)
    source = "step 0" if resume.resumed_from is None else f"step {resume.resumed_from}, {resume.tier}"
    hurt = ""
    if resume.damaged:
        hurt = "; the newest was damaged"
        bound += f" + {allowed}" if resume.bound is not None else ""
    return (str(number), str(row.planned.kill), died, str(resume.lost), bound, f"{source}{hurt}")


def _sentence(proof: Proof) -> str:
    reached = sum(row.reached for row in proof.rows)
    done = proof.attempts[-1].last_step if proof.attempts else 0
    return (
        f"{reached} of {len(proof.rows)} kills, {len(proof.attempts)} attempts, step {done} of "
        f"{proof.plan.config.steps} reached, in {proof.took_s:.0f} s"
    )


def _setting(proof: Proof) -> str:
    plan = proof.plan
    changed, first = "; ".join(plan.changes) or "nothing", plan.attempts[0].ranks
    return (
        f"{plan.config.steps} steps on {first} {'rank' if first == 1 else 'ranks'}, "
        f"the last attempt on {plan.attempts[-1].ranks}; a save every {plan.config.checkpoint.every_steps} steps; "
        f"seed {plan.seed}. Changed for the drill: {changed}."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="stack"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


def _points(losses: dict[int, float]) -> list[list[float]]:
    return [[step, loss] for step, loss in sorted(losses.items())]


def _line(losses: dict[int, float]) -> list[tuple[float, float | None]]:
    return [(float(step), loss) for step, loss in sorted(losses.items())]
