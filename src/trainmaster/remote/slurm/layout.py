"""Folders and files of an attempt on the shared file system.

    JOB/attempts/N/                          base: what all nodes of the attempt share
        plan.json batch.sh                   template of the plans, the script of sbatch
        intent job released stop             an sbatch was sent; its job id; never start; stop request
        preempted                            when Slurm last preempted it and it went back into the queue
        failed-K                             with spares: when a node that has a place failed, or a spare missed node 0
        owner restart-T rendezvous-T-K.json  written by the nodes
        slurm-ID.log                         output of the batch script
    JOB/attempts/N[-task-T]-node-R[-rK]/     one node: an attempt's folder as on the local target

T is a task of an array ("0" without one), R the rank of the node, K how often Slurm has restarted the job. A restarted
node continues in a folder of its own whose event file and logs begin as copies of the earlier ones: a reader goes on
at its byte offset and finds no line twice.
"""

from __future__ import annotations

from pathlib import Path

from trainmaster.core.files import read_small

BATCH_SCRIPT = "batch.sh"
COMMENT = "trainmaster:"  # of a Slurm job, before the attempt's name: by it a job is found again
RUN_COMMENT = "trainmaster-run:"  # of a Slurm job that belongs to no attempt, before the marks of its home and run
INTENT_FILE, JOB_FILE, RELEASED_FILE, OWNER_FILE = "intent", "job", "released", "owner"
PREEMPTED_FILE = "preempted"  # of the base: Slurm's time of the last preemption
NEVER = "-"  # content of the job file where the attempt was cancelled before it was submitted


def node_folder(base: Path, task: int | None, node: int, restart: int = 0) -> Path:
    """Folder of one node of an attempt."""
    part = "" if task is None else f"-task-{task}"
    again = f"-r{restart}" if restart else ""
    return base.with_name(f"{base.name}{part}-node-{node}{again}")


def failed_file(base: Path, restart: int) -> Path:
    return base / f"failed-{restart}"


def restart_file(base: Path, task: int | None) -> Path:
    return base / f"restart-{task or 0}"


def read_restart(base: Path, task: int | None) -> int:
    """Number of the restart whose folders count."""
    try:
        return int(read_small(restart_file(base, task)))
    except (FileNotFoundError, ValueError):
        return 0
