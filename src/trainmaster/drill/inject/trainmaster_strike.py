"""The strike: whether it is due, and SIGKILL to this process, its disk struck, or a wait for the drill outside.

Beside the witness in a stranger's program, and under the same rules.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainmaster.drill.inject.trainmaster_process import Witness

_digests: Any = importlib.import_module("trainmaster_digests")
_disk: Any = importlib.import_module("trainmaster_disk")
_HOLD_S = 60.0


def is_due(witness: Witness, when: str) -> bool:
    order = witness.strike
    return (
        order is not None
        and order["when"] == when
        and witness.steps >= order["after"]
        and order.get("rank") in (None, _digests.rank()[0])
    )


def strike(witness: Witness, path: str = "") -> None:
    order, rank = witness.strike, _digests.rank()[0]
    if order is None:
        return
    mark = os.path.join(witness.folder, f"struck-{rank}")  # noqa: PTH118
    try:
        # Once in an attempt: a launcher may start the rank again, and the run must get past this place.
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    witness.write({"k": "struck", "n": witness.steps, "r": rank, "t": time.time(), "path": path})
    if order["do"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    witness.strike = None
    if order["do"] in ("full", "readonly"):
        witness.look = int(order["until"])
    if order["do"] == "full":
        _disk.fill(int(order["room"]))
        return
    end = time.monotonic() + _HOLD_S
    while time.monotonic() < end and not os.path.exists(os.path.join(witness.folder, "go")):  # noqa: PTH110, PTH118
        time.sleep(0.02)
