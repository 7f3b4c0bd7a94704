"""Failpoints: named points of a run at which a drill may kill it. Without a drill `reach` does nothing.

TRAINMASTER_KILL_AT="save:shards 2"     SIGKILL to this process when it reaches the failpoint for the second time
TRAINMASTER_KILL_AT="save:shards @12"   … when it first reaches the failpoint after 12 steps of the run
TRAINMASTER_KILL_AT="agent step:start @9"  SIGKILL to the process that started this one
TRAINMASTER_TERM_AT="step:start 5"      SIGTERM to itself, as a scheduler would send it; both may be stated
TRAINMASTER_KILL_RANK="1"               only on this rank; not stated: on every rank

Where the launcher starts the ranks several times (recovery in place), `;` stands between what holds for each start: the
first of "save:shards @12; step:start @20" is for the first start, and the third start is left alone.
"""

from __future__ import annotations

import os
import signal

KILL_AT_VARIABLE = "TRAINMASTER_KILL_AT"
TERM_AT_VARIABLE = "TRAINMASTER_TERM_AT"
KILL_RANK_VARIABLE = "TRAINMASTER_KILL_RANK"
AGENT = "agent "  # before a failpoint: the process that started the rank is killed
RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"  # of torchrun, and of our agent

# All failpoints. Drills and the crash matrix draw from here; a test compares the table with the calls of `reach`.
FAILPOINTS = {
    "load:listed": "checkpoints found, none read yet",
    "load:verified": "every byte of one compared, nothing filled yet",
    "load:filled": "weights and optimizer filled, nothing trained yet",
    "step:start": "before a batch is read",
    "step:backward": "gradients there, weights not moved",
    "step:updated": "weights updated, nothing logged",
    "eval:batch": "inside an evaluation",
    "save:staged": "copied off the device, nothing written",
    "save:shards": "shards written, not trusted yet",
    "save:hashed": "shards and hashes there, no manifest",
    "save:manifest": "manifest written, the folder still a draft",
    "save:committed": "renamed, nothing logged",
    "save:pruned": "older ones deleted",
    "stop:heard": "stop request seen, nothing saved yet",
    "memory:local": "in this node's memory, in no other's",
    "memory:peer": "in a peer's memory, not yet on disk",
    "remote:file": "inside an upload",
    "remote:manifest": "every file uploaded, no manifest",
}
# Failpoints that only rank 0 reaches: it commits for all.
FIRST_RANK = frozenset({"save:manifest", "save:committed", "save:pruned", "remote:manifest"})

_reached: dict[tuple[str, str], int] = {}  # times this process was at a failpoint that a variable names
_step = 0  # of the run, as far as this process knows


def reach(place: str, *, step: int | None = None) -> None:
    """Mark that this process is at a failpoint; `step` is the number of steps done, where known."""
    global _step  # noqa: PLW0603 (one process is one rank: there is one run to be at a step of)
    if step is not None:
        _step = step
    for variable, number in ((TERM_AT_VARIABLE, signal.SIGTERM), (KILL_AT_VARIABLE, signal.SIGKILL)):
        wanted = _of_this_start(os.environ.get(variable))
        if wanted and _is_now(variable, wanted.removeprefix(AGENT), place):
            os.kill(os.getppid() if wanted.startswith(AGENT) else os.getpid(), number)


def parse(text: str) -> tuple[str, int | None, int | None]:
    """Failpoint name, occurrence number, and minimum step; one of the last two is None."""
    place, _, when = text.rpartition(" ")
    return (place, None, int(when[1:])) if when.startswith("@") else (place, int(when), None)


def _of_this_start(text: str | None) -> str | None:
    """The part of a variable that holds for this start of the ranks."""
    if text is None or ";" not in text:
        return text
    parts, start = text.split(";"), int(os.environ.get(RESTART_VARIABLE) or 0)
    return parts[start].strip() if start < len(parts) else None


def _is_now(variable: str, wanted: str, place: str) -> bool:
    name, time, step = parse(wanted)
    only = _of_this_start(os.environ.get(KILL_RANK_VARIABLE))
    if name != place or (only and only != os.environ.get("RANK", "0")):
        return False
    if step is not None and _step < step:
        return False
    count = _reached[variable, place] = _reached.get((variable, place), 0) + 1
    return count == (time or 1)
