"""Found by Python at its start, because a drill puts this folder first in PYTHONPATH: it starts the witness.

Then the sitecustomize of the user's own Python runs, as it would have without us.
"""

from __future__ import annotations

import importlib
import os
import sys


def _start() -> None:
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (a stranger's start is kept quick)
    try:
        importlib.import_module("trainmaster_witness").install()
    except Exception as error:  # the program must start, witness or not
        sys.stderr.write(f"trainmaster: the witness of the drill could not start: {error}\n")
    # Processes that the program starts get the folder by PYTHONPATH; in this one it is not needed any more.
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != here]  # noqa: PTH100
    ours = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")  # the user's, now that ours is not in the path
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


_start()
