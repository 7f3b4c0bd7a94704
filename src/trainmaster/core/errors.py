"""Every error Trainmaster raises on purpose.

    TrainmasterError            exit code
    ├── UsageError              2   the user asked for something that cannot be done as asked
    │   ├── SpecError           2   a spec, config or expectation with faults, all of them at once
    │   ├── JobMissing          2   there is no such job
    │   ├── JobUnreadable       2   this version cannot read the stored row of a job
    │   ├── JobFinal            2   the job has ended; nothing about it can change any more
    │   ├── NotWaiting          2   the job does not wait in our own queue; its place there cannot change
    │   ├── KeyTaken            2   an idempotency key that already stands for another submission
    │   ├── AccessRefused       2   the caller may not use that target, file or account; nothing was created
    │   ├── OverBudget          2   the project has spent what it may; nothing was created
    │   └── OverQuota           2   the project has as much in storage as it may; nothing was stored
    ├── MissingExtra            2   a feature whose packages are not installed
    ├── HostError               –   the machine could not be asked; a check turns it into `error`
    │   ├── CommandMissing          the program is not on this machine
    │   ├── CommandTimedOut         it did not answer in time and was killed with all its children
    │   ├── FileUnreadable          a file that is absent or may not be read
    │   │   └── FileMissing         it is certain that it is not there
    │   └── NotCaptured             the recorded machine lacks this answer
    ├── TargetError             1   a target refused or could not do what was asked
    │   ├── Unreachable             it cannot be asked now; never to be read as "failed"
    │   │   └── NodeUnavailable     a node that gave no answer: the reason, and one action
    │   ├── NodeLost                a machine of the attempt is gone, or silent for too long
    │   │   └── Preempted           the provider took it back
    │   ├── NoAccess                credentials or settings are missing on this side; nothing was sent
    │   ├── NoCapacity              every machine that would do is in use; the job waits
    │   ├── PathDenied              a file or folder there may not be read or written
    │   ├── PathMissing             a file or folder there does not exist
    │   └── DiskFull                no room is left on a disk there
    ├── StoreError              2   the database cannot be used as it is
    ├── StorageError            1   a folder or object store refused or could not do what was asked
    │   ├── ObjectMissing           it is certain that there is no such object
    │   ├── AccessDenied            credentials are missing, wrong or not enough
    │   ├── StorageUnreachable      nothing answered; says nothing about what is stored
    │   ├── Damaged                 the bytes are not those that were stored
    │   └── NoSignedUrls            this store cannot give an address to somebody without credentials
    ├── CheckpointError         1   a checkpoint exists that cannot be trusted or read
    │   └── CheckpointInUse         another run writes there; the checkpoints are good
    └── DataError               1   training data is not there, cannot be read, or is not what it should be

Messages say where, what, and what to do. Only the command line and the agent print and exit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class TrainmasterError(Exception):
    """The root; `exit_code` is what the command line ends with."""

    exit_code = 1


class UsageError(TrainmasterError):
    """The user asked for something that cannot be done as asked."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One mistake in a document: where it is, what is wrong, what to write instead."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class SpecError(UsageError):
    """A document with one or more faults; `faults` holds every one, in the document's order."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


class JobMissing(UsageError):
    """There is no such job."""


class JobUnreadable(UsageError):
    """This version cannot read the stored row of a job. The message has no value of the row."""

    def __init__(self, job_id: str, project: str) -> None:
        self.job_id, self.project = job_id, project
        super().__init__(
            f"job {job_id}: its stored spec cannot be read by this version of Trainmaster, so the queue and lists leave"
            " it out; start the version that stored it, or restore the database from a backup"
        )


class JobFinal(UsageError):
    """The job has ended; nothing about it can change any more."""


class NotWaiting(UsageError):
    """The job does not wait in our own queue; its place there cannot change."""


class JobOpen(UsageError):
    """Another job still writes the checkpoints that were asked for; nothing was created."""


class AccessRefused(UsageError):
    """The caller may not use that target, file or account; nothing was created. `code` is the word for programs."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class OverQuota(UsageError):
    """The project has as much in storage as it may; nothing was stored."""


class OverBudget(UsageError):
    """The project's budget is spent; the message has the amount. Nothing was created."""

    def __init__(self, message: str, *, project: str) -> None:
        self.project = project
        super().__init__(message)


class KeyTaken(UsageError):
    """An idempotency key that already stands for another submission of its project."""


class MissingExtra(UsageError):
    """A feature whose packages are not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs packages that are not installed; run: {install_command(extra)}")


def install_command(extra: str) -> str:
    """What installs an extra: in a clone it is the folder that is installed, into the environment that runs this."""
    clone = Path(__file__).resolve().parents[3]
    if not ((clone / "pyproject.toml").is_file() and (clone / "src" / "trainmaster").is_dir()):
        return f"pip install 'trainmaster[{extra}]'"
    pip, folder = Path(sys.executable).parent / "pip", str(clone)
    if clone == Path.cwd():
        folder, pip = ".", pip.relative_to(clone) if pip.is_relative_to(clone) else pip
    return f"{pip} install -e '{folder}[{extra}]'"


class HostError(TrainmasterError):
    """The machine could not be read."""


class CommandMissing(HostError):
    """The program is not on this machine."""


class CommandTimedOut(HostError):
    """The program did not answer in time and was killed with all its children."""


class FileUnreadable(HostError):
    """A file that is absent or may not be read. `code` is the system's number of the reason (errno); None: unknown."""

    def __init__(self, message: str, *, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class FileMissing(FileUnreadable):
    """The file is not there. That is knowledge; a file that may not be read is none."""


class NotCaptured(HostError):
    """The recorded machine lacks this answer. Never to be read as "absent"."""


class TargetError(TrainmasterError):
    """A target refused or could not do what was asked."""


class Unreachable(TargetError):
    """The target cannot be asked now. Says nothing about the job: never read it as "failed"."""


class NodeUnavailable(Unreachable):
    """A node that gave no answer: the reason, and one action."""

    def __init__(self, reason: str, *, action: str) -> None:
        super().__init__(f"{reason}; {action}")
        self.reason = reason
        self.action = action


class NodeLost(TargetError):
    """A machine of the attempt is gone, or has been silent for so long that it counts as gone."""


class Preempted(NodeLost):
    """The provider took a machine of the attempt back."""


class NoAccess(TargetError):
    """Credentials or settings of the target are missing on this side: nothing was sent."""


class NoCapacity(TargetError):
    """Every machine that would do is in use. The job waits; that costs nothing."""


class PathDenied(TargetError):
    """A file or folder at the target may not be read or written by the user of the login."""


class PathMissing(TargetError):
    """A file or folder at the target does not exist."""


class DiskFull(TargetError):
    """No room is left on a disk at the target."""


class StoreError(TrainmasterError):
    """The database cannot be used as it is."""

    exit_code = 2


class StorageError(TrainmasterError):
    """A folder or an object store refused or could not do what was asked."""


class ObjectMissing(StorageError):
    """There is no such object, or no such bucket. That is knowledge."""


class AccessDenied(StorageError):
    """Credentials are missing, wrong or not enough."""


class StorageUnreachable(StorageError):
    """Nothing answered. Says nothing about what is stored."""


class Damaged(StorageError):
    """The bytes that came are not those whose checksum is known. Nothing was kept of them."""


class NoSignedUrls(StorageError):
    """This store has no signed URLs; its objects are read through the store."""


class CheckpointError(TrainmasterError):
    """A checkpoint exists that cannot be trusted or read."""


class CheckpointInUse(CheckpointError):
    """Another run holds the place of the checkpoints, or has taken it."""


class LaterVersion(CheckpointError):
    """A checkpoint is whole, and of a version of the format that this Trainmaster cannot read."""


class DataError(TrainmasterError):
    """Training data is not there, cannot be read, or is not what it should be. Reading it again will not help."""
