"""Stages of a job on rented machines: choose, launch, boot, log in; and the way back.

    placing       nothing: the offer is chosen when it is launched, prices and capacity change by the minute
    provisioning  intent row → launch → listing, until every machine is active
    connecting    first login, host keys pinned, GPUs compared with those returned as bad
    releasing     kill the attempt, take in the rest, terminate until the listing agrees

A launch is sent once per intent row, and only by the reconciler that moved the row to `launching`. Without a clear
answer the row stays there until the listing shows the machine, or has not shown it for `settle_s`. What appears later
still carries our name and is terminated by the sweep (rented_sweep.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime

from trainmaster.api.nodes import Instance as InstanceRow
from trainmaster.control.context import Context
from trainmaster.control.deadlines import find_stop_request
from trainmaster.control.transitions import abandon, move
from trainmaster.core.errors import NoCapacity, TargetError, TrainmasterError, Unreachable, UsageError
from trainmaster.core.states import Reason, Stage
from trainmaster.store import attempts, costs, instances, jobs
from trainmaster.store.database import Connection
from trainmaster.store.rows import AttemptRow, JobRow
from trainmaster.targets import Handle, Instance, InstanceState, Label, LaunchRequest, Listing, NotNow, Offer, Rents

# A machine that ended an attempt for one of these reasons is not trusted again.
BAD_MACHINE = frozenset({Reason.CHECK_FAILED, Reason.BAD_MACHINE, Reason.GPU_ERROR})


async def provision(context: Context, job: JobRow, attempt: AttemptRow, handle: Handle) -> bool:
    """Bring every machine of the attempt to `active`; one effect at a time."""
    target = _target(context, job)
    if (stopped := await _stop(context, job, attempt, "being rented")) is not None:
        return stopped
    rows = await asyncio.to_thread(instances.list_of_attempt, context.db, attempt.id)
    wanted = [row for row in rows if row.state in instances.WANTED]
    if len(wanted) < job.spec.resources.nodes:
        return await _intend(context, job, attempt, handle, rows)
    if intended := [row for row in wanted if row.state == "intended"]:
        return await _launch(context, job, attempt, target, intended[0])
    ended, listed = await _look_up(context, job, attempt, target, wanted)
    if ended is not None:
        return ended
    ready = [instance for instance in listed if instance is not None and _is_ready(instance)]
    if len(ready) < len(wanted):
        states = ", ".join(instance.state if instance is not None else "launching" for instance in listed)
        return await _note(context, job, f"renting {wanted[0].kind} in {wanted[0].region}: {states}")
    named = [{"id": instance.id, "name": row.nonce} for row, instance in zip(wanted, ready, strict=True)]

    def change(conn: Connection) -> bool:
        attempts.set_handle(conn, attempt.id, {**handle, "instances": named})
        return move(conn, context, job, Stage.CONNECTING)

    return await context.apply(job.id, change, what="booted")


async def _stop(context: Context, job: JobRow, attempt: AttemptRow, doing: str) -> bool | None:
    """Give the attempt up where a stop is requested; else None."""
    if (request := find_stop_request(job, attempt)) is None:
        return None
    return await abandon(context, job, attempt, request.reason, f"{request.text}; its machines were {doing}")


async def _look_up(
    context: Context, job: JobRow, attempt: AttemptRow, target: Rents, wanted: Sequence[InstanceRow]
) -> tuple[bool | None, list[Instance | None]]:
    """Machines as the listing has them, or the handler's return value where one of them ends the pass."""
    ids = [row.provider_id for row in wanted if row.provider_id is not None and _is_settled(context, row, target)]
    try:
        listing = await context.call("list", target.listing(known=ids))
    except Unreachable:
        raise
    except (TargetError, UsageError) as error:  # a wrong key: the same answer for as long as one asks
        return await abandon(context, job, attempt, Reason.TARGET_ERROR, str(error)), []
    for row in wanted:
        if (ended := await _resolve(context, job, attempt, row, listing, settle_s=target.settle_s())) is not None:
            return ended, []
    return None, [listing.find(row.nonce, provider_id=row.provider_id) for row in wanted]


async def _intend(
    context: Context, job: JobRow, attempt: AttemptRow, handle: Handle, rows: Sequence[InstanceRow]
) -> bool:
    """Choose an offer and commit the names of the machines that are missing."""
    spec, target = job.spec, _target(context, job)
    refused = {(str(row.kind), str(row.region)) for row in rows if (row.detail or {}).get("refused")}
    try:
        offers = await context.call("place", target.choose(spec, refused=refused))
    except NoCapacity as full:
        if not _has_waited(context, job):
            if refused:  # sold out down the whole list: next time from its top
                await context.apply(job.id, lambda conn: _forget_refusals(conn, rows), what="offers again")
            raise
        return await abandon(context, job, attempt, Reason.NO_CAPACITY, str(full))
    except Unreachable:
        raise
    except (TargetError, UsageError) as error:
        return await abandon(context, job, attempt, Reason.TARGET_ERROR, str(error), sent=bool(rows))
    offer, home = offers[0], str(handle["home"])
    kept = [row for row in rows if row.state in instances.WANTED and _is_of_offer(row, offer)]
    missing = spec.resources.nodes - len(kept)
    names = [Label(attempt=attempt.id, home=home).name for _ in range(missing)]
    price = offer.price_cents_per_hour * spec.resources.nodes

    def change(conn: Connection) -> bool:
        for row in rows:  # all machines of an attempt are of one type in one region
            if row.state == "intended" and row not in kept:
                instances.mark_gone(conn, row.nonce, at=context.now(), why="not launched: another offer was taken")
            elif row.state in instances.WANTED and row not in kept:
                instances.mark_unwanted(conn, row.nonce)
        for name in names:
            instances.insert_intent(
                conn, attempt.id, target=job.target, nonce=name, kind=offer.kind, region=offer.region,
                cents_per_hour=offer.price_cents_per_hour, at=context.now(),
            )  # fmt: skip
        attempts.set_handle(conn, attempt.id, {**handle, "price_cents_per_hour": price})
        costs.set_price(conn, attempt.id, price)
        return True

    return await context.apply(job.id, change, what="machines intended")


async def _launch(context: Context, job: JobRow, attempt: AttemptRow, target: Rents, row: InstanceRow) -> bool:
    if not target.may_launch():
        return await _note(context, job, "waiting for its turn: the provider limits launches")
    if not await context.apply(
        job.id, lambda conn: instances.begin_launch(conn, row.nonce, at=context.now()), what="launching"
    ):
        return False
    assert row.kind is not None and row.region is not None
    rent = job.spec.rent
    request = LaunchRequest(
        name=row.nonce, kind=row.kind, region=row.region, file_systems=rent.file_systems, image=rent.image
    )
    try:
        provider_id = await context.call("launch", target.launch(request))
    except Unreachable:
        raise  # unknown: the row stays `launching`, and the listing decides
    except (TargetError, UsageError) as error:  # a setting that is missing: no request was sent
        refused = error
        await context.apply(job.id, lambda conn: _refuse(conn, context, row, refused), what="launch refused")
        if isinstance(refused, NotNow):
            raise
        if isinstance(refused, NoCapacity):
            return True
        return await abandon(context, job, attempt, Reason.TARGET_ERROR, str(refused))
    await context.apply(
        job.id,
        lambda conn: instances.set_found(conn, row.nonce, provider_id=provider_id, active=False),
        what="launched",
    )
    return True


def _refuse(conn: Connection, context: Context, row: InstanceRow, refused: TrainmasterError) -> None:
    """Nothing was launched, and nothing will be under this name."""
    if isinstance(refused, NoCapacity):
        instances.set_detail(conn, row.nonce, refused=True)
    at = row.launched_at or context.now()
    instances.mark_gone(conn, row.nonce, at=at, why=str(refused)[:300])


async def _resolve(
    context: Context, job: JobRow, attempt: AttemptRow, row: InstanceRow, listing: Listing, *, settle_s: float
) -> bool | None:
    """Compare a machine with the listing. None: as it should be, or not there yet; else the handler's return value."""
    assert row.launched_at is not None
    instance = listing.find(row.nonce, provider_id=row.provider_id)
    settled = context.deadlines.elapsed_s(row.launched_at, listing.at) > settle_s  # the clock may have been set
    if instance is None and row.provider_id is None:
        if not settled:
            return await _note(context, job, "the launch had no clear answer; the provider's listing will show it")
        launched_at = row.launched_at
        why = f"launched without an answer, and not listed within {settle_s:g} s"
        await context.apply(
            job.id, lambda conn: instances.mark_gone(conn, row.nonce, at=launched_at, why=why), what="launch absent"
        )
        return True
    if instance is None:
        if not settled:
            return None
        return await abandon(context, job, attempt, Reason.NODE_LOST, f"{row.provider_id} is not listed any more")
    if instance.state is InstanceState.PREEMPTED:
        return await abandon(context, job, attempt, Reason.PREEMPTED, f"{instance.id} was taken back while it booted")
    if instance.state.over:
        return await abandon(
            context, job, attempt, Reason.NODE_LOST, f"{instance.id} is {instance.state} while it booted"
        )
    if instance.state is InstanceState.UNHEALTHY:
        return await abandon(context, job, attempt, Reason.BAD_MACHINE, f"{instance.id} came up unhealthy")
    if row.provider_id is None or (_is_ready(instance) and row.state != "active"):
        ready = _is_ready(instance)
        await context.apply(
            job.id,
            lambda conn: instances.set_found(
                conn, row.nonce, provider_id=instance.id, address=instance.address, active=ready
            ),
            what="machine active" if ready else "machine found",
        )
    if not _is_ready(instance) and _is_overdue(context, job, row.launched_at):
        text = f"{instance.id} did not boot within {job.spec.rent.boot_minutes:g} minutes (it is {instance.state})"
        return await abandon(context, job, attempt, Reason.BAD_MACHINE, text)
    return None


async def connect(context: Context, job: JobRow, attempt: AttemptRow, handle: Handle) -> bool:
    """Log in to machines that have booted; a machine whose GPUs were returned as bad is returned again."""
    target = _target(context, job)
    if (stopped := await _stop(context, job, attempt, "booting")) is not None:
        return stopped
    rows = await asyncio.to_thread(instances.list_of_attempt, context.db, attempt.id)
    wanted = [row for row in rows if row.state in instances.WANTED]
    ended, listed = await _look_up(context, job, attempt, target, wanted)
    if ended is not None:
        return ended
    ready = [instance for instance in listed if instance is not None and _is_ready(instance)]
    if len(ready) < len(wanted):
        return False
    try:
        connected = await context.call("connect", target.connect(handle, ready))
    except Unreachable as error:
        first = min(row.launched_at for row in wanted if row.launched_at is not None)
        if not _is_overdue(context, job, first):
            raise
        text = f"no SSH login within {job.spec.rent.boot_minutes:g} minutes: {error}"
        return await abandon(context, job, attempt, Reason.BAD_MACHINE, text)
    except (TargetError, UsageError) as error:
        return await abandon(context, job, attempt, Reason.TARGET_ERROR, str(error))
    gpus = [list(item.get("gpus", ())) for item in connected["hosts"]]
    bad = await asyncio.to_thread(instances.list_bad_gpus, context.db)
    known = next((gpu for some in gpus for gpu in some if gpu in bad), None)

    def change(conn: Connection) -> bool:
        for row, some in zip(wanted, gpus, strict=True):
            instances.set_detail(conn, row.nonce, gpus=some)
        attempts.set_handle(conn, attempt.id, connected)
        return True if known is not None else move(conn, context, job, Stage.STAGING)

    moved = await context.apply(job.id, change, what="connected")
    if known is not None:
        name = next(item["name"] for item, some in zip(connected["hosts"], gpus, strict=True) if known in some)
        text = f"{name}: GPU {known} was returned before: {bad[known]}"
        return await abandon(context, job, attempt, Reason.BAD_MACHINE, text[:500])
    return moved


async def return_machines(context: Context, job: JobRow, attempt: AttemptRow, handle: Handle) -> None:
    """Terminate every machine of an attempt until the listing agrees, then note it in their rows.

    Unreachable while the provider lists one of them, or a launch without an answer may still appear.
    """
    target = _target(context, job)
    rows = await asyncio.to_thread(instances.list_of_attempt, context.db, attempt.id)
    launched = [row for row in rows if row.state not in ("intended", "gone")]
    now = context.now()
    if launched:
        # The handle names machines that were logged in to; the rows also those that still boot.
        known = [{"id": row.provider_id, "name": row.nonce} for row in launched if row.provider_id is not None]
        await context.call("release", target.release({**handle, "instances": known}))
    for row in launched:
        waited_s = context.deadlines.elapsed_s(row.launched_at or now, now)
        if row.provider_id is None and waited_s < target.settle_s():
            raise Unreachable(f"{row.nonce} was launched without an answer and may still appear")

    def change(conn: Connection) -> None:
        bad = f"{attempt.reason}: {attempt.message}"[:300] if attempt.reason in BAD_MACHINE else None
        for row in rows:
            if row.state == "gone":
                continue
            if bad is not None and row.provider_id is not None and _is_culprit(handle, row.provider_id, bad):
                instances.set_detail(conn, row.nonce, bad=bad)
            instances.mark_gone(conn, row.nonce, at=context.now(), why="returned")

    await context.apply(job.id, change, what="machines returned")


def _is_culprit(handle: Handle, provider_id: str, message: str) -> bool:
    """Whether a bad machine is this one: the only one of the attempt, or one that the message names."""
    names = [provider_id, *(item["name"] for item in handle.get("hosts", ()) if item["id"] == provider_id)]
    return len(handle.get("instances", ())) < 2 or any(name in message for name in names)


def _target(context: Context, job: JobRow) -> Rents:
    target = context.load(job.target)
    assert isinstance(target, Rents), f"{job.target} rents nothing"
    return target


def _is_ready(instance: Instance) -> bool:
    return instance.state is InstanceState.ACTIVE and instance.address is not None


def _is_settled(context: Context, row: InstanceRow, target: Rents) -> bool:
    """Whether the listing should show a machine by now; before, each look would ask for it by its id."""
    assert row.launched_at is not None
    return context.deadlines.elapsed_s(row.launched_at, context.now()) > target.settle_s()


def _is_of_offer(row: InstanceRow, offer: Offer) -> bool:
    return (row.kind, row.region) == (offer.kind, offer.region)


def _is_overdue(context: Context, job: JobRow, launched_at: datetime) -> bool:
    return context.deadlines.elapsed_s(launched_at, context.now()) > job.spec.rent.boot_minutes * 60


def _has_waited(context: Context, job: JobRow) -> bool:
    limit, since = job.spec.rent.wait_minutes, job.stage_since
    return limit is not None and since is not None and context.deadlines.elapsed_s(since, context.now()) > limit * 60


def _forget_refusals(conn: Connection, rows: Sequence[InstanceRow]) -> None:
    for row in rows:
        if (row.detail or {}).get("refused"):
            instances.set_detail(conn, row.nonce, refused=False)


async def _note(context: Context, job: JobRow, text: str) -> bool:
    if job.message != text:
        await context.apply(job.id, lambda conn: jobs.set_message(conn, job.id, text), what="noted")
    return False
