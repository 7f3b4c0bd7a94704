"""Processes of one simulated instance: an sshd of its own, a home folder, and a fake nvidia-smi and dmesg on its PATH.

Every command of a session starts in the home folder of the instance, with HOME, PATH and TMPDIR of its own. The rest of
the file system and the user are those of the simulator: an instance is a place for processes, no container.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainmaster.core.errors import UsageError
from trainmaster.sim.lambda_cloud import gpu_answers, processes
from trainmaster.sim.lambda_cloud.gpu_answers import Gpu

_HERE = Path(__file__).parent
_PYTHON = (sys.executable, "-I", "-S")  # for single files: isolated, and started in milliseconds
_SFTP = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")
_READY_S = 30.0
# A check reads torch's version file to see which CUDA it was built for. torch on this machine may be built for none,
# which would fail on GPUs: the instance answers as one with a CUDA build.
_TORCH = f"""case "$2" in *find_spec*torch*version.py*) echo "cuda: str = '{gpu_answers.CUDA}'"; exit 0 ;; esac
"""
# The kernel log of this machine may have lost its beginning, or be closed to its user: then no check can say "no Xid".
_DMESG = """[    0.000000] Linux version 6.8.0-simulated
[    4.200000] NVRM: loading NVIDIA UNIX x86_64 Kernel Module
"""
_STOP_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """OpenSSH programs of this machine."""

    sshd: str
    sftp: str | None


def find_programs() -> Programs:
    """OpenSSH's programs; UsageError with the package to install where they are missing."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
    sshd = shutil.which("sshd", path=path)
    if sshd is None or shutil.which("ssh-keygen") is None:
        raise UsageError("simulated instances need an OpenSSH server; run: apt-get install openssh-server")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # privilege separation; made by a boot script otherwise
    return Programs(sshd=sshd, sftp=next((name for name in _SFTP if Path(name).exists()), None))


class Machine:
    """One instance's processes and files, below `folder`, whose name is the instance's id."""

    def __init__(
        self, folder: Path, *, programs: Programs, address: str, port: int, hostname: str, cache: Path | None = None
    ) -> None:
        self.folder, self.home = folder, folder / "home"
        self._cache = cache or self.home / ".cache"
        self.address, self.port, self._hostname, self._programs = address, port, hostname, programs
        self._init: subprocess.Popen[bytes] | None = None

    def prepare(self, *, public_keys: Sequence[str], gpus: list[Gpu], mounts: Sequence[tuple[str, Path]]) -> None:
        """Write host key, configuration, home folder and programs. `mounts` are links in the home folder."""
        for name in ("home/tmp", "bin", "smi"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for name, place in mounts:
            (self.home / name).symlink_to(place)
        (self.folder / "authorized_keys").write_text("".join(f"{key}\n" for key in public_keys))
        key = self.folder / "host_key"
        if not key.exists():
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self._hostname, "-f", str(key)]
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL, capture_output=True)
        self._write_programs(gpus)
        (self.folder / "sshd_config").write_text(self._sshd_config())

    def start(self) -> None:
        """Start sshd and wait until it listens."""
        assert self._init is None
        environment = {"PATH": os.environ.get("PATH", os.defpath), processes.MARK: self.folder.name}
        config, log = str(self.folder / "sshd_config"), str(self.folder / "log")
        # Absolute paths: sshd starts itself again for each connection.
        self._init = subprocess.Popen(
            [*_PYTHON, str(_HERE / "box_init.py"), self._programs.sshd, "-D", "-f", config, "-E", log],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True, cwd="/",
        )  # fmt: skip
        processes.record(self.folder, self._init.pid)
        until = time.monotonic() + _READY_S
        while not self._listens():
            if self._init.poll() is not None or time.monotonic() > until:
                log_text = Path(log).read_text(errors="replace")[-500:] if Path(log).exists() else ""
                self.stop()
                raise UsageError(f"sshd at {self.address} port {self.port} did not start: {log_text}")
            time.sleep(0.01)

    def stop(self) -> None:
        """End every process of the instance; its files stay."""
        if self._init is not None:
            assert self._init.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._init.stdin.close()  # its first process then kills all the others
            try:
                self._init.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._init.kill()
                self._init.wait()
            self._init = None
        processes.kill_marked([self.folder.name])  # where the first process was killed from inside

    def remove(self) -> None:
        """End every process and delete all files."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def cut_links(self) -> int:
        """Kill the processes of open SSH connections, as a broken link would; programs go on. Returns how many."""
        if self._init is None:
            return 0
        held = [
            pid
            for server in processes.children(self._init.pid)
            if _is_sshd(server)
            for pid in processes.children(server)
        ]
        for pid in held:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(held)

    def break_cuda(self) -> None:
        """Make nvidia-smi fail, as where the driver does not run."""
        (self.folder / "smi" / "broken").write_text(gpu_answers.BROKEN)

    @property
    def running(self) -> bool:
        return self._init is not None

    def _listens(self) -> bool:
        """Whether an SSH server answers; a wildcard listener of another program takes the connection too."""
        with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), timeout=1) as probe:
            return probe.recv(4) == b"SSH-"
        return False

    def _sshd_config(self) -> str:
        variables = {
            "HOME": self.home,
            "PATH": f"{self.folder / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "TMPDIR": self.home / "tmp",
            "XDG_CACHE_HOME": self._cache,
            processes.MARK: self.folder.name,
        }
        lines = [
            f"ListenAddress {self.address}:{self.port}",
            f"HostKey {self.folder / 'host_key'}",
            f"AuthorizedKeysFile {self.folder / 'authorized_keys'}",
            f"SetEnv {' '.join(f'{name}={value}' for name, value in variables.items())}",
            f"ForceCommand {self.folder / 'bin' / 'session'}",  # sshd itself starts commands in the user's real home
            "PidFile none", "StrictModes no", "UsePAM no", "PasswordAuthentication no", "PermitRootLogin yes",
            "KbdInteractiveAuthentication no", "PrintMotd no", "MaxSessions 200", "MaxStartups 200", "UseDNS no",
            *([f"Subsystem sftp {self._programs.sftp}"] if self._programs.sftp else []),
        ]  # fmt: skip
        return "".join(f"{line}\n" for line in lines)

    def _write_programs(self, gpus: list[Gpu]) -> None:
        smi, shell = self.folder / "smi", '#!/bin/sh\ncd "$HOME" || exit 1\n'
        session = (
            'if [ -n "$SSH_ORIGINAL_COMMAND" ]; then exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"; fi\nexec /bin/sh -l\n'
        )
        self._program("session", shell + session)
        self._program("python3", f'#!/bin/sh\n{_TORCH if gpus else ""}exec {shlex.quote(sys.executable)} "$@"\n')
        self._program("hostname", f"#!/bin/sh\necho {shlex.quote(self._hostname)}\n")
        self._program("dmesg", f"#!/bin/sh\ncat <<'END'\n{_DMESG}END\n")
        if not gpus:
            return
        cases = []
        for number, (arguments, text) in enumerate(gpu_answers.answers(gpus).items()):
            (smi / str(number)).write_text(text)
            cases.append(f'"{arguments}") exec cat {smi / str(number)} ;;\n')
        (smi / "rows.json").write_text(json.dumps(gpu_answers.rows(gpus)))
        words = shlex.join([*_PYTHON, str(_HERE / "smi_query.py"), str(smi / "rows.json")])
        query = f'--query-gpu=*) exec {words} "$@" ;;\n'
        broken = f"if [ -e {smi / 'broken'} ]; then cat {smi / 'broken'}; exit {gpu_answers.BROKEN_EXIT}; fi\n"
        other = '*) echo "the simulated nvidia-smi does not know: $*" >&2; exit 2 ;;\n'
        self._program("nvidia-smi", f'#!/bin/sh\n{broken}case "$*" in\n{"".join(cases)}{query}{other}esac\n')

    def _program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)


def _is_sshd(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"sshd" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def remove_leftovers(folder: Path) -> int:
    """End the processes and delete the files of instances that a killed simulator left below `folder`."""
    folders = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    for path in folders:
        processes.kill_recorded(path)
    processes.kill_marked(path.name for path in folders)
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)
    return len(folders)
