"""Slurm's job states and pending reasons, in our words. A state that is not listed is `unknown`.

Sources: JOB STATE CODES of squeue(1) and sacct(1), versions 20.11 to 25.05, and the flags of `job_state` in the JSON
output. COMPLETING counts as running: processes or the epilog may still be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmaster.core.states import Reason, TargetState


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmState:
    """A Slurm state in our words. `reason`: the cause of an end that needs no exit record to be known."""

    state: TargetState
    reason: Reason | None = None
    text: str = ""


def _waits(text: str) -> SlurmState:
    return SlurmState(state=TargetState.WAITING, text=text)


def _runs(text: str) -> SlurmState:
    return SlurmState(state=TargetState.RUNNING, text=text)


def _fails(reason: Reason | None, text: str) -> SlurmState:
    return SlurmState(state=TargetState.FAILED, reason=reason, text=text)


def _lost(reason: Reason, text: str) -> SlurmState:
    return SlurmState(state=TargetState.LOST, reason=reason, text=text)


STATES = {
    "PENDING": _waits("waits in the queue"),
    "CONFIGURING": _waits("its nodes are booting"),
    "POWER_UP_NODE": _waits("its nodes are powered up"),
    "EXPEDITING": _waits("it was requeued and starts first"),
    "REQUEUED": _waits("it was requeued"),
    "REQUEUE_FED": _waits("it was requeued by the federation"),
    "REQUEUE_HOLD": _waits("it was requeued and is held; release it with `scontrol release`"),
    "RESV_DEL_HOLD": _waits("its reservation was deleted and it is held; release it with `scontrol release`"),
    "SPECIAL_EXIT": _waits("it was requeued after a special exit and is held; release it with `scontrol release`"),
    "RUNNING": _runs(""),
    "COMPLETING": _runs("it is ending"),
    "RESIZING": _runs("its allocation changes size"),
    "SIGNALING": _runs("a signal is being sent to it"),
    "STAGE_OUT": _runs("its burst buffer is written out"),
    "STOPPED": _runs("its processes were stopped with SIGSTOP; `scancel --signal=CONT` lets them go on"),
    "SUSPENDED": _runs("it is suspended; `scontrol resume` lets it go on"),
    "UPDATE_DB": _runs("its accounting record is written"),
    "COMPLETED": SlurmState(state=TargetState.SUCCEEDED),
    "FAILED": _fails(None, "its batch script ended with an error"),
    "CANCELLED": _fails(Reason.USER_CANCELLED, "it was cancelled in Slurm"),
    "TIMEOUT": _fails(Reason.TIMED_OUT, "its time limit in Slurm was over"),
    "DEADLINE": _fails(Reason.TIMED_OUT, "its deadline in Slurm was over"),
    "OUT_OF_MEMORY": _fails(Reason.OUT_OF_MEMORY, "it used more memory than Slurm gave it"),
    "LAUNCH_FAILED": _fails(Reason.TARGET_ERROR, "Slurm could not start it"),
    "NODE_FAIL": _lost(Reason.NODE_LOST, "one of its nodes failed"),
    "BOOT_FAIL": _lost(Reason.NODE_LOST, "one of its nodes did not boot"),
    "RECONFIG_FAIL": _lost(Reason.NODE_LOST, "one of its nodes could not be reconfigured"),
    "PREEMPTED": _lost(Reason.PREEMPTED, "it was preempted"),
    # Another cluster of the federation runs it, and cannot be asked from here.
    "REVOKED": SlurmState(state=TargetState.UNKNOWN, text="another cluster of the federation runs it"),
}
# Beside another state in JSON these say more than it: NODE_FAIL and COMPLETING together is an end under way.
_FLAGS = (
    "COMPLETING", "CONFIGURING", "POWER_UP_NODE", "EXPEDITING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD",
    "RESV_DEL_HOLD", "SPECIAL_EXIT", "STAGE_OUT", "SIGNALING", "RESIZING", "STOPPED", "LAUNCH_FAILED", "RECONFIG_FAIL",
    "REVOKED", "UPDATE_DB",
)  # fmt: skip


def translate(word: str) -> SlurmState:
    """A state word of squeue or sacct. sacct adds a text (`CANCELLED by 1000`) or a plus sign where it was cut."""
    return STATES.get(
        normalize(word), SlurmState(state=TargetState.UNKNOWN, text=f"Slurm state {word[:40]!r} is not known")
    )


def normalize(word: str) -> str:
    """The bare word of a state: `CANCELLED by 1000` and `CANCELLED+` are CANCELLED."""
    return word.strip().partition(" ")[0].rstrip("+").upper()


def choose(words: Sequence[str]) -> str:
    """One state of several that JSON lists: the flag that decides, else the base state."""
    known = [word.upper() for word in words]
    return next((flag for flag in _FLAGS if flag in known), known[0] if known else "")


# Reasons of squeue for a job that waits, with the action where one is needed. Others are shown as they are.
_PENDING = {
    "Resources": "not enough free nodes",
    "Priority": "jobs with a higher priority come first",
    "BeginTime": "Slurm starts it again after a rest",
    "Dependency": "it waits for another job",
    "JobHeldUser": "it is held; run `scontrol release`",
    "JobHeldAdmin": "an administrator holds it",
    "JobArrayTaskLimit": "as many tasks of its array run as it allows at once",
    "Licenses": "no licence is free",
    "ReqNodeNotAvail": "a node that it names is down, drained or reserved; change slurm.nodelist",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs",
    "PartitionNodeLimit": "it asks for more nodes than the partition has or allows; change resources.nodes",
    "PartitionTimeLimit": "it asks for more time than the partition allows; change slurm.time_minutes",
    "BadConstraints": "no node can meet it; change slurm.constraint, gpus_per_node, cpus_per_node or memory_gib",
    "InvalidAccount": "the account is not valid; change slurm.account",
    "InvalidQOS": "the QOS is not valid; change slurm.qos",
    "AccountNotAllowed": "the partition does not allow this account; change slurm.account or slurm.partition",
    "QOSNotAllowed": "the partition does not allow this QOS; change slurm.qos or slurm.partition",
    "launch failed requeued held": "it failed to start on its nodes and is held; run `scontrol release`",
}
_FAMILIES = (("QOS", "a limit of its QOS is reached"), ("Assoc", "a limit of its account or user is reached"))


def explain_pending(reason: str) -> str:
    """A pending reason as a sentence that keeps Slurm's own word."""
    word = reason.strip().strip("()")
    if not word or word == "None":
        return "waits in the queue of Slurm"
    known = _PENDING.get(word.partition(",")[0])
    known = known or next((text for start, text in _FAMILIES if word.startswith(start)), None)
    return f"waits in the queue of Slurm: {known} ({word})" if known else f"waits in the queue of Slurm: {word}"
