"""Health checks of a node, one file per check in gpu/, active/, fabric/ and system/.

Reading order: contract (what a check is), registry (which there are), runner (how they run), profiles (what a machine
should have), document (the whole run as JSON).
"""

from __future__ import annotations

from trainmaster.checks.contract import LEVELS
from trainmaster.checks.registry import load, names, plan
from trainmaster.checks.runner import run

__all__ = ["LEVELS", "load", "names", "plan", "run"]
