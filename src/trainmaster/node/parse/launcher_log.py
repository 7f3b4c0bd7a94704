"""Lines of a launcher's log: the prefix that names a process, colours, timestamps, and reports of a process's death.

Prefixes: `0: ` (srun -l), `[1,0]<stdout>:` and `[prterun-node1-7@1,0]<stdout>:` (Open MPI 4 and 5), `[rank0]:` and
`[default0]:` (torch, torchrun), `node1: ` (pdsh, clush), `(head, rank=0, pid=7) ` and
`(worker1, rank=1, pid=7, ip=10.0.0.2) ` (SkyPilot), `(name pid=7, ip=10.0.0.2) ` (Ray), `nccl-1  | ` (docker compose),
`[pod/name/container] ` and `[name] ` (kubectl logs --prefix, launchers on Kubernetes). They may be nested.
"""

from __future__ import annotations

import re

_ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]")
_STAMP = re.compile(
    r"\s*\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?[ \t]+(?:std(?:out|err) [FP] )?"
)
_MARK = re.compile(
    r"\s*(?:"
    r"(?P<mpi>\[(?:[\w.@-]{1,160}[@,])?\d{1,6},\d{1,6}\])(?:<std(?:out|err)>)?:"
    r"|\[(?P<torch>(?:rank|default)\d{1,6})\]:"
    r"|\((?P<sky>[A-Za-z][\w.-]{0,80},? (?:(?:rank|pid|ip|node)=[\w.:-]{1,80}(?:, )?)+)\) ?"
    r"|\[(?P<pod>(?:pod/)?[A-Za-z][\w.-]{0,252}(?:/[\w.-]{1,252}){0,2})\] ?(?=[#\s\[\d(]|$)"
    r"|(?P<compose>[A-Za-z][\w.-]{0,80}?) +\| ?"
    r"|(?P<other>\d{1,6}|[A-Za-z][\w.-]{0,252}):(?=[ \t#]|$)"
    r")"
)
_NESTED = 3
# A process ended by a signal or with an error, its job was cancelled, or its launcher failed: srun, slurmstepd and
# salloc, Open MPI with PMIx and UCX, MPICH, torchrun, the C++ runtime and glibc, the shell, kubectl, docker. A line
# with "exit code 0" is none; nor is the lock of PMIx that healthy runs of Open MPI 4 report in containers.
_DEATH = re.compile(
    r"Segmentation fault|\bcore dumped\b|\bBus error\b|Floating point exception|\*\*\* Process received signal"
    r"|exited on signal|terminated by signal|killed by signal|received signal \d|\bSIG(?:SEGV|KILL|ABRT|BUS|TERM|FPE)\b"
    r"|CANCELLED (?:AT|DUE|BY)|DUE TO (?:TIME LIMIT|NODE FAILURE|PREEMPTION)|\bNODE_FAIL\b|oom[-_ ]?kill|OOMKilled"
    r"|MPI_ABORT was invoked|exited with non-zero|lost communication with a remote daemon|noticed that process rank"
    r"|[Ee]xit(?:ed with)?(?: exit)? (?:code|status)[ :]+[1-9]"
    r"|srun: error: .{1,300}(?:Exited|Killed|Terminated|Aborted)"
    r"|^\s*(?:Killed|Terminated|Aborted)\s*(?:\(core dumped\))?\s*$"
    r"|\bChildFailedError\b|\bCUDA error\b ?:|\bterminate called (?:after|without|recursively)"
    r"|\bFatal error in (?:P?MPI_|internal_)|\bBAD TERMINATION OF\b|\bAbort\(\d{1,12}\)"
    r"|\bPMIX ERROR\b(?!: ERROR in file \S{0,200}gds_)|\b(?:ORTE_ERROR_LOG|PRTE ERROR|ORTE ERROR)\b"
    r"|\bUCX +(?:ERROR|FATAL)\b"
    r"|\bsrun: Force Terminated\b|\b[Jj]ob allocation \d{1,12} has been revoked|\bnon-zero (?:exit )?(?:code|status)\b"
    r"|double free or corruption|\bfree\(\): invalid|\bmalloc\(\): |corrupted size vs|stack smashing detected"
    r"|\bJob step aborted\b|srun: error: .{0,300}(?:Out Of Memory|Timed out|Node failure|launch failed)"
    r"|\bmpirun(?:\S{0,20})? has exited due to|mpirun: killing job|\bPrimary job +terminated normally, but"
    r"|\bORTE daemon has unexpectedly failed|\bTraceback \(most recent call last\)|\bCUDA out of memory\b"
    r"|\bclosed by remote host\b|\bsend disconnect: |\bssh: connect to host |\bNVRM: Xid \("
    r"|\bOut of memory: Kill|\bstep \d{1,12}\.\w{1,12} (?:TIMEOUT|FAILED|OUT_OF_MEMORY)\b"
)
# salloc prints both after a shell that ended well: the first shows that the second was asked for.
_RELEASE = re.compile(r"\bRelinquishing job allocation (\d{1,12})\b")
_REVOKE = re.compile(r"\b[Jj]ob allocation (\d{1,12}) has been revoked")


def strip_colours(line: str) -> str:
    """The line without ANSI escape sequences."""
    return _ANSI.sub("", line) if "\x1b" in line else line


def split_mark(line: str) -> tuple[str, str]:
    """The prefix of a launcher, empty where there is none, and the rest of the line without timestamp."""
    labels: list[str] = []
    body = _unstamp(line)
    for _ in range(_NESTED):
        mark = _MARK.match(body)
        if mark is None:
            break
        label = next(value for value in mark.groupdict().values() if value is not None)
        labels.append(label)
        body = _unstamp(body[mark.end() :])
    return " ".join(labels), body


def reports_death(line: str) -> bool:
    """Whether a launcher, the shell or a scheduler reports that a process died or was cancelled."""
    return _DEATH.search(line) is not None


def released_job(line: str) -> str | None:
    """Number of the Slurm job that `salloc` gives back in this line."""
    match = _RELEASE.search(line)
    return match[1] if match else None


def revoked_job(line: str) -> str | None:
    """Number of the Slurm job that was revoked, by its user, its time limit, or after it was given back."""
    match = _REVOKE.search(line)
    return match[1] if match else None


def _unstamp(line: str) -> str:
    # A table row may end with a time but begins with a size, so only a leading time is removed.
    stamp = _STAMP.match(line)
    return line[stamp.end() :] if stamp else line
