"""A job page as Markdown: for an issue, a pull request, a chat."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainmaster.api.jobs import JobPage
from trainmaster.core.clean_text import clean, clean_line
from trainmaster.core.results import Verdict
from trainmaster.report import phrases
from trainmaster.report.formats import count, duration, moment, short


def render_markdown(page: JobPage) -> str:
    """The report without its curves. Values from nodes cannot become markup or HTML."""
    return "\n".join(_lines(page)).rstrip() + "\n"


def _lines(page: JobPage) -> Iterator[str]:
    yield f"# {escape(page.name)}: {escape(phrases.title(page))}\n"
    yield f"{escape(phrases.sentence(page))}\n"
    if page.to_do and page.status.value == "failed":
        yield f"**What to do:** {escape(page.to_do)}.\n"
    for words in filter(None, (page.careful, *page.run.warnings)):
        yield f"**Careful:** {escape(words)}.\n"
    yield "| | |\n|---|---|"
    for figure in phrases.figures(page):
        note = f" ({escape(figure.note)})" if figure.note else ""
        yield f"| {figure.name} | {escape(figure.value)}{note} |"
    yield f"| Job | `{page.id}` |"
    yield f"| Started | {moment(page.started_at)} |"
    yield f"| Ended | {moment(page.ended_at)} |\n"
    yield from _preflight(page)
    yield from _iterations(page)
    yield from _attempts(page)
    if page.run.garbage_lines:
        yield f"{count(page.run.garbage_lines)} lines of the event stream were not events; they are kept.\n"
    if page.spec:
        yield f"## Spec\n\n{_fence(phrases.spec_text(page.spec), 'yaml')}\n"
    yield f"Made by `{page.made_by}` (Trainmaster {page.version}) at {moment(page.made_at)}."


def _preflight(page: JobPage) -> Iterator[str]:
    preflight = page.run.preflight
    if preflight is None:
        yield "## Pre-flight\n\nNo check ran before the start.\n"
        return
    overall = preflight.overall.value if preflight.overall else "checking"
    yield f"## Pre-flight: {overall}\n\n| Check | Verdict | Device | What was found | Values |\n|---|---|---|---|---|"
    skipped = [row.check for row in preflight.checks if row.verdict is Verdict.SKIP]
    for row in preflight.checks:
        if row.verdict is Verdict.SKIP:
            continue
        reason = escape(row.reason) + (f" → {escape(row.action)}" if row.action else "")
        values = ", ".join(
            f"{escape(name)}={escape(phrases.value_text(value))}"
            for name, value in row.values.items()
            if value is not None
        )
        yield f"| {escape(row.check)} | {row.verdict.value} | {escape(row.device or '')} | {reason} | {values} |"
    if names := list(dict.fromkeys(skipped)):
        many = f"{len(names)} {'check does' if len(names) == 1 else 'checks do'} not apply here"
        yield f"\n{many}: {', '.join(map(escape, names))}."
    yield ""


def _iterations(page: JobPage) -> Iterator[str]:
    if not page.run.iterations:
        return
    yield "## Iterations\n\n| Iteration | Took | Phases | Epochs and their loss | Evaluations |\n|---|---|---|---|---|"
    for iteration in page.run.iterations:
        took = duration(iteration.seconds) if iteration.seconds is not None else ""
        phases = ", ".join(escape(phase.kind) for phase in iteration.phases)
        losses = ", ".join(
            f"{epoch.number}: {short(epoch.avg_loss)}"
            for epoch in iteration.newest_epochs
            if epoch.avg_loss is not None
        )
        evaluations = "; ".join(
            escape(f"{result.model_id or ''} {phrases.metrics_text(result.metrics)}".strip())
            for result in iteration.evaluations
        )
        epochs = count(iteration.epochs) + (f": {losses}" if losses else "")
        yield f"| {iteration.number} | {took} | {phases} | {epochs} | {evaluations} |"
    yield ""


def _attempts(page: JobPage) -> Iterator[str]:
    for attempt in page.attempts:
        took = ""
        if attempt.started_at and attempt.ended_at:
            took = f", {duration((attempt.ended_at - attempt.started_at).total_seconds())}"
        state = "ok" if attempt.ok else attempt.reason or attempt.report or "placed"
        yield f"## Attempt {attempt.number}: {state}{took}\n"
        if attempt.message:
            yield f"{escape(attempt.message)}\n"
        if attempt.ok:
            continue
        for name, proof in phrases.evidence(attempt, page.run.preflight):
            yield f"{escape(name)}:\n\n{_fence(proof)}\n"


_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!])")


def escape(value: str) -> str:
    """One line that a Markdown reader shows as it is."""
    return _SPECIAL.sub(r"\\\1", clean_line(value))


def _fence(text: str, kind: str = "") -> str:
    """A code block with a fence longer than any inside it."""
    text = clean(text)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{kind}\n{text.rstrip()}\n{fence}"
