"""One attempt from its start to its exit record: checks, then ranks, then nothing left behind, then the record."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import time
import traceback
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from trainmaster import __version__
from trainmaster.agent import container, preflight, processes, workload
from trainmaster.agent.diagnose import Outcome, mask
from trainmaster.agent.folder import AttemptFolder
from trainmaster.agent.watch import Signals, Watch
from trainmaster.core.compat import UTC
from trainmaster.core.plan import AGENT_VARIABLE, CHECKPOINTS_VARIABLE, EVENTS_FILE, ExitRecord, Plan
from trainmaster.core.states import Reason
from trainmaster.node.emit import Emitter
from trainmaster.node.owner import name_process

_SWEEP_S = 10.0  # a killed process that stays longer hangs in the kernel, and no signal will end it

_LOOKED_AT = 20_000  # files of the checkpoint folder, at most


def run(plan: Plan, folder: AttemptFolder, signals: Signals) -> ExitRecord:
    """Run the attempt this process has begun. Returns the record it wrote."""
    began = time.time()
    processes.adopt_orphans()
    agent = os.environ[AGENT_VARIABLE] = name_process()  # all that is started from here on inherits it
    processes.start_guard(lambda: end_leftovers(plan, agent))
    with Emitter(folder.path / EVENTS_FILE, guard=True) as events:
        watch = Watch(plan, folder, events, signals)
        try:
            outcome = _run(plan, folder, events, watch)
        except Exception as error:  # the record must be written whatever happened
            folder.log(mask(f"the agent failed\n{traceback.format_exc()}", (os.environ, plan.spec.env)))
            outcome = _own_failure(error)
        left = end_leftovers(plan, agent)
        if left:
            outcome = replace(outcome, evidence={**outcome.evidence, "would_not_die": sorted(left)})
        record = _record(plan, outcome, since=began)
        reason = record.reason.value if record.reason else None
        folder.log(f"end: ok={record.ok} reason={reason} {record.message}")
        # A full disk may refuse this line; the record has its room already.
        with contextlib.suppress(OSError):
            events.emit(
                "PROJECT", "end", ok=record.ok, reason=reason, message=record.message, time_taken=watch.elapsed_s
            )
    folder.finish(record)
    return record


def end_leftovers(plan: Plan, agent: str) -> set[int]:
    """End what still runs of what an agent has started but for this process; returns what would not die."""
    container.remove(plan)  # before its processes are killed: the engine would keep it as a broken one
    return processes.kill_all(plan.mark, agent=agent, within_s=_SWEEP_S)


def _run(plan: Plan, folder: AttemptFolder, events: Emitter, watch: Watch) -> Outcome:
    events.emit("PROJECT", "start", attempt=plan.attempt, host=platform.node(), version=__version__)
    Path(plan.checkpoints).mkdir(parents=True, exist_ok=True)
    os.environ[CHECKPOINTS_VARIABLE] = plan.checkpoints  # for the check of its disk; ranks get it anyway
    if stop := watch.asked():
        return Outcome(reason=stop.reason, message=f"{stop.message}; stopped before the start")
    if (refusal := _nothing_to_resume(plan) or preflight.run(plan, events, watch)) is not None:
        return refusal
    folder.log(f"starting {plan.spec.resources.processes_per_node} ranks")
    return workload.run(plan, folder, events, watch)


def _nothing_to_resume(plan: Plan) -> Outcome | None:
    """Refuse to start over where a resume was requested and no checkpoint exists."""
    # Our trainer knows better where its checkpoints are and which are whole, and refuses by itself.
    if plan.spec.resume_from is None or plan.spec.train is not None or any(Path(plan.checkpoints).iterdir()):
        return None
    message = f"job {plan.spec.resume_from} left no checkpoint in {plan.checkpoints}"
    return Outcome(reason=Reason.BAD_CHECKPOINT, message=f"{message}; for a new run, submit without resume_from")


def _own_failure(error: Exception) -> Outcome:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    evidence = {"last_lines": traceback.format_exception(error)[-1:]}
    message = f"the agent failed: {type(error).__name__}: {error}"[:500]
    return Outcome(reason=Reason.DISK_FULL if full else Reason.TARGET_ERROR, message=message, evidence=evidence)


def _record(plan: Plan, outcome: Outcome, *, since: float) -> ExitRecord:
    environments = (os.environ, plan.spec.env)
    return ExitRecord(
        attempt=plan.attempt,
        ok=outcome.reason is None,
        ended_at=datetime.now(UTC).isoformat(timespec="microseconds"),
        reason=outcome.reason,
        message=mask(outcome.message, environments),
        exit_codes=outcome.exit_codes,
        evidence=mask(outcome.evidence, environments),
        resumable=outcome.resumable,
        saved=_has_saved(plan),
        saved_since=_has_saved_since(Path(plan.checkpoints), since),
    )


def _has_saved(plan: Plan) -> bool | None:
    if plan.spec.resources.nodes > 1:  # another node may hold the files on a disk of its own
        return None
    try:
        return any(Path(plan.checkpoints).iterdir())
    except FileNotFoundError:
        return False
    except OSError:
        return None


def _has_saved_since(folder: Path, began: float) -> bool:
    """Whether anything was saved in this attempt. Locks and logs, which every start writes, do not count."""
    seen = 0
    for above, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in (".lock", "attempts")]
        for name in files:
            seen += 1
            with contextlib.suppress(OSError):
                if (Path(above) / name).lstat().st_mtime >= began:
                    return True
        if seen > _LOOKED_AT:
            break
    return False
