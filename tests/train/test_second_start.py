"""A second `trainmaster train` ends the first one on request, also where its agent was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainmaster.cli.training import _second_start
from trainmaster.core.errors import UsageError
from trainmaster.core.plan import LOCK_FILE

# Holds the lock of an attempt until SIGINT, as an agent does.
HOLDER = """
import fcntl, os, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write(f"pid {os.getpid()}")
file.flush()
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.spawns
@pytest.mark.parametrize("stopped", [False, True])
def test_the_first_run_is_named_and_ends_on_request(stopped: bool, tmp_path: Path) -> None:
    lock = tmp_path / "attempts" / "a" / LOCK_FILE
    lock.parent.mkdir(parents=True)
    words = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            if stopped:
                os.kill(holder.pid, signal.SIGSTOP)
            with pytest.raises(UsageError, match=f"agent process {holder.pid}.*--stop-other"):
                _second_start.settle(tmp_path, stop=False, attach=False)
            _second_start.settle(tmp_path, stop=True, attach=False)
            assert holder.wait(30) != 0
        finally:
            holder.kill()
    assert _second_start.find_running(tmp_path) is None
