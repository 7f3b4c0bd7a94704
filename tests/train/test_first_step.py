"""Told to stop in the first step, while a compiler holds the main thread: the ranks leave at once, nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from .runs import RunHere, Start, tiny

pytestmark = pytest.mark.alone

# The main thread waits in C for a lock that nobody gives back: no Python handler runs there, as in a long compilation.
STUCK = """
import ctypes, os, sys
from trainmaster.train import loop

def stuck(model, batches):
    open(os.path.join(os.path.dirname(__file__), "stuck-" + os.environ["RANK"]), "w").close()
    lock = ctypes.create_string_buffer(256)
    ctypes.CDLL(None).pthread_mutex_lock(lock)
    ctypes.CDLL(None).pthread_mutex_lock(lock)

loop.forward_backward = stuck
"""


def test_a_stop_in_a_long_first_step_ends_all_ranks_at_once(start: Start, run_here: RunHere, tmp_path: Path) -> None:
    run_here(tmp_path, tiny(steps=4))
    (tmp_path / "sitecustomize.py").write_text(STUCK)  # Python imports it before anything else
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ranks = start(tmp_path, tiny(steps=8), ranks=2, env={"PYTHONPATH": path})
    ranks.wait_for("TRAINING", "start", resumed_from=4)
    while not all((tmp_path / f"stuck-{rank}").exists() for rank in range(2)):
        time.sleep(0.05)
    ranks.processes[1].send_signal(signal.SIGTERM)  # the other must hear of it
    ran = ranks.finish()
    assert ran.codes == [75, 75], ran.output
    assert ran.named("TRAINING", "end")[-1]["data"]["step"] == 4
    assert ran.named("TRAINING", "end")[-1]["data"]["stopped"] is True
    assert "stopped (SIGTERM on rank 1) at step 4/8" in ran.output[0]
    assert ran.checkpoints == ["step-00000004"]
