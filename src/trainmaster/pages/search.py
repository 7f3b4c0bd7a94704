"""One search for everything: a job by name or id, a failure by its text, a node by name, a GPU by serial number."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmaster.api.search import Hit, SearchPage
from trainmaster.core.results import Verdict
from trainmaster.core.states import Status
from trainmaster.pages.parts.node_journal import moment_of, read_history
from trainmaster.store.database import Database
from trainmaster.store.page_rows import runs, search
from trainmaster.store.page_rows.search import FoundNode

if TYPE_CHECKING:
    from trainmaster.cluster.health.history import Entry

MOST = 20  # of each kind
LONGEST = 100  # characters of a query
_DEVICE_LETTERS = 5  # a shorter word stands in the findings of every check: it is looked for in bad ones alone
_FAULT_LETTERS = 3  # as Xid
_WRITTEN = re.compile(r"^serial: ?", re.IGNORECASE)  # as the pages write a serial number
_AROUND = 160  # characters of a text shown


def read(db: Database, query: str = "", *, project: str | None = None, home: Path | None = None) -> SearchPage:
    """What the words of a query are found in, in one project or in all; with a home also in the operator's checks."""
    word = " ".join(query.replace("\x00", "").split())[:LONGEST]
    if not word:
        return SearchPage(query="", hits=(), more=False)
    query, word = word, _WRITTEN.sub("", word) or word
    most = MOST + 1
    with db.read():
        # Found first and read then: one that cannot be read is left out, and says all the same that there are more.
        found = runs.list_choices(db, word=word, project=project, limit=most)
        jobs = runs.find_jobs(db, [each.id for each in found[:MOST]])
        failures = search.find_failures(db, word, project=project, limit=most)
        nodes = search.find_nodes(db, word, project=project, limit=most)
        devices = []
        if len(word) >= _FAULT_LETTERS:
            short = len(word) < _DEVICE_LETTERS
            devices = search.find_devices(db, word, project=project, limit=most, only_bad=short)
    hits = [
        Hit(kind="job", title=row.name, text=row.message, job_id=row.id, project=row.project, status=row.status,
            at=row.created_at)
        for row in jobs
    ]  # fmt: skip
    named = {hit.job_id for hit in hits}
    hits += [
        Hit(kind="failure", title=row.name, text=_around(row.text, word), job_id=row.job_id, project=row.project,
            status=Status(row.status), at=row.at)
        for row in failures[:MOST]
        if row.job_id not in named
    ]  # fmt: skip
    hits += [_machine("node", row, "checked") for row in nodes[:MOST]]
    hits += [_machine("gpu", row, _around(text, word), gpu=gpu) for row, text, gpu in _each_once(devices[:MOST], word)]
    known = {hit.title for hit in hits if hit.kind in ("node", "gpu")}
    checked = list(_find_checked(home, word, besides=known)) if home is not None else []
    hits += checked[:MOST]
    more = len(checked) > MOST or any(len(rows) > MOST for rows in (found, failures, nodes, devices))
    return SearchPage(query=query, hits=tuple(hits), more=more)


def _find_checked(home: Path, word: str, *, besides: Collection[str]) -> Iterator[Hit]:
    """Nodes by name and fault, GPUs by serial number and fault in the operator's own checks, the newest first."""
    shown, asked = set[str](), word.lower()
    for entry in reversed(read_history(home)):
        serial = entry.key.partition(":")[2] if entry.device is not None else ""
        if entry.node in besides:
            continue
        for kind, name in ("node", entry.node), ("gpu", serial):
            key = entry.node if kind == "node" else entry.key
            own = (entry.device is None) == (kind == "node")  # a fault is that of the GPU, or of the rest of the node
            fault = own and len(asked) >= _FAULT_LETTERS and _has_fault(entry, asked)
            if (asked not in name.lower() and not fault) or key in shown:
                continue
            shown.add(key)
            text = " · ".join(part for part in (entry.device, serial, entry.reason) if part)
            yield _checked_hit(kind, entry, text)


def _has_fault(entry: Entry, asked: str) -> bool:
    bad = entry.verdict not in (Verdict.PASS, Verdict.SKIP)
    return bad and (asked in entry.reason.lower() or asked in (check.lower() for check in entry.checks))


def _checked_hit(kind: Any, entry: Entry, text: str) -> Hit:
    return Hit(
        kind=kind, title=entry.node, text=text, job_id=None, project=None, status=None, at=moment_of(entry.at),
        gpu=entry.key if kind == "gpu" else None,
    )  # fmt: skip


def _machine(kind: Any, row: FoundNode, text: str, *, gpu: str | None = None) -> Hit:
    return Hit(
        kind=kind, title=row.node, text=text, job_id=row.job_id, project=row.project, status=None, at=row.at, gpu=gpu
    )


def _each_once(rows: list[FoundNode], word: str) -> Iterator[tuple[FoundNode, str, str | None]]:
    """The newest result of each node, with the finding that has the word and the GPU that it is of."""
    shown: set[str] = set()
    for row in rows:
        if row.node in shown:
            continue
        for finding in row.findings if isinstance(row.findings, list) else ():
            text = _words(finding)
            if word.lower() in text.lower():
                shown.add(row.node)
                yield row, text, _key(finding)
                break


def _key(finding: Any) -> str | None:
    """A GPU by its serial number, as its page is asked for; None where the finding states none that identifies it."""
    from trainmaster.cluster.health.history import identifies

    values = finding.get("values") if isinstance(finding, dict) else None
    return f"serial:{values['serial']}" if isinstance(values, dict) and identifies("serial", values) else None


def _words(finding: Any) -> str:
    """A finding as one line: device, reason and values."""
    if not isinstance(finding, dict):
        return str(finding)
    values = finding.get("values")
    pairs = [f"{name} {value}" for name, value in values.items()] if isinstance(values, dict) else []
    return " · ".join(str(part) for part in (finding.get("device"), finding.get("reason"), *pairs) if part)


def _around(text: str, word: str) -> str:
    """The part of a text in which the word stands."""
    at = max(0, text.lower().find(word.lower()))
    start = max(0, at - _AROUND // 2)
    end = start + _AROUND
    return ("…" if start else "") + text[start:end] + ("…" if len(text) > end else "")
