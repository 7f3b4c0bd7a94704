"""The bins of the ledger, and the tables that say which event means which bin. To extend it, add a row here."""

from __future__ import annotations

from collections.abc import Mapping

from trainmaster.core.compat import StrEnum
from trainmaster.core.states import Stage


class Bin(StrEnum):
    """What a GPU of a job was doing, in the order in which it happens. Every microsecond is in exactly one."""

    QUEUED = "queued"
    PROVISIONING = "provisioning"
    CHECKING = "checking"
    STARTING = "starting"
    LOADING = "loading"
    COMPILING = "compiling"
    TRAINING = "training"
    EVALUATING = "evaluating"
    DATA_WAIT = "data_wait"
    STRAGGLER_WAIT = "straggler_wait"
    SAVE_STALL = "save_stall"
    REPEATED = "repeated"
    STALLED = "stalled"
    IDLE = "idle"
    UNKNOWN = "unknown"

    @property
    def label(self) -> str:
        """The name for people."""
        return _LABELS.get(self, self.value.replace("_", " "))

    @property
    def about(self) -> str:
        """What is counted here, in one line."""
        return _ABOUT[self]


_LABELS = {Bin.REPEATED: "repeated work", Bin.IDLE: "idle after the end"}
_ABOUT: Mapping[Bin, str] = {
    Bin.QUEUED: "waiting for machines: in our queue, in the scheduler's, or between two attempts",
    Bin.PROVISIONING: "machines are placed, rented and logged in to",
    Bin.CHECKING: "the pre-flight checks",
    Bin.STARTING: "files are sent, the agent and the ranks start, the model is built",
    Bin.LOADING: "a checkpoint is read and verified",
    Bin.COMPILING: "from the start of training to its first step, less that step's later pace",
    Bin.TRAINING: "steps that were trained for the first time",
    Bin.EVALUATING: "evaluations between steps",
    Bin.DATA_WAIT: "waiting for samples",
    Bin.STRAGGLER_WAIT: "waiting for a rank or node that was named a straggler",
    Bin.SAVE_STALL: "training stood still for a save",
    Bin.REPEATED: "steps that had been trained before and were lost with an interruption or a rollback",
    Bin.STALLED: "the work was up and recorded nothing: a hang, or what a kill cut off",
    Bin.IDLE: "the work is over: outputs are stored, machines are given back",
    Bin.UNKNOWN: "nothing recorded says what was done, as of a program that reports no steps",
}

# Time in which the run comes nearer to its end. Not a start, a stall, or what is done a second time.
PRODUCTIVE = frozenset({Bin.TRAINING, Bin.EVALUATING, Bin.DATA_WAIT, Bin.STRAGGLER_WAIT})

# Stages of the control plane in which no event of a node can say more.
OF_STAGE: Mapping[Stage, Bin] = {
    Stage.QUEUED: Bin.QUEUED,
    Stage.PLACING: Bin.PROVISIONING,
    Stage.PROVISIONING: Bin.PROVISIONING,
    Stage.CONNECTING: Bin.PROVISIONING,
    Stage.COLLECTING: Bin.IDLE,
    Stage.RELEASING: Bin.IDLE,
}

# (phase, event) → the bin that begins with it and lasts until the next such event. Steps have rules of their own
# (attempt.py).
BEGINS: Mapping[tuple[str, str], Bin] = {
    ("PROJECT", "start"): Bin.STARTING,
    ("PROJECT", "end"): Bin.IDLE,
    ("PREFLIGHT", "start"): Bin.CHECKING,
    ("EVAL_TRAINING", "start"): Bin.EVALUATING,
    ("TRAJECTORY", "start"): Bin.TRAINING,  # of reinforcement learning: by its own word part of the work
    ("TRAJECTORY", "end"): Bin.UNKNOWN,
    ("WATCH", "hang"): Bin.STALLED,
}

# (phase, event) → (field, bin): so many seconds, up to the time of the event.
LASTED: Mapping[tuple[str, str], tuple[str, Bin]] = {("CHECKPOINT", "loaded"): ("seconds", Bin.LOADING)}

# An event whose data has `parts`, a map of name → seconds, gives intervals in that order up to the event's time.
PARTS: Mapping[str, Bin] = {
    "imports": Bin.STARTING,
    "rendezvous": Bin.STARTING,
    "build": Bin.STARTING,
    "load": Bin.LOADING,
    "compile": Bin.COMPILING,
    "first_step": Bin.COMPILING,
}
