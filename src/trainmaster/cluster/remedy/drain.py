"""Drain and resume a node through its scheduler: look, act, look again, write the journal."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainmaster import checks, targets
from trainmaster.cluster.health import journal
from trainmaster.cluster.remedy.remedy import EVERY, REASON_CHARACTERS, Drain, Out
from trainmaster.core.errors import HostError, TargetError
from trainmaster.node.host import Host
from trainmaster.targets import PREFIX, DrainState, ListsDrained, RunCommand, Scheduler

TIMEOUT_S = 30.0


def drain(planned: Drain, scheduler: Scheduler, home: Path, through: str) -> str | None:
    """Drain one node; the error message, or None."""
    node = planned.node
    try:
        now = read_drain_state(scheduler, node)
        if now.out and not now.ours:
            return f"{node} is already drained, and not by trainmaster ({now.reason or 'no reason stated'}); unchanged"
        # Before the commands: after a crash in between, the node is drained and known to be.
        _note(home, "drain", node, checks=list(planned.checks), reason=planned.reason, through=through)
        for command in scheduler.drain(node, planned.reason):
            run(scheduler, command)
        if not read_drain_state(scheduler, node).ours:
            return f"{node}: the drain commands succeeded, but {through} does not show the node as drained"
    except TargetError as error:
        _undo(scheduler, node, home)
        return f"{node}: {error}"
    return None


def resume(node: str, scheduler: Scheduler, home: Path, through: str) -> str | None:
    """Resume one node; the error message, or None."""
    try:
        now = read_drain_state(scheduler, node)
        if now.out and not now.ours:
            return f"{node} is drained for another reason now ({now.reason or 'none stated'}); unchanged"
        if now.out:
            for command in scheduler.resume(node):
                run(scheduler, command)
            if read_drain_state(scheduler, node).out:
                return f"{node}: the resume commands succeeded, but {through} still shows the node as drained"
    except TargetError as error:
        return f"{node}: {error}"
    # After the commands: a node recorded as resumed while it is drained would never be looked at again.
    _note(home, "resume", node, through=through)
    return None


def list_out(scheduler: Scheduler, *, besides: Sequence[Out]) -> list[Out]:
    """Nodes that Trainmaster has drained and the journal does not have: jobs drain nodes that fail their pre-flight."""
    if not isinstance(scheduler, ListsDrained):
        return []
    known = {out.node for out in besides}
    return [
        Out(node=name, at=state.at, checks=read_checks(state.reason))
        for name, state in scheduler.parse_all(run(scheduler, scheduler.query_all())).items()
        if state.ours and name not in known
    ]


def read_checks(reason: str) -> tuple[str, ...]:
    """Checks that a reason names: `trainmaster: gpu_ecc gpu3: 2 errors; gpu_nvlink: 3 links are down (since …)`.

    A reason that was cut, or that counts the others instead of naming them, asks for a retest of every check.
    """
    text = re.sub(r" \(since [0-9T:+-]+\)$", "", reason)
    words = re.findall(r"(?:^|; )([a-z0-9_]+)(?= [^ :;]{1,80}: |: )", text.removeprefix(PREFIX).strip())
    names = [word for number, word in enumerate(words) if number == 0 or word in checks.names()]
    cut = len(text) >= REASON_CHARACTERS or re.search(r"\(and \d+ more\)", text) is not None
    return tuple(dict.fromkeys([*names, *([EVERY] if cut or not names else [])]))


def read_drain_state(scheduler: Scheduler, node: str) -> DrainState:
    """The node's present state in the scheduler."""
    return scheduler.parse(node, run(scheduler, scheduler.query(node)))


def run(scheduler: Scheduler, command: Sequence[str]) -> str:
    """Standard output of one command. TargetError if it fails, hangs or is missing."""
    if scheduler.run is not None:
        return asyncio.run(_run_there(scheduler.run, command))
    try:
        result = Host().run(*command, timeout_s=TIMEOUT_S)
    except HostError as error:
        raise TargetError(str(error)) from None
    if result.exit_code:
        output = " ".join((result.stderr or result.stdout).split())[:300]
        raise TargetError(f"{shlex.join(command)} ended with {result.exit_code}: {output}")
    return result.stdout


async def _run_there(run: RunCommand, command: Sequence[str]) -> str:
    try:
        return await run(command)
    finally:
        await targets.close()


def _undo(scheduler: Scheduler, node: str, home: Path) -> None:
    """Take the journal entry back if the node is demonstrably not drained."""
    try:
        if not read_drain_state(scheduler, node).out:
            _note(home, "undo", node)
    except TargetError:
        pass  # unknown: it stays in the journal as drained, and a later run counts it


def _note(home: Path, did: str, node: str, **fields: Any) -> None:
    row = {"at": datetime.now(UTC).isoformat(timespec="microseconds"), "did": did, "node": node, **fields}
    journal.append(home / journal.REMEDIES, [row])
