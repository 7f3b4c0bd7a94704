"""What a run left: instances, launches, rows, jobs and reasons, compared with what they have to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from trainmaster.api.events import Event
from trainmaster.api.nodes import Instance
from trainmaster.core.states import Status
from trainmaster.store import attempts, events, instances
from trainmaster.store.jobs import find_job
from trainmaster.store.rows import JobRow
from trainmaster.targets import Label

from .chaos import EVENTS, Chaos


@dataclass(frozen=True, kw_only=True)
class Verdict:
    lines: list[str]
    wrong: list[str]


def judge(chaos: Chaos) -> Verdict:
    summary = chaos.simulator.summary()
    rows = [row for job in chaos.jobs if (row := find_job(chaos.db, job.id)) is not None]
    checks = {
        "leaked instances": summary["not_terminated"],
        "double launches": list(_double_launches(chaos)),
        "foreign instances touched": summary["foreign_touched"],
        "machine rows not gone": [
            row.nonce for job_row in rows for row in _machines(chaos, job_row) if row.state != "gone"
        ],
        "lost or doubled event rows": [text for row in rows for text in _event_faults(chaos, row)],
        "stuck jobs": [f"{row.id}: {row.stage}: {row.message}" for row in chaos.late],
        "jobs that could not be cancelled": [row.id for row in rows if not row.status.final],
        "failed jobs without a reason": [row.id for row in rows if row.status is Status.FAILED and not row.reason],
        "wrong ends": [text for number, row in enumerate(rows) for text in _end_faults(chaos, number, row)],
    }
    ended = Counter(f"{row.status}{f' ({row.reason})' if row.reason else ''}" for row in rows)
    billed, jobs = summary["instance_minutes"], len(rows)
    ideal = chaos.ideal_minutes * (jobs + 1)
    lines = [
        f"{jobs} jobs, {chaos.kills} kills of the server, {chaos.took_s:.0f} s, seed {chaos.plan.seed}",
        *(f"  {count:4} {end}" for end, count in sorted(ended.items())),
        f"faults: {', '.join(f'{name} {count}' for name, count in summary['faults_injected'].items())}",
        f"launches {summary['launches']}, requests {summary['requests_by_status']}, "
        f"over the rate limit {summary['rate_limit_violations']}",
        f"instance-minutes: {billed:.1f} billed, {ideal:.1f} in undisturbed runs, {billed - ideal:.1f} beyond "
        f"({billed / ideal:.2f} ×); cost ${summary['cost_usd']:.2f}",
        *(
            f"{len(offenders):4} {name}" + "".join(f"\n       {text}" for text in offenders[:5])
            for name, offenders in checks.items()
        ),
    ]
    return Verdict(lines=lines, wrong=[name for name, offenders in checks.items() if offenders])


def _machines(chaos: Chaos, job: JobRow) -> list[Instance]:
    tried = attempts.list_attempts(chaos.db, job.id)
    return [row for attempt in tried for row in instances.list_of_attempt(chaos.db, attempt.id)]


def _double_launches(chaos: Chaos) -> Iterator[str]:
    """Names launched more than once, and attempts of one node with more than one instance."""
    ours = [instance for instance in chaos.simulator.instances() if not instance["foreign"]]
    names = Counter(instance["name"] for instance in ours)
    yield from (f"{name}: {count} times" for name, count in names.items() if count > 1)
    labels = [label for instance in ours if (label := Label.parse(instance["name"])) is not None]
    of_attempts = Counter(label.attempt for label in labels)
    yield from (f"{attempt}: {count} instances" for attempt, count in of_attempts.items() if count > 1)


def _event_faults(chaos: Chaos, job: JobRow) -> Iterator[str]:
    """Rows of each attempt lie end to end, and its own events are numbered from 1 without a gap or a repetition."""
    by_attempt: dict[str, list[Event]] = {}
    for row in events.list_events(chaos.db, job.id, limit=100_000):
        by_attempt.setdefault(row.attempt, []).append(row)
    for attempt, rows in by_attempt.items():
        at = 0
        for row in sorted(rows, key=lambda row: row.offset):
            if row.offset != at:
                yield f"{attempt}: a gap or an overlap at {at}"
            at = row.offset + row.length
        steps = [int(row.data["step"]) for row in rows if row.phase == "STEP"]
        if steps != list(range(1, len(steps) + 1)):
            yield f"{attempt}: steps {steps}"
        if job.status is Status.COMPLETED and attempt == f"{job.id}.{job.attempts}" and len(steps) != EVENTS:
            yield f"{attempt}: {len(steps)} of {EVENTS} events"


def _end_faults(chaos: Chaos, number: int, job: JobRow) -> Iterator[str]:
    """Jobs that end otherwise than they should: only a cancel, a failing script or used-up attempts end one early."""
    cancelled = chaos.cancelled | {late.id for late in chaos.late}
    if job.status is Status.CANCELLED and job.id not in cancelled:
        yield f"{job.id}: cancelled by nobody"
    if number % 10 == 9 and job.status is Status.COMPLETED:
        yield f"{job.id}: its script fails, and it is completed"
    if job.status is Status.FAILED and not job.message:
        yield f"{job.id}: no evidence"
