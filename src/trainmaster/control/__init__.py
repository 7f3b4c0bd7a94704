"""The control plane: take a job in, move every job on until it is final, keep every line it wrote."""

from trainmaster.control.reconcile import run
from trainmaster.control.submit import cancel, resume, run_again, submit, submit_once

__all__ = ["cancel", "resume", "run", "run_again", "submit", "submit_once"]
