"""Plan and exit record of an attempt: the node's input and its result. Both travel as JSON.

A target writes one `Plan` per node; the agent reads it. The agent writes one `ExitRecord`; the target reads it. Around
them lies one folder per attempt, whose file names are below.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from trainmaster.core import schema
from trainmaster.core.compat import UTC
from trainmaster.core.errors import SpecError
from trainmaster.core.events import clean_value
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Reason

PLAN_FILE = "plan.json"
EVENTS_FILE = "events.jsonl"
AGENT_LOG = "agent.log"
EXIT_FILE = "exit.json"  # written last, once, atomically: its presence means the attempt is over
LOCK_FILE = "agent.lock"  # held by the agent while it lives
AGENT_BEGUN = b"begun"  # what an agent that was started in the background writes into its pipe
STOP_FILE = "stop"  # its presence asks the agent to stop; its text is the reason
MEMBERS_FILE = "members.json"  # of node 0: number of the node in each place, once a spare has taken one
MEMBERS_LOG = "members.jsonl"  # each content of that file as a line, where files leave a node as a log
WORK_FOLDER = "work"  # in the job's folder: working folder of its ranks, shared by its attempts
CHECKPOINTS_FOLDER = "checkpoints"  # in the job's folder: outlives its attempts
OUTPUTS_FOLDER = "outputs"  # what a workload leaves here is kept in storage when the attempt is over
UNCOPIED_FILE = "uncopied.jsonl"  # of a pod: outputs that are not in its log, each a line `[name, reason]`

# What a workload may end with so that the agent knows why (numbers of sysexits.h, where one fits).
RESUMABLE_EXIT = 75  # EX_TEMPFAIL: it stopped on request after saving, and can go on
# EX_DATAERR, EX_NOINPUT, none of them, EX_UNAVAILABLE
EXIT_REASONS = {65: Reason.BAD_DATA, 66: Reason.BAD_CHECKPOINT, 67: Reason.DIVERGED, 69: Reason.CHECKPOINT_IN_USE}

# Set in every process of an attempt, so that none is left behind: the attempt, and `/RANK` of one of several nodes.
ATTEMPT_VARIABLE = "TRAINMASTER_ATTEMPT"
# Set by an agent for all that it starts, to its own name: its sweep spares another agent of the attempt.
AGENT_VARIABLE = "TRAINMASTER_AGENT"
# Set by a command in the foreground for the agents it starts: they end with that process (node/owner.py names it).
OWNER_VARIABLE = "TRAINMASTER_OWNER"
# Set by the agent for the ranks it starts, as JSON: when it began to (`at`), and of a recovery (`recovery`) how it is
# done, when the failure was seen and the seconds of the agent's own parts. Times are seconds since 1970.
START_VARIABLE = "TRAINMASTER_START"
# Set for the fork server: room in its memory for what /proc shows of the ranks that it forks.
ROOM_VARIABLE = "TRAINMASTER_ROOM"
EVENTS_VARIABLE = "TRAINMASTER_EVENTS"  # the event file a workload appends to
CHECKPOINTS_VARIABLE = "TRAINMASTER_CHECKPOINTS"  # a folder that outlives the attempt
RESUME_VARIABLE = "TRAINMASTER_RESUME_FROM"  # the job whose run this is: without its checkpoints nothing may begin
STOP_VARIABLE = "TRAINMASTER_STOP"  # the stop file, for a workload that polls
# Set by the agent where the ranks are in replica groups: the folder of their quorum (node/quorum.py).
GROUPS_VARIABLE = "TRAINMASTER_GROUPS"
OUTPUTS_VARIABLE = "TRAINMASTER_OUTPUTS"  # the folder of what is to be kept; there when a rank starts


def rank_log(rank: int) -> str:
    """The file that holds what a rank printed."""
    return f"rank-{rank}.log"


def node_file(name: str, node: int) -> str:
    """Name of a node's own record (events, agent log, exit record) among those of all nodes of an attempt."""
    stem, _, ending = name.partition(".")
    return name if node == 0 else f"{stem}.node-{node}.{ending}"


def split_node_file(name: str) -> tuple[int, str]:
    """Node and file of a record; node 0 for every other name."""
    stem, _, rest = name.partition(".node-")
    number, _, ending = rest.partition(".")
    known = f"{stem}.{ending}" in (EVENTS_FILE, AGENT_LOG, EXIT_FILE)
    node = int(number) if known and number.isascii() and number.isdecimal() and len(number) < 6 else 0
    return (node, f"{stem}.{ending}") if node and node_file(f"{stem}.{ending}", node) == name else (0, name)


_NOT_FOR_NODES = ("after", "queue", "rent")  # sections of a spec for the server alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One node's share of one attempt."""

    attempt: str  # unique for ever: "<job uuid>.<number>"
    spec: JobSpec
    folder: str  # of this attempt, on the node
    checkpoints: str  # outlives the attempt
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None  # None: the agent takes a free one (single node)
    work: str | None = None  # where the ranks run; None: in the job's own working folder
    gpus: tuple[str, ...] = ()  # UUIDs of those that it may use, in the order of its ranks; empty: as the node is
    v: int = 1

    @property
    def groups(self) -> int:
        """Replica groups that the ranks are in."""
        return self.spec.train.recovery.groups if self.spec.train is not None else 1

    @property
    def mark(self) -> str:
        """Value of ATTEMPT_VARIABLE: this node's processes, even where two nodes are one machine."""
        return self.attempt if self.spec.resources.nodes == 1 else f"{self.attempt}/{self.node_rank}"

    def to_json(self) -> str:
        """The plan as JSON, without what is null or empty by default, as `submit --dry-run` prints it.

        A section that no node reads is left out where all of it is default: it says nothing of where the job runs.
        """
        plain = schema.to_stated(self)
        for name in _NOT_FOR_NODES:
            section = getattr(self.spec, name)
            if section == type(section)():
                plain["spec"].pop(name, None)
        return json.dumps(plain, indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        return schema.build(cls, json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """How an attempt ended on this node, with the evidence for it."""

    attempt: str
    ok: bool
    ended_at: str  # ISO, with its offset
    reason: Reason | None = None  # None when ok
    message: str = ""
    exit_codes: Mapping[str, int] = field(default_factory=dict)  # rank → code; negative is a signal
    evidence: Mapping[str, Any] = field(default_factory=dict)  # last lines of the first rank that failed, Xid, …
    resumable: bool = False
    saved: bool | None = None  # whether the checkpoint folder holds files; None: not known, as on several nodes
    saved_since: bool = False  # whether a file there was written since the attempt began, on this node
    v: int = 1

    def to_json(self) -> str:
        """The record as JSON that every reader accepts: log lines in it may hold any byte."""
        return json.dumps(clean_value(schema.to_plain(self)), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ExitRecord:
        return schema.build(cls, clean_value(json.loads(text)))

    @classmethod
    def read(cls, raw: bytes, *, attempt: str) -> ExitRecord:
        """The record in a file. A file that holds none is described by a record of its own: the attempt is over."""
        try:
            return cls.from_json(raw.decode("utf-8", errors="replace"))
        except (ValueError, RecursionError, SpecError) as error:
            words = str(error).partition("\n")[0][:300]
            message = f"the agent's exit record cannot be read: {words}"
            ended_at = datetime.now(UTC).isoformat(timespec="microseconds")
            return cls(attempt=attempt, ok=False, ended_at=ended_at, reason=Reason.TARGET_ERROR, message=message)
