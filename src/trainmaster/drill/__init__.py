"""Drill of any program: it is struck and resumed, and compared with an undisturbed run of the same command.

attempt.py runs one attempt under the agent, and serves the drill of our trainer (train/drill) too. inject/ is the
witness that is put into the program through its environment, witness_log.py reads its lines, plan.py says when to
strike, run.py does it, starts.py starts the program, copies.py strikes copies of the run, lives.py finds the step that
each start went on from, judge.py and losses.py compare.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable


def sample(ids: Iterable[object]) -> None:
    """Tell a drill which samples the next optimizer step is made of. Without a drill this does nothing."""
    witness = sys.modules.get("trainmaster_witness")
    if witness is not None:
        witness.sample(ids)
