"""Runs side by side: first how their specs differ, then their final values; curves are asked for by metric."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from trainmaster import targets
from trainmaster.api.compare import ComparedRun, Comparison, RunCurve, RunGroup, SpecDifference
from trainmaster.core.money.cost import Amount, round_cents
from trainmaster.pages.job import mask_env
from trainmaster.pages.parts import arguments
from trainmaster.pages.parts.downsample import number, sick_text, whole
from trainmaster.store import costs, events
from trainmaster.store.database import Database
from trainmaster.store.page_rows import figures
from trainmaster.store.page_rows.runs import RunRow, find_runs

MOST = 200  # runs
POINTS = 240  # of a curve; fewer where there are many runs
EVAL = "eval/"  # before the name of a metric of evaluations
_MOST_METRICS = 60
_LONGEST = 120  # characters of a value of a spec
_LONGEST_LIST = 4_000  # characters of a whole list of words; the spec of the run has all
_COMMANDS = ("command", "container.options")  # lists of words that are compared argument by argument
_NOT_DRAWN = frozenset({"step", "steps", "epoch", "iteration", "rank"})
ABSENT = "–"
_to_text = json.JSONEncoder(ensure_ascii=False).encode  # made once: 200 specs have some 30,000 fields


def read(
    db: Database,
    *,
    ids: Sequence[str] = (),
    metric: str = "loss",
    group: str | None = None,
    project: str | None = None,
    now: datetime | None = None,
) -> Comparison:
    """The comparison of these jobs; one of another project is as one that is not there."""
    now, asked = now or datetime.now(UTC), list(dict.fromkeys(ids))[:MOST]
    with db.read() as conn:
        found = find_runs(conn, asked, project=project)
        known = [found[job] for job in asked if job in found]
        names = [row.id for row in known]
        steps = events.last_data(db, names, phase="STEP")
        evals = events.last_data(db, names, phase="EVAL_MODEL")
        spent = costs.job_costs(db, names, now=now)
    specs = {row.id: _plain(row.spec) for row in known}
    differences, same = find_differences(specs)
    chosen = next((part for part in differences if part.field == group), None)
    groups = {job: value for value, jobs in chosen.values for job in jobs} if chosen is not None else {}
    fields: dict[str, dict[str, str]] = {job: {} for job in names}
    for part in differences:
        for value, jobs in part.values:
            for job in jobs:
                fields[job][part.field] = value
    runs = tuple(
        _run(
            row,
            last=steps.get(row.id, {}),
            held_out=evals.get(row.id, {}),
            spent=spent[row.id],
            fields=fields[row.id],
            group=groups.get(row.id),
            now=now,
        )
        for row in known
    )
    return Comparison(
        runs=runs,
        missing=len(asked) - len(known),
        differences=differences,
        whole=_list_whole(specs, differences),
        same=same,
        metrics=_metrics(runs),
        metric=metric,
        group=chosen.field if chosen is not None else None,
        groups=_groups(chosen, runs, metric) if chosen is not None else (),
        made_at=now,
    )


def read_curve(db: Database, job_id: str, *, metric: str, points: int = POINTS) -> RunCurve:
    """One metric of one run, sampled evenly over its events."""
    phase, name = ("EVAL_MODEL", metric.removeprefix(EVAL)) if metric.startswith(EVAL) else ("STEP", metric)
    rows = figures.sample_steps(db, job_id, phase=phase, count=points)
    begun = next((row.ts for row in rows if row.ts is not None), None)
    listed = []
    for row in rows:
        step = whole(row.data, "step")
        if step is None or name not in row.data:
            continue
        seconds = (row.ts - begun).total_seconds() if row.ts is not None and begun is not None else None
        listed.append((float(step), seconds, number(row.data, name)))
    return RunCurve(id=job_id, points=tuple(listed))


def _plain(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    env = spec.get("env")
    # Of one that is no mapping nobody knows what may be shown.
    return {**spec, "env": mask_env(env) if isinstance(env, Mapping) else None} if env else spec


def find_differences(specs: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[SpecDifference, ...], int]:
    """Fields that differ, those with the fewest values first (they group runs), the name last; and how many do not."""
    found: dict[str, dict[str, str]] = {}
    same = _compare("", specs, found, len(specs)) if specs else 0
    for field in _COMMANDS:
        if field in found and (different := arguments.find_different(_list_words(specs, field))):
            del found[field]
            found |= {
                f"{field} {name}": {job: _text(value) for job, value in values.items()}
                for name, values in different.items()
            }
    differences = []
    for field, texts in found.items():
        values: dict[str, list[str]] = {}
        for job in specs:
            values.setdefault(texts.get(job, ABSENT), []).append(job)
        if len(values) < 2:  # they read alike, as 1 and "1"
            same += 1
            continue
        ordered = sorted(values.items(), key=lambda item: (-len(item[1]), item[0]))
        pairs = tuple((value, tuple(jobs)) for value, jobs in ordered)
        differences.append(SpecDifference(field=field, values=pairs))
    differences.sort(key=lambda part: (part.field == "name", len(part.values), part.field))
    return tuple(differences), same


def _list_words(specs: Mapping[str, Mapping[str, Any]], field: str) -> dict[str, list[str]]:
    """By run: its list of words at a path, where it has one."""
    found: dict[str, list[str]] = {}
    for job, spec in specs.items():
        value: Any = spec
        for name in field.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, list | tuple) and value and all(isinstance(word, str) for word in value):
            found[job] = list(value)
    return found


def _list_whole(
    specs: Mapping[str, Mapping[str, Any]], differences: Sequence[SpecDifference]
) -> tuple[SpecDifference, ...]:
    """The whole of each list of words of which only the arguments that differ are among the differences."""
    listed = []
    for field in _COMMANDS:
        if any(part.field.startswith(f"{field} ") for part in differences):
            values: dict[str, list[str]] = {}
            for job, words in _list_words(specs, field).items():
                text = shlex.join(words)
                values.setdefault(text if len(text) <= _LONGEST_LIST else f"{text[:_LONGEST_LIST]}…", []).append(job)
            listed.append(
                SpecDifference(field=field, values=tuple((text, tuple(jobs)) for text, jobs in values.items()))
            )
    return tuple(listed)


def _compare(path: str, stated: Mapping[str, Any], found: dict[str, dict[str, str]], runs: int) -> int:
    """Compare what runs state at a path and below it. Fields that differ go into `found`; returns how many do not.

    What is equal in all runs is not taken apart: 200 specs have some 50,000 fields, of which a few differ.
    """
    first = next(iter(stated.values()))
    if len(stated) == runs and all(value == first for value in stated.values()):
        return _count(first)
    same, blocks = 0, {job: value for job, value in stated.items() if isinstance(value, dict)}
    texts = {job: _text(value) for job, value in stated.items() if job not in blocks}
    if texts:
        found[path] = texts
    for name in dict.fromkeys(name for block in blocks.values() for name in block):
        below = {job: block[name] for job, block in blocks.items() if _is_stated(block.get(name))}
        if below:
            same += _compare(f"{path}.{name}" if path else name, below, found, runs)
    return same


def _count(value: Any) -> int:
    """Fields of a part of a spec."""
    if not isinstance(value, dict):
        return 1
    return sum(_count(item) for item in value.values() if _is_stated(item))


def _is_stated(value: Any) -> bool:
    return value is not None and value != []


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else _to_text(value)
    if text == ABSENT:
        return f'"{text}"'  # a value that reads like none
    if len(text) <= _LONGEST:
        return text
    # Two that begin alike are two values: what is cut off stands for itself by a few digits of its digest.
    return f"{text[: _LONGEST - 9]}… {hashlib.sha256(text.encode(errors='replace')).hexdigest()[:7]}"


def _run(
    row: RunRow,
    *,
    last: Mapping[str, Any],
    held_out: Mapping[str, Any],
    spent: Amount,
    fields: Mapping[str, str],
    group: str | None,
    now: datetime,
) -> ComparedRun:
    values = {name: value for name in last if name not in _NOT_DRAWN and (value := number(last, name)) is not None}
    values |= {
        f"{EVAL}{name}": value
        for name in held_out
        if name not in _NOT_DRAWN and (value := number(held_out, name)) is not None
    }
    texts = {name: word for name in last if name not in _NOT_DRAWN and (word := sick_text(last, name)) is not None}
    texts |= {
        f"{EVAL}{name}": word
        for name in held_out
        if name not in _NOT_DRAWN and (word := sick_text(held_out, name)) is not None
    }
    end = row.ended_at or now
    free = targets.is_free(row.target) and spent.known_cents == 0
    return ComparedRun(
        id=row.id,
        name=row.name,
        project=row.project,
        target=targets.split(row.target)[1],
        submitted_by=row.submitted_by,
        status=row.status,
        created_at=row.created_at,
        duration_s=max(0.0, (end - row.started_at).total_seconds()) if row.started_at is not None else None,
        step=whole(last, "step"),
        values=values,
        texts=texts,
        cost_cents=None if free else round_cents(spent.cents),
        fields=fields,
        group=group,
    )


def _metrics(runs: Sequence[ComparedRun]) -> tuple[str, ...]:
    """Metrics that any run has, those of most runs first."""
    counts: dict[str, int] = {}
    for run in runs:
        for name in (*run.values, *run.texts):
            counts[name] = counts.get(name, 0) + 1
    first = ("loss", f"{EVAL}loss")
    return tuple(sorted(counts, key=lambda name: (name not in first, -counts[name], name))[:_MOST_METRICS])


def _groups(chosen: SpecDifference, runs: Sequence[ComparedRun], metric: str) -> tuple[RunGroup, ...]:
    groups = []
    for value, _ in chosen.values:
        members = [run for run in runs if run.group == value]
        finals = [run.values[metric] for run in members if metric in run.values]
        groups.append(
            RunGroup(
                value=value,
                runs=len(members),
                lowest=min(finals, default=None),
                mean=sum(finals) / len(finals) if finals else None,
                highest=max(finals, default=None),
            )
        )
    return tuple(groups)
