"""Environment and Unix user of jobs that run on the machine of the control plane.

A job gets nothing of the server: no home folder, no tokens, no credentials. Variables that a program needs to run at
all (paths, locale, CUDA, NCCL) pass; TRAINMASTER_JOB_ENV names others that the operator wants every job to have, for
example `HF_TOKEN,WANDB_API_KEY`.

As root the agent is started as the user of its project (`target grant local --project P --user U`), else as the one
that TRAINMASTER_JOB_USER names (`serve --job-user`). Otherwise a job has the rights of the server and can read its
files.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from trainmaster.core.errors import UsageError
from trainmaster.core.plan import CHECKPOINTS_FOLDER, WORK_FOLDER
from trainmaster.core.spec import JobSpec

PASSED = "TRAINMASTER_JOB_ENV"
USER = "TRAINMASTER_JOB_USER"
TMP_FOLDER = "tmp"  # in the attempt's folder: its own /tmp, where the machine allows that (confine.py)
_NAMES = frozenset(
    "PATH LANG LANGUAGE TZ TERM TMPDIR USER LOGNAME SHELL HOME HOSTNAME VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV "
    "COLUMNS NO_COLOR SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE "
    "HF_HUB_OFFLINE TRANSFORMERS_CACHE TOKENIZERS_PARALLELISM WORLD_SIZE MASTER_ADDR MASTER_PORT "
    "http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY".split()
)
_FAMILIES = (
    "LC_", "LD_", "PYTHON", "COVERAGE_", "COV_CORE_", "CUDA", "NVIDIA_", "NCCL_", "TORCH", "PYTORCH_", "TRITON_",
    "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GLOO_", "UCX_", "FI_", "RDMAV_", "OMPI_", "HSA_", "ROCR_", "HIP_", "XLA_",
    "SLURM_", "PYTEST_",
)  # fmt: skip
# Ours that a workload reads: failpoints and settings of the trainer, none of them a place or a credential.
_OURS = frozenset(
    f"TRAINMASTER_{word}"
    for word in (
        "BANDWIDTH_PARENT", "CACHE", "CHECK_EVENTS", "COLLECTIVE_TIMEOUT_S", "KILL_AT", "KILL_RANK", "MEMORY", "PEERS",
        "TERM_AT", "WITNESS",
    )
)  # fmt: skip
_SECRET = re.compile(r"KEY|TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_PYTHON_S = 60.0  # from a cold file system
_CREDENTIALS_IN_URL = re.compile(r"://[^\s/@]+@")


def job_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of the server's environment that its jobs get."""
    passed = {name for name in re.split(r"[,\s]+", environment.get(PASSED, "")) if name}
    return {name: value for name, value in environment.items() if name in passed or _passes(name, value)}


def find_given(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the server that TRAINMASTER_JOB_ENV gives to every job. Their values are secrets."""
    passed = {name for name in re.split(r"[,\s]+", environment.get(PASSED, "")) if name}
    return {name: environment[name] for name in sorted(passed) if environment.get(name)}


def find_secrets(spec: JobSpec) -> dict[str, str]:
    """Variables of the server that a spec refers to; UsageError unless the operator gives them to jobs."""
    if spec.container is None or spec.container.login is None:
        return {}
    name = spec.container.login.password_from
    return {name: find_secret(name)}


def find_secret(name: str) -> str:
    """A variable of the server with the password of a registry; UsageError unless the operator gives it to jobs."""
    given = find_given(os.environ)
    if name not in given:
        raise UsageError(f"container.login: set {name} in the environment of the server and name it in {PASSED}")
    return given[name]


def _passes(name: str, value: str) -> bool:
    known = name in _NAMES or name in _OURS or name.startswith(_FAMILIES)
    return known and not _SECRET.search(name) and not _CREDENTIALS_IN_URL.search(value)


def find_user(name: str | None = None) -> pwd.struct_passwd | None:
    """The Unix user of jobs: the one named, else of `--job-user`; None where jobs run as the user of the server."""
    what = "user" if name else USER
    name = name or os.environ.get(USER)
    if not name:
        return None
    if os.geteuid() != 0:
        raise UsageError(f"{what}: only root can start jobs as another user; this server runs as uid {os.geteuid()}")
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        raise UsageError(f"{what}: no such user: {name}; create it with: useradd --system {name}") from None
    if user.pw_uid == 0:
        raise UsageError(f"{what}: {name} is root; name another user")
    return user


def find_python_fault(user: pwd.struct_passwd) -> str:
    """Why this user cannot run our Python with this package; "" where it can."""
    own = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import trainmaster.agent"], check=False, capture_output=True, text=True,
            timeout=_PYTHON_S, env={**job_environment(os.environ), **own}, cwd="/",
            user=user.pw_uid, group=user.pw_gid, extra_groups=[],
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)[:200]
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it ended"])[-1][:200]


def claim(folder: Path, user: pwd.struct_passwd | None) -> None:
    """Make an attempt's folder, where only the control plane can put anything until it is given away.

    The job's folder and the one of its attempts stay ours: the owner of a folder can put a link in the place of what
    lies in it, and root would follow it to any folder of the machine.
    """
    job = folder.parent.parent
    if user is None:
        make_private(job)
        folder.mkdir(parents=True, exist_ok=True)
        return
    job.mkdir(parents=True, exist_ok=True)
    for above in (job.parent.parent, job.parent):  # the user passes to its own folder and lists nothing
        above.chmod(stat.S_IMODE(above.stat().st_mode) | 0o011)
    with contextlib.ExitStack() as opened:
        place = _open_folder(opened, job)
        for name in (folder.parent.name, folder.name):
            os.fchown(place, os.geteuid(), user.pw_gid)
            os.fchmod(place, 0o710)
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=place)
            place = _open_folder(opened, name, dir_fd=place)
        os.fchown(place, os.geteuid(), os.getegid())
        os.fchmod(place, 0o700)


def make_private(job: Path) -> None:
    """Make the folder of a job, which nobody else may enter: the one above it may be open to all users of a disk."""
    job.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    job.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(PermissionError):  # made by an earlier job of another user number: as it was left
        job.chmod(0o700)


def give(folder: Path, user: pwd.struct_passwd | None) -> None:
    """Make a claimed folder, the job's checkpoints and its working folder the property of the user of jobs.

    They are closed to everybody else. The working folder only where no rank has run in it yet.
    """
    if user is None:
        return
    work = folder.parent.parent / WORK_FOLDER
    work.mkdir(mode=0o700, exist_ok=True)
    if not work.is_symlink() and work.stat().st_uid == os.geteuid():
        for above, folders, files in os.walk(work, topdown=False):
            for name in (*folders, *files):
                os.chown(Path(above) / name, user.pw_uid, user.pw_gid, follow_symlinks=False)
        os.chown(work, user.pw_uid, user.pw_gid)  # last: from now on the user may change names in it
    checkpoints = folder.parent.parent / CHECKPOINTS_FOLDER
    checkpoints.mkdir(mode=0o700, exist_ok=True)
    os.chown(checkpoints, user.pw_uid, user.pw_gid, follow_symlinks=False)
    with contextlib.ExitStack() as opened:
        place = _open_folder(opened, folder)
        with contextlib.suppress(FileExistsError):
            os.mkdir(TMP_FOLDER, 0o700, dir_fd=place)
        for name in [entry.name for entry in os.scandir(place)]:
            os.chown(name, user.pw_uid, user.pw_gid, dir_fd=place, follow_symlinks=False)
        os.fchown(place, user.pw_uid, user.pw_gid)


def _open_folder(opened: contextlib.ExitStack, name: str | Path, *, dir_fd: int | None = None) -> int:
    """A folder, never through a link; OSError where it is none."""
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    opened.callback(os.close, fd)
    return fd
