"""Rows of long tables as HTML. A page has hundreds of them, and a template calls a function for each value of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup, escape

from trainmaster.api.compare import ComparedRun
from trainmaster.api.events import Event
from trainmaster.core.clean_text import clean
from trainmaster.core.money.cost import dollars
from trainmaster.report import formats, phrases

_HASH = re.compile(r"\b(?:sha256:)?([0-9a-f]{12})[0-9a-f]{28,52}\b")  # SHA-1 and SHA-256, as of a working folder


def log_line(*, offset: int, label: str, link: str, tone: str, text: Markup) -> Markup:
    """A line of a log; `text` is what `ansi.render` gave."""
    name = _text(label)
    place, source = (f"{name}-L{offset}", f'<span class="from">{name}</span>') if label else (f"L{offset}", "")
    return _ours(
        f'<div class="line {tone}" id="{place}"><a class="at" href="{_text(link)}" aria-label="link to byte {offset}">'
        f"{offset}</a>{source}<code>{text}</code></div>"
    )


def events(listed: Iterable[Event]) -> Markup:
    """Events of a run, with all that is in them."""
    rows = []
    for one in listed:
        tone, fault = "", ""
        if one.fault:
            tone, fault = ' class="warn"', f"<b>{_text(one.fault)}</b> {_text(one.text or '')}"
        values = "".join(f"<span>{_text(f'{name}={phrases.value_text(it)}')}</span>" for name, it in one.data.items())
        rows.append(
            f'<tr{tone}><td class="nowrap">{formats.moment(one.ts) if one.ts else ""}</td>'
            f'<td class="num">{one.cursor[0]}</td><td class="nowrap">{_text(one.phase or "(no event)")}</td>'
            f'<td class="nowrap">{_text(one.event or "")}</td><td class="values">{fault}{values}</td></tr>\n'
        )
    return _ours("".join(rows))


def compared(
    runs: Iterable[ComparedRun], *, fields: Sequence[str], metrics: Sequence[str], colours: Mapping[str, int]
) -> Markup:
    """Runs side by side: what differs between their specs, and their final values."""
    rows = []
    for run in runs:
        name, short, cost = _text(run.name), run.id[:8], run.cost_cents
        person = f" · {_text(run.submitted_by)}" if run.submitted_by else ""
        differing = "".join(f"<td>{_text(brief(run.fields[field]))}</td>" for field in fields)
        finals = [
            formats.short(run.values[m]) if m in run.values else run.texts.get(m, formats.ABSENT) for m in metrics
        ]
        values = "".join(f'<td class="num">{final}</td>' for final in finals)
        rows.append(
            f'<tr><td><svg class="swatch" aria-hidden="true" data-colour="{colours[run.id]}"><rect width="100%" '
            f'height="100%" rx="2"/></svg><a href="/jobs/{run.id}">{name}</a><span class="under"><span class="mono">'
            f"{short}</span> · {_text(run.project)}{person}</span></td><td>"
            f'<span class="pill {phrases.TONES[run.status]}">{run.status.value}</span></td>{differing}'
            f'<td class="num">{formats.count(run.step)}</td>{values}<td class="num">{formats.duration(run.duration_s)}'
            f'</td><td class="num">{dollars(cost) if cost is not None else "unknown"}</td><td class="num">'
            f'<button class="button" form="choice" name="without" value="{run.id}" '
            f'aria-label="leave out {name} {short}">leave out</button></td></tr>\n'
        )
    return _ours("".join(rows))


def brief_text(text: str) -> str:
    """A value with twelve digits of each hash in it: five whole ones push a table off the screen."""
    return _HASH.sub(r"\1…", text)


def brief(text: str) -> str | Markup:
    """The same, with the whole value in the title."""
    short = brief_text(text)
    return text if short == text else Markup('<span title="{}">{}</span>').format(clean(text), clean(short))


def _text(value: str | Markup) -> str:
    """A value of a job, as a template prints it."""
    return str(value if isinstance(value, Markup) else escape(clean(value)))


def _ours(html: str) -> Markup:
    return Markup(html)  # noqa: S704 (every value in it went through _text, is a number or is a word of ours)
