"""scontrol drains and resumes nodes of Slurm."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Sequence
from datetime import datetime

from trainmaster.core.errors import TargetError
from trainmaster.targets._drain import Command, DrainState, RunCommand
from trainmaster.targets.slurm.queue import queue
from trainmaster.targets.slurm.settings import SlurmSettings


class SlurmScheduler:
    """scontrol. A drained node finishes its jobs and gets no new one."""

    def __init__(self, settings: SlurmSettings | None = None) -> None:
        """By a cluster file: with its environment, and on its login node. None: scontrol of this machine."""
        self.run: RunCommand | None = None if settings is None else functools.partial(_run, settings)

    def drain(self, node: str, reason: str) -> list[Command]:
        return [("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")]

    def resume(self, node: str) -> list[Command]:
        return [("scontrol", "update", f"nodename={node}", "state=resume")]

    def query(self, node: str) -> Command:
        return ("scontrol", "show", "node", node, "--oneliner")

    def parse(self, node: str, answer: str) -> DrainState:
        if len(re.findall(r"^NodeName=", answer, flags=re.MULTILINE)) != 1 or f"NodeName={node} " not in answer:
            raise TargetError(f"scontrol does not describe exactly the node {node}: {answer.strip()[:200]!r}")
        state = re.search(r"\bState=(\S+)", answer)
        if state is None:
            raise TargetError(f"scontrol shows no state for {node}")
        # IDLE+DRAIN, MIXED+DRAIN, DOWN*+DRAIN. FAIL and DOWN are the scheduler's own states, never changed here.
        out = "DRAIN" in re.split(r"[+*~#!%$@^-]", state[1])
        # The reason ends with its author and time: `trainmaster: … [root@2026-03-01T12:00:00]`.
        reason = re.search(r"\bReason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?\s*(?: Comment=.*)?$", answer.strip())
        # The time that a job has put into its reason counts before Slurm's: a retest drains the node again.
        at = _moment(re.search(r" \(since ([0-9T:+-]+)\)", answer)) or _moment(
            re.search(r" \[[^\[\]]*@([0-9T:-]+)\]", answer)
        )
        return DrainState(out=out, reason=reason[1] if reason and out else "", at=at)

    def query_all(self) -> Command:
        return ("scontrol", "show", "node", "--oneliner")

    def parse_all(self, answer: str) -> dict[str, DrainState]:
        """State of every node that is described."""
        lines = [(re.match(r"NodeName=(\S+) ", line), line) for line in answer.splitlines()]
        return {name[1]: self.parse(name[1], line) for name, line in lines if name is not None}


def _moment(match: re.Match[str] | None) -> str:
    """The time in a reason as ISO; empty where somebody has written something else, as `(since 2024)`."""
    try:
        return datetime.fromisoformat(match[1]).astimezone().isoformat() if match else ""
    except (ValueError, OverflowError):
        return ""


async def _run(settings: SlurmSettings, command: Sequence[str]) -> str:
    answer, body = await queue(settings).request("run", words=list(command), timeout_s=60.0, slurm=True)
    if answer.get("code") != 0:
        reason = " ".join(str(answer.get("error", "")).split())[:300]
        raise TargetError(f"{shlex.join(command)} ended with {answer.get('code')}: {reason}")
    return body.decode(errors="replace")
