"""Confinement of a job that runs as a user of its own, by programs of util-linux, as far as the machine allows it.

unshare   a PID namespace: when its first process ends, the kernel ends everything in it, whatever environment, session
          or parent it gave itself; nobody inside can end that first process, or see other jobs in /proc. And a mount
          namespace, in which /tmp is a folder of the attempt
setpriv   the user, none of our groups, and no new privileges: no setuid program raises it
prlimit   a limit on the processes of that user, TRAINMASTER_JOB_PROCESSES
cgroup    a limit on the memory of the attempt (memory_limit.py)
"""

from __future__ import annotations

import functools
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainmaster.remote import memory_limit

PROCESSES = "TRAINMASTER_JOB_PROCESSES"
_PROCESSES = 16_384  # threads count too: 8 ranks with 64 CPUs each have some thousands
_PROBE_S = 10.0
_TMP = Path("/tmp")  # noqa: S108 (the folder that is hidden)
# The first process of the namespace. It waits for the agent and ends with it.
_FIRST = '"$@"; exit $?'
_BIND = 'tmp=$1; shift; mount --bind "$tmp" /tmp || exit 1; exec "$@"'


def confine(words: Sequence[str], user: pwd.struct_passwd, *, tmp: Path) -> list[str] | None:
    """The command that runs these words confined, in the foreground; None where the machine allows no namespace."""
    if find_fault():
        return None
    limit = os.environ.get(PROCESSES, "")
    count = int(limit) if limit.isdecimal() and int(limit) > 0 else _PROCESSES
    own = ["sh", "-c", _BIND, "sh", str(tmp)] if may_hide_tmp(tmp) else []
    words = [
        "unshare", "--fork", "--pid", "--mount-proc", "--kill-child", "--", *own,
        "setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "--no-new-privs", "--",
        "prlimit", f"--nproc={count}", "--", "sh", "-c", _FIRST, "sh", *words,
    ]  # fmt: skip
    return memory_limit.limit(words)


def may_hide_tmp(tmp: Path) -> bool:
    """Whether nothing that the job needs lies in /tmp itself: its own folder, Python, this package."""
    needed = (tmp, Path(sys.executable), Path(sys.prefix), Path(__file__))
    return not any(path.resolve().is_relative_to(_TMP) for path in needed)


@functools.cache
def find_fault() -> str:
    """Why jobs cannot be confined on this machine; "" where they can."""
    if missing := [name for name in ("unshare", "setpriv", "prlimit", "mount") if shutil.which(name) is None]:
        return f"no {', '.join(missing)} on this machine; install util-linux"
    try:
        probe = subprocess.run(
            ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child", "--", "true"],
            check=False, capture_output=True, text=True, timeout=_PROBE_S,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return f"unshare did not run: {error}"
    return "" if probe.returncode == 0 else f"no namespaces: {probe.stderr.strip()[:200]}"
