"""Marks of runs: what a killed run of a home has left is told from what lives, and from other homes' things."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from trainmaster import targets
from trainmaster.targets import Run, is_left_over, is_running

HOLD = "import sys; from pathlib import Path; from trainmaster.targets import Run; run = Run(Path(sys.argv[1])); "
HOLD += "print(run.owner.home, run.owner.run, flush=True); sys.stdin.read()"


def test_what_a_killed_run_made_is_left_over_and_what_a_live_one_makes_is_not(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        home, run = child.stdout.readline().split()
        handle = {"home": home, "run": run}
        assert home == targets.home_mark(tmp_path)
        assert (is_running(tmp_path, handle), is_left_over(tmp_path, handle)) == (True, False)
        assert not is_left_over(tmp_path / "other", handle), "another home's is not ours to judge"
        os.kill(child.pid, signal.SIGKILL)
    assert (is_running(tmp_path, handle), is_left_over(tmp_path, handle)) == (False, True)
    assert not is_left_over(tmp_path / "other", handle)


def test_a_run_that_has_ended_keeps_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    handle = {"home": run.owner.home, "run": run.owner.run}
    assert is_running(tmp_path, handle)
    run.close()
    assert is_left_over(tmp_path, handle) and list((tmp_path / "runs").iterdir()) == []
    assert not is_left_over(tmp_path, {"attempt": "of a job"})


def test_a_home_that_cannot_be_written_makes_no_run_look_dead(tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.write_text("")
    run = Run(home)
    assert not is_left_over(home, {"home": run.owner.home, "run": run.owner.run})
    run.close()
