"""What the witness keeps of this process: its file of lines, its steps and batches, its last save, and its strike.

Beside the witness in a stranger's program, and under the same rules.
"""

from __future__ import annotations

import importlib
import json
import os
from collections import deque
from collections.abc import Callable
from typing import Any

_disk: Any = importlib.import_module("trainmaster_disk")
_turns: Any = importlib.import_module("trainmaster_turns")
FOLDER_VARIABLE = "TRAINMASTER_DRILL_WITNESS"
STRIKE_VARIABLE = "TRAINMASTER_DRILL_STRIKE"
_MOST_LINES = 20_000  # of one process: about 10 MB
_MOST_BATCHES = 256  # of one step


class Witness:
    """Of this process; after a fork the child starts a file of its own."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        # By id: modules that have registered a buffer; None: this torch does not tell. A child of a fork has them too.
        self.modules: dict[int, Any] | None = None
        self.averages: list[Any] = []  # weak references to AveragedModels
        self.begin()

    def holds(self, path: str) -> bool:
        """Whether a resolved path is of the drill, and not a file of the user's own."""
        ours = os.path.realpath(os.path.join(self.folder, "..", ".."))  # noqa: PTH118
        return path.startswith(ours + os.sep)

    def begin(self) -> None:
        self.pid, self.file, self.lines = os.getpid(), None, 0  # type: int, Any, int
        self.steps = 0
        self.looked = 0  # steps of all optimizers that are looked at
        self.saved_at: tuple[int, int] | None = None  # both, at the last save
        self.turns: Any = _turns.Turns()
        self.settings: dict[int, Any] = {}  # by number of the optimizer: what its line has told of its groups
        # The last ones: a program that skips what it has seen by reading it again fills the front.
        self.batches: deque[list[str]] = deque(maxlen=_MOST_BATCHES)
        self.ids: list[str] = []
        # After a torch.save into memory: the first half of it where it is to be struck, and the file that it went to.
        self.memory: bytes | None = None
        self.written: str | None = None
        # Of a save that a thread of its own writes, while training goes on: `steps` and `looked` when it began.
        self.behind: tuple[int, int] | None = None
        strike = os.environ.get(STRIKE_VARIABLE)
        self.strike: dict[str, Any] | None = json.loads(strike) if strike else None
        struck = self.strike is not None and any(name.startswith("struck-") for name in os.listdir(self.folder))  # noqa: PTH208
        self.look = int(self.strike["look"]) if self.strike and struck and self.strike["do"] == "kill" else None
        if self.strike and struck and self.strike["do"] == "full":  # as it was before the launcher started it again
            _disk.fill(int(self.strike["room"]))

    def write(self, line: dict[str, Any]) -> None:
        if self.lines >= _MOST_LINES:
            return
        if self.file is None:
            # Unbuffered: SIGKILL must not take lines away.
            self.file = open(os.path.join(self.folder, f"{os.getpid()}.jsonl"), "ab", buffering=0)  # noqa: PTH118, PTH123, SIM115
        self.lines += 1
        with _disk.lifted():
            self.file.write(json.dumps(line).encode() + b"\n")


witness: Witness | None = None


def start(folder: str) -> Witness:
    global witness  # noqa: PLW0603 (a process has one)
    witness = Witness(folder)
    return witness


def here() -> Witness | None:
    if witness is not None and witness.pid != os.getpid():
        witness.begin()
    return witness


def quietly(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except Exception:  # whatever it is, the program goes on without its line
        return None
