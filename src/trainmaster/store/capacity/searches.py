"""Searches: the space of a set, its trials as they were proposed, and what they reported.

Every change of a search takes its turn: it is made only if nothing was recorded since its rows were read, and the turn
is kept with it. So all changes of a search have one order, whoever makes them, and a proposal saw exactly the ends of
earlier turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, insert, select, update

from trainmaster.core.config.search import Search
from trainmaster.core.schema import build, to_plain
from trainmaster.core.spec import JobSpec
from trainmaster.store import tables as t
from trainmaster.store.database import Database

State = Literal["running", "complete", "pruned", "failed"]
_SEARCHES, _TRIALS, _REPORTS = t.searches.c, t.search_trials.c, t.search_reports.c


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRow:
    """A search, and how many changes of it are recorded."""

    set_id: str
    search: Search
    template: Mapping[str, Any]
    word: str | None
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTrial:
    """One trial. `value` and `step` are the newest of the metric; of a pruned one, those at which it was pruned."""

    number: int
    values: Mapping[str, Any]
    job_id: str | None
    state: State
    value: float | None
    step: int | None
    message: str
    attributes: Mapping[str, Any]  # of the pruner
    read: tuple[int, int]  # attempt and offset of the last event that was read
    proposed: int
    ended: int | None


def insert_search(conn: Connection, set_id: str, search: Search, template: Mapping[str, Any], word: str) -> None:
    row = {"set_id": set_id, "search": to_plain(search), "template": to_plain(template), "word": word, "turn": 0}
    conn.execute(insert(t.searches).values(row))


def find_search(db: Database, set_id: str) -> SearchRow | None:
    row = db.first(select(t.searches).where(_SEARCHES.set_id == set_id))
    return SearchRow(**{**row, "search": build(Search, row["search"])}) if row is not None else None


def list_ids(db: Database, set_ids: Sequence[str]) -> set[str]:
    """Those of these sets that are searches."""
    return set(db.scalars(select(_SEARCHES.set_id).where(_SEARCHES.set_id.in_(list(set_ids)))))


def list_trials(db: Database, set_id: str) -> list[SearchTrial]:
    """What was proposed, in order."""
    made = t.set_trials.c
    query = (
        select(t.search_trials, made["values"], made.job_id)
        .join(t.set_trials, (made.set_id == _TRIALS.set_id) & (made.number == _TRIALS.number))
        .where(_TRIALS.set_id == set_id)
        .order_by(_TRIALS.number)
    )
    rows = [dict(row) for row in db.mappings(query)]
    for row in rows:
        row["read"] = row.pop("read_attempt"), row.pop("read_offset")
        del row["set_id"]
    return [SearchTrial(**row) for row in rows]


def list_reports(db: Database, set_id: str, *, steps: Sequence[int] = (), number: int) -> dict[int, dict[int, float]]:
    """Values by trial and step: those of these steps, and all of one trial."""
    found: dict[int, dict[int, float]] = {}
    query = select(_REPORTS.number, _REPORTS.step, _REPORTS.value).where(_REPORTS.set_id == set_id)
    with db.read() as conn:
        for wanted in (_REPORTS.step.in_(steps), _REPORTS.number == number):
            for trial, step, value in conn.execute(query.where(wanted)).all():
                found.setdefault(trial, {})[step] = value
    return found


def take_turn(conn: Connection, set_id: str, *, seen: int) -> int | None:
    """The turn of a change that is made from what was seen; None where another was recorded since."""
    mine = (_SEARCHES.set_id == set_id, _SEARCHES.turn == seen)
    changed = conn.execute(update(t.searches).where(*mine).values(turn=seen + 1))
    return seen + 1 if changed.rowcount == 1 else None


def insert_trial(
    conn: Connection,
    set_id: str,
    number: int,
    values: Mapping[str, Any],
    *,
    turn: int,
    job_id: str | None,
    spec: JobSpec | None,
    word: str | None,
    refused: str = "",
) -> None:
    """A proposal with its job; without one where a spec with these values is `refused`."""
    made = {"set_id": set_id, "number": number, "values": dict(values), "job_id": job_id, "word": word}
    conn.execute(insert(t.set_trials).values({**made, "spec": to_plain(spec) if spec is not None else {}}))
    row = {
        "set_id": set_id, "number": number, "state": "failed" if refused else "running", "message": refused,
        "attributes": {}, "read_attempt": 0, "read_offset": -1, "proposed": turn, "ended": turn if refused else None,
    }  # fmt: skip
    conn.execute(insert(t.search_trials).values(row))


def set_trial(conn: Connection, set_id: str, trial: SearchTrial, reports: Mapping[int, float]) -> None:
    """What became of a trial, with the values that its pruner was given since."""
    if reports:
        rows = [
            {"set_id": set_id, "number": trial.number, "step": step, "value": value} for step, value in reports.items()
        ]
        conn.execute(insert(t.search_reports), rows)
    attempt, offset = trial.read
    values = {
        "state": trial.state, "value": trial.value, "step": trial.step, "message": trial.message,
        "attributes": dict(trial.attributes), "read_attempt": attempt, "read_offset": offset, "ended": trial.ended,
    }  # fmt: skip
    mine = (_TRIALS.set_id == set_id, _TRIALS.number == trial.number)
    conn.execute(update(t.search_trials).where(*mine).values(values))
