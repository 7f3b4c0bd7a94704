"""Named places of a run where a drill may strike it. Without a drill `reach` does nothing.

TRAINMASTER_KILL_AT="save:shards 2"     SIGKILL to this process when it reaches that place for the second time
TRAINMASTER_KILL_AT="save:shards @12"   … when it reaches that place for the first time after 12 steps of the run
TRAINMASTER_TERM_AT="step:start 5"      SIGTERM to itself, as a scheduler would send it; both may be stated
TRAINMASTER_KILL_RANK="1"               only on this rank; not stated: on every rank
"""

from __future__ import annotations

import os
import signal

KILL_AT_VARIABLE = "TRAINMASTER_KILL_AT"
TERM_AT_VARIABLE = "TRAINMASTER_TERM_AT"
KILL_RANK_VARIABLE = "TRAINMASTER_KILL_RANK"

# Every place there is: drills and the crash matrix draw from here, and a test holds the code to it in both directions.
FAILPOINTS = {
    "load:listed": "checkpoints found, none read yet",
    "load:verified": "every byte of one compared, nothing filled yet",
    "load:filled": "weights and optimizer filled, nothing trained yet",
    "step:start": "before a batch is read",
    "step:backward": "gradients there, weights not moved",
    "step:updated": "weights moved, nobody told",
    "eval:batch": "inside an evaluation",
    "save:staged": "copied off the device, nothing written",
    "save:shards": "shards written, not trusted yet",
    "save:hashed": "shards and hashes there, no manifest",
    "save:manifest": "manifest written, the folder still a draft",
    "save:committed": "renamed, nobody told",
    "save:pruned": "older ones deleted",
    "stop:heard": "told to stop, nothing saved yet",
    "memory:local": "in this node's memory, in no other's",
    "memory:peer": "in a peer's memory, not yet on disk",
    "remote:file": "inside an upload",
    "remote:manifest": "every file uploaded, no manifest",
}
# Where only rank 0 comes by: it commits for all.
FIRST_RANK = frozenset({"save:manifest", "save:committed", "save:pruned", "remote:manifest"})

_reached: dict[tuple[str, str], int] = {}  # how often this process was at a place that a variable names
_step = 0  # of the run, as far as this process knows


def reach(place: str, *, step: int | None = None) -> None:
    """This process is at `place` now; `step` tells how many steps the run has done, where that is known."""
    global _step  # noqa: PLW0603 (one process is one rank: there is one run to be at a step of)
    if step is not None:
        _step = step
    for variable, number in ((TERM_AT_VARIABLE, signal.SIGTERM), (KILL_AT_VARIABLE, signal.SIGKILL)):
        wanted = os.environ.get(variable)
        if wanted and _is_now(variable, wanted, place):
            os.kill(os.getpid(), number)


def parse(text: str) -> tuple[str, int | None, int | None]:
    """Place, how manieth time, and from which step on; one of the last two is None."""
    place, _, when = text.rpartition(" ")
    return (place, None, int(when[1:])) if when.startswith("@") else (place, int(when), None)


def _is_now(variable: str, wanted: str, place: str) -> bool:
    name, time, step = parse(wanted)
    only = os.environ.get(KILL_RANK_VARIABLE)
    if name != place or (only and only != os.environ.get("RANK", "0")):
        return False
    if step is not None and _step < step:
        return False
    count = _reached[variable, place] = _reached.get((variable, place), 0) + 1
    return count == (time or 1)
