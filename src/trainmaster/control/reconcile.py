"""The loop that moves every job on until it is final. It keeps nothing that matters in memory.

Level-triggered: at every tick it looks at each job that is not final, as its rows and its target show it, and takes
the next step. A missed change or a restart makes no difference. Each job has a
task of its own, so that a target that hangs or raises holds up its own job and no other.

Several may run on one database, on one machine or on many: each drives the jobs it has leased (store/leases.py), and
takes over those of one that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from trainmaster import targets
from trainmaster.control import failpoints, reap, rented_sweep
from trainmaster.control.clock import Clock
from trainmaster.control.context import TIMEOUTS_S, Context, LeaseLost, backoff_after, log_failure
from trainmaster.control.deadlines import Deadlines
from trainmaster.control.liveness import Liveness, find_dead
from trainmaster.control.notify import unreadable
from trainmaster.control.queueing import dispatch, schedules, sets
from trainmaster.control.stage_handlers import handle_stage
from trainmaster.control.tail import Tail
from trainmaster.control.transitions import end_overdue
from trainmaster.core.backoff import backoff_s
from trainmaster.core.errors import JobUnreadable, TrainmasterError
from trainmaster.core.states import Stage
from trainmaster.queueing.state import Rules
from trainmaster.storage import Store, open_store
from trainmaster.store import jobs, leases
from trainmaster.store.capacity.order import Checks
from trainmaster.store.database import Database, describe_error, is_unavailable
from trainmaster.store.leases import RunningRow
from trainmaster.store.rows import AttemptRow, JobRow, log_once
from trainmaster.targets import Target

_AHEAD_S = 60.0  # between two looks for schedules that wait for a time too far ahead
STORAGE_FOLDER = "storage"  # of the home, where a server is given no other storage
_AT_ONCE = 64  # jobs that are worked on at the same time
_SLICE = 20  # glances begun at once: a thousand in a row would block requests to the server
_SWEEP_S = 30.0
_GLANCE_S = 0.1  # between two looks for new jobs
_HURRY_S = 5.0  # a start that takes longer may be cut off by a cancel; the steps around it take milliseconds
_PARTING_S = 2.0  # for steps that are under way when a stop is requested; a submit takes about one
_MESSAGE_LIMIT = 2_000  # characters of a failure shown to the user; the log has all of it

log = logging.getLogger(__name__)


async def run(
    db: Database,
    home: Path,
    *,
    stop: asyncio.Event,
    tick_s: float = 0.5,
    load: Callable[[str], Target] = targets.load,
    timeouts_s: Mapping[str, float] = TIMEOUTS_S,
    rest_s: Callable[..., float] = backoff_after,
    storage: Store | None = None,
    deadlines: Deadlines | None = None,
    leads: asyncio.Event | None = None,
    begins: str | None = None,
    rules: Rules | None = None,
    checks: Callable[[], Checks] = dict,
) -> None:
    """Reconcile until `stop` is set. `leads` is set once the first tick is done.

    With `begins`, of the queued jobs only that one is begun: who ends with it would leave the others without a driver.

    What jobs leave is kept in `storage`; in a folder of the home where none is given. `checks`: what the operator's
    own checks of machines said last.
    """
    home = home.absolute()  # noqa: ASYNC240 (rows keep this folder: it must not depend on where we stand)
    liveness = Liveness(home)
    await asyncio.to_thread(targets.make_home_mark, home)
    clock = Clock(home)
    context = Context(
        db=db, home=home, load=load, timeouts_s=timeouts_s, token=liveness.token, rest_s=rest_s,
        storage=storage if storage is not None else open_store(home / STORAGE_FOLDER),
        deadlines=replace(deadlines if deadlines is not None else Deadlines(), elapsed_s=clock.elapsed_s),
        now=clock.now, kinds={}, rules=rules if rules is not None else Rules(), checks=checks,
    )  # fmt: skip
    log.info("reconciling %s", home)
    sweeping = [
        asyncio.create_task(_sweep(context), name="sweep"),
        asyncio.create_task(_sweep_rented(context), name="sweep rented"),
        asyncio.create_task(_advance_sets(context, tick_s), name="sets"),
    ]
    try:
        await _loop(context, liveness, stop=stop, tick_s=tick_s, leads=leads, begins=begins)
    finally:
        for task in sweeping:
            task.cancel()
        await asyncio.gather(*sweeping, return_exceptions=True)
        with contextlib.suppress(Exception):  # a database that is gone: the leases run out by themselves
            await asyncio.to_thread(_drop, db, liveness.token)
        await targets.close()
        liveness.end()


async def _loop(
    context: Context,
    liveness: Liveness,
    *,
    stop: asyncio.Event,
    tick_s: float,
    leads: asyncio.Event | None,
    begins: str | None,
) -> None:
    working: dict[str, asyncio.Task[None]] = {}
    begun: dict[str, float] = {}  # when work on a job really began, behind those before it
    slots = asyncio.Semaphore(_AT_ONCE)
    tail = Tail(context, tick_s=tick_s)
    dispatcher = dispatch.Dispatcher(context)
    renewed = -leases.LENGTH_S

    def work(job_id: str) -> Coroutine[Any, Any, None]:
        return _work(context, job_id, slots, begun, tick_s)

    try:
        while not stop.is_set():
            working = {job_id: task for job_id, task in working.items() if not task.done()}
            due: list[str] = []
            running: list[RunningRow] = []
            try:
                renew = time.monotonic() - renewed > leases.LENGTH_S / 3
                due, running, renewed_now = await asyncio.to_thread(
                    _take_leases, context.db, liveness, renew=renew, begins=begins
                )
                liveness.beat()
                renewed = time.monotonic() if renewed_now else renewed
                if leads is not None:
                    leads.set()
            except Exception as error:  # a full disk or a database that restarts must not end the loop
                log_failure(log, "the open jobs could not be read; trying again at the next tick", error)
            await _interrupt(context, liveness, working, begun)
            waiting = await dispatcher.decide() if due else frozenset()
            for job_id in due:
                if job_id not in working and job_id not in waiting:
                    working[job_id] = asyncio.create_task(work(job_id), name=f"job {job_id}")
            rows = [row for row in tail.choose(running) if row.job_id not in working]
            slices = [rows[first : first + _SLICE] for first in range(0, len(rows), _SLICE)] or [[]]
            for some in slices:
                for row in some:
                    visit = _tail(tail, row, work)
                    working[row.job_id] = asyncio.create_task(visit, name=f"job {row.job_id}")
                await _wait(stop, tick_s / len(slices), context)
    finally:
        # A moment to finish what is nearly done; then cut off where they are, to be taken up again from the rows.
        if working:
            await asyncio.wait(working.values(), timeout=_PARTING_S)
        for task in working.values():
            task.cancel()
        await asyncio.gather(*working.values(), return_exceptions=True)
        await dispatcher.close()
        await context.lines.close()
        await context.commits.close()
        await context.reads.close()


def _take_leases(
    db: Database, liveness: Liveness, *, renew: bool, begins: str | None
) -> tuple[list[str], list[RunningRow], bool]:
    """Hold our leases, take those that are free, and list the jobs that need a step now and those that only run."""
    dead = find_dead(leases.others(db, liveness.token))
    if renew or leases.wanted(db, liveness.token, dead=dead, begins=begins):
        with failpoints.around("commit lease"), db.write() as conn:
            leases.take(conn, liveness.token, owner=liveness.owner, dead=dead, begins=begins)
        renew = True
    running = leases.list_running(db, liveness.token)
    listened = {row.job_id for row in running}
    return [job_id for job_id in leases.list_due(db, liveness.token) if job_id not in listened], running, renew


async def _interrupt(
    context: Context, liveness: Liveness, working: Mapping[str, asyncio.Task[None]], begun: Mapping[str, float]
) -> None:
    """Cut off the start of a job that somebody cancelled meanwhile: a submit may take minutes, a cancel may not."""
    hung = {job_id for job_id, since in begun.items() if time.monotonic() - since > _HURRY_S}
    if not hung:
        return
    try:
        unwanted = await asyncio.to_thread(leases.list_unwanted, context.db, liveness.token)
    except Exception as error:
        log_failure(log, "cancelled jobs could not be read; trying again at the next tick", error)
        return
    for job_id in unwanted:
        if job_id in hung and job_id in working:
            working[job_id].cancel()


async def _sweep(context: Context) -> None:
    """Now and then end what came back with a lost machine. Never raises."""
    while True:
        await asyncio.sleep(_SWEEP_S)
        try:
            for left in await reap.sweep(context.db, context.home, load=context.load):
                log.warning("%s at %s ended: %s (%s)", left.attempt, left.target, left.what, left.why)
        except Exception as error:
            log_failure(log, "targets could not be swept; trying again later", error)


async def _sweep_rented(context: Context) -> None:
    """Compare rented machines with our rows, at every listing. Never raises."""
    while True:
        rest_s = rented_sweep.BUSY_S
        try:
            rest_s = await rented_sweep.sweep(context)
        except Exception as error:
            log_failure(log, "rented machines could not be swept; trying again later", error)
        await asyncio.sleep(rest_s)


async def _advance_sets(context: Context, tick_s: float) -> None:
    """Begin the next trials of sets, and those whose time is reached. Never raises."""
    looked = -math.inf
    while True:
        try:
            if time.monotonic() - looked > _AHEAD_S:
                await asyncio.to_thread(schedules.put_back, context.db, now=context.now())
                looked = time.monotonic()
            await asyncio.to_thread(schedules.begin_due, context.db, now=context.now())
            await asyncio.to_thread(sets.advance, context.db, load=context.load)
        except Exception as error:
            log_failure(log, "sets of runs could not be advanced; trying again later", error)
        await asyncio.sleep(tick_s)


def _drop(db: Database, token: str) -> None:
    with db.write() as conn:
        leases.drop(conn, token)


async def _tail(tail: Tail, row: RunningRow, work: Callable[[str], Awaitable[None]]) -> None:
    if await tail.poll(row):
        await work(row.job_id)


async def _work(
    context: Context, job_id: str, slots: asyncio.Semaphore, begun: dict[str, float], tick_s: float
) -> None:
    """Steps of one job until it has nothing more to do now. Never raises."""
    async with slots:
        job: JobRow | None = None
        seen: Stage | None = None
        begun[job_id] = time.monotonic()
        try:
            while True:
                job, attempt = await _find(context, job_id)
                if job is None or job.stage is None or (seen, job.stage) == (Stage.CHECKING, Stage.RUNNING):
                    break  # of a job that has just begun nothing is wanted before the next tick
                if not await handle_stage(context, job, attempt):
                    break
                seen = job.stage
                log.info("job %s left %s", job_id, seen)
            if job is not None and job.stage is not None and job.tries:
                message = job.message
                await context.apply(
                    job_id,
                    lambda conn: jobs.set_backoff(conn, job_id, until=None, tries=0, message=message),
                    what="rested",
                )
        except LeaseLost:
            log.info("job %s is another reconciler's now", job_id)
        except Exception as error:
            if isinstance(error, TrainmasterError):  # a target that cannot be asked is daily life
                log.warning("job %s: %s", job_id, error)
            else:
                log_failure(log, f"job {job_id}", error)
            if job is not None:
                await _rest(context, job, error, tick_s=tick_s)
        finally:
            begun.pop(job_id, None)


async def _find(context: Context, job_id: str) -> tuple[JobRow | None, AttemptRow | None]:
    """A job and its last attempt; None where there is none, or where nothing is done because it cannot be read."""
    try:
        return await context.reads.find(context.db, job_id)
    except JobUnreadable as error:
        log_once(error)
        if (found := await unreadable.find_to_end(context, job_id)) is not None:
            return found
        await unreadable.tell(context, job_id)
        return None, None


async def _rest(context: Context, job: JobRow, error: Exception, *, tick_s: float) -> None:
    """Keep what went wrong where the user sees it, and leave the job alone for a while, unless its time is over."""
    message = describe_error(error) if is_unavailable(error) else str(error)
    text = message if isinstance(error, TrainmasterError) else f"{type(error).__name__}: {message}"
    text = text[:_MESSAGE_LIMIT].replace("\x00", "\ufffd")
    longest_s = context.deadlines.longest_rest_s
    until = context.now() + timedelta(seconds=backoff_s(job.tries + 1, first_s=tick_s, longest_s=longest_s))
    try:
        if not await end_overdue(context, job, error):
            await context.apply(
                job.id,
                lambda conn: jobs.set_backoff(conn, job.id, until=until, tries=job.tries + 1, message=text),
                what="rest",
            )
    except LeaseLost:
        pass
    except Exception as unkept:
        log_failure(log, f"job {job.id}: its message could not be kept", unkept)


async def _wait(stop: asyncio.Event, seconds: float, context: Context) -> None:
    """Wait until `stop`, or a job that no reconciler has taken yet: a new one need not wait for the next tick."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), min(left, _GLANCE_S))
        if left > _GLANCE_S:
            with contextlib.suppress(Exception):  # reported at the next tick
                if await asyncio.to_thread(leases.wanted, context.db, context.token):
                    return
