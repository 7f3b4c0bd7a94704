"""Compare the providers' listings with our rows: what is ours and not wanted is terminated until the listing agrees.

One listing for all jobs, at every look. A machine is ours by its name (an attempt and a nonce), and wanted while its
row says so and its attempt goes on. Every other machine of ours is terminated, again and again; a machine that
outlives its job is also reported. Foreign machines are never touched.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from trainmaster.api.nodes import Instance as InstanceRow
from trainmaster.control.context import Context
from trainmaster.control.notify.job_news import put_job_news
from trainmaster.core.errors import TargetError, UsageError
from trainmaster.store import attempts, instances
from trainmaster.store.capacity import queue
from trainmaster.store.database import Database
from trainmaster.store.heads import JobHead, find_head
from trainmaster.targets import Instance, InstanceState, Listing, Rents, home_mark

BUSY_S, IDLE_S = 5.0, 60.0  # between two looks: after an error, and where no machine is rented
_ENDING = (InstanceState.TERMINATING, InstanceState.PREEMPTED, InstanceState.GONE)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwanted:
    """A machine of ours that no attempt wants."""

    instance: Instance
    why: str
    job: JobHead | None
    outlives: bool  # its job or attempt was over when the listing was requested


async def sweep(context: Context) -> float:
    """One look at every provider; seconds until the next one."""
    open_targets, rest_s = await asyncio.to_thread(instances.list_open_targets, context.db), IDLE_S
    for word in {*open_targets, *await asyncio.to_thread(queue.list_used_words, context.db)}:
        try:
            target = context.load(word)
            if isinstance(target, Rents):
                rest_s = min(rest_s, target.listing_s()) if word in open_targets else rest_s
                await _sweep_one(context, word, target)
        except (TargetError, UsageError) as error:
            log.info("%s could not be swept: %s", word, error)
    return rest_s


async def _sweep_one(context: Context, word: str, target: Rents) -> None:
    listing = await target.listing()
    unwanted = await asyncio.to_thread(find_unwanted, context, listing, settle_s=target.settle_s())
    for machine in unwanted:
        log.warning("%s at %s is terminated: %s", machine.instance.id, word, machine.why)
        if machine.outlives and machine.job is not None:
            await asyncio.to_thread(_tell, context.db, machine)
    if unwanted:
        await target.terminate([machine.instance.id for machine in unwanted])


def find_unwanted(context: Context, listing: Listing, *, settle_s: float) -> list[Unwanted]:
    """Machines of ours in a listing that no attempt wants. The rows are read after the listing was requested."""
    ours = [instance for instance in listing.instances if instance.label is not None and instance.state not in _ENDING]
    rows = instances.list_by_name(context.db, {instance.name for instance in ours})
    mark = home_mark(context.home)
    unwanted = []
    for instance in ours:
        assert instance.label is not None
        row = rows.get(instance.name)
        # Its spec is not asked for: one that cannot be read would keep every machine that leaked.
        job = find_head(context.db, instance.label.attempt.partition(".")[0])
        if row is None and job is None and instance.label.home != mark:
            continue  # of another home: shown by `reap`, left alone
        why, outlives = _judge(context.db, instance, row, job, listing, settle_s=settle_s)
        if why:
            unwanted.append(Unwanted(instance=instance, why=why, job=job, outlives=outlives))
    return unwanted


def _judge(
    db: Database, instance: Instance, row: InstanceRow | None, job: JobHead | None, listing: Listing, *, settle_s: float
) -> tuple[str, bool]:
    """Why a machine is not wanted, and whether it outlives its job; an empty reason where it is wanted."""
    if job is None:
        return "no job of this database", False
    late = timedelta(seconds=settle_s)
    if job.final:
        return f"its job is {job.status}", job.ended_at is not None and listing.at > job.ended_at + late
    if row is None:
        return "it has no row", False
    attempt = next((each for each in attempts.list_attempts(db, job.id) if each.id == row.attempt), None)
    if attempt is not None and attempt.released_at is not None:
        return f"attempt {attempt.number} was released", listing.at > attempt.released_at + late
    if row.state not in ("launching", "active"):
        return f"its row is {row.state}", False
    if row.provider_id not in (None, instance.id):
        return f"a second machine under the name of {row.provider_id}", False
    return "", False


def _tell(db: Database, machine: Unwanted) -> None:
    """Notify once per machine that it outlives its job."""
    job, instance, label = machine.job, machine.instance, machine.instance.label
    assert job is not None and label is not None
    text = f"{instance.id} ({instance.kind}) is still listed although {machine.why}; it is terminated again"
    with db.write() as conn:
        put_job_news(conn, job, "instance.leaked", about=instance.id, message=text, at=datetime.now(UTC))
