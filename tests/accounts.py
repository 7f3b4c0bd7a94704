"""Unix accounts for tests that need several: made with useradd, and removed afterwards, also after a crash."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_NAME = re.compile(r"tmt-(\d+)-\w+")  # with the process that made it
needs_accounts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("useradd") is None, reason="only root makes Unix accounts, with useradd"
)


@contextlib.contextmanager
def accounts(*names: str, shell: str = "/bin/sh", home: bool = True) -> Iterator[tuple[list[pwd.struct_passwd], Path]]:
    """An account of each name, and a folder that all of them may enter and that holds their homes."""
    _remove_left()
    folder = Path(tempfile.mkdtemp(prefix="trainmaster-", dir="/var/tmp"))
    folder.chmod(0o755)
    own = secrets.token_hex(2)  # a killed run may have left accounts of a process with our number
    made = [f"tmt-{os.getpid()}-{own}{name}" for name in names]
    try:
        for name in made:
            place = ["--create-home", "--home-dir", f"{folder}/{name}"] if home else ["--home-dir", "/nonexistent"]
            # "*": no password, but not locked, which sshd without PAM would refuse.
            subprocess.run(["useradd", *place, "--shell", shell, "--password", "*", name], check=True)
            if home:
                (folder / name).chmod(0o700)
        yield [pwd.getpwnam(name) for name in made], folder
    finally:
        for name in made:
            subprocess.run(["userdel", name], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left() -> None:
    for entry in pwd.getpwall():
        match = _NAME.fullmatch(entry.pw_name)
        if match and not Path(f"/proc/{match[1]}").exists():
            subprocess.run(["userdel", entry.pw_name], check=False, capture_output=True)
