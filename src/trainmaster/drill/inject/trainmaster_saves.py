"""What is heard of saves: torch.save and save_file of safetensors, and the file that a torch.save into memory goes to.

Beside the witness in a stranger's program, and under the same rules.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainmaster.drill.inject.trainmaster_process import Witness

_digests: Any = importlib.import_module("trainmaster_digests")
_disk: Any = importlib.import_module("trainmaster_disk")
_process: Any = importlib.import_module("trainmaster_process")
_strike: Any = importlib.import_module("trainmaster_strike")
_here: Callable[[], Witness | None] = _process.here
_quietly: Callable[..., Any] = _process.quietly
_NOT_WEIGHTS = (".log", ".txt", ".csv", ".json", ".jsonl", ".yaml", ".html", ".lock")


def call_save(save: Callable[..., Any], place: Any, *args: Any, **options: Any) -> Any:
    began = _quietly(_count)  # another thread may begin a save of its own meanwhile
    _quietly(before_save, place)
    _quietly(_note_content, args[0])
    try:
        result = save(*args, **options)
    except BaseException as error:
        _quietly(_on_refused, error)
        raise
    _quietly(on_save, place, began)
    return result


def before_save(place: Any) -> None:
    witness = _here()
    name = _disk.name_of(place)
    if witness is not None and name is not None:
        path = os.path.realpath(name)
        _end_outside(witness, path)
        _disk.wrote(path)


def _count() -> tuple[int, int] | None:
    """Steps of the run, and of all optimizers, that are done."""
    witness = _here()
    return None if witness is None else (witness.steps, witness.looked)


def _note_content(content: Any) -> None:
    """What is in it beside the weights must be restored too. A thread of its own saves at no certain step."""
    witness = _here()
    if witness is None or not witness.steps or _disk.is_in_a_thread():
        return
    entries = _digests.entries(content)
    if entries:
        witness.write({"k": "content", "n": witness.steps, "r": _digests.rank()[0], "entries": entries})


def _on_refused(error: BaseException) -> None:
    witness = _here()
    if witness is not None:
        words = f"{type(error).__name__}: {error}"[:200]
        witness.write({"k": "refused", "n": witness.steps, "r": _digests.rank()[0], "t": time.time(), "words": words})


def _end_outside(witness: Witness, path: str) -> None:
    """End the program before it saves over a file of the user's own: drilled, it is killed there and damaged."""
    harmless = ("/tmp/", "/var/tmp/", "/dev/", os.path.expanduser("~/.cache/"))  # noqa: PTH111, S108
    if not witness.holds(path) and not path.startswith(harmless):
        witness.write({"k": "outside", "n": witness.steps, "r": _digests.rank()[0], "t": time.time(), "path": path})
        os.kill(os.getpid(), signal.SIGKILL)


def on_save(place: Any, began: tuple[int, int] | None = None) -> None:
    witness = _here()
    if witness is None:
        return
    began = began or (witness.steps, witness.looked)
    name = _disk.name_of(place, witness.holds)
    if name is None:  # into memory: to be sent, or to be written next
        raw = getattr(place, "getbuffer", bytes)()
        witness.memory = bytes(raw[: len(raw) // 2]) if _strike.is_due(witness, "save") else b""
        witness.behind = began if _disk.is_in_a_thread() else None
        return
    path = os.path.realpath(name)
    witness.memory = witness.written = None
    if _strike.is_due(witness, "save") and witness.holds(path):
        # What a kill in the middle of writing leaves: a part of the file.
        for file in (place, getattr(place, "raw", None)):
            _quietly(lambda of=file: of.flush())
        _quietly(lambda: os.truncate(path, os.path.getsize(path) // 2))  # noqa: PTH202
        _strike.strike(witness, path=path)
    witness.behind = began if _disk.is_in_a_thread() else None
    note_save(witness, path, _digests.rank()[0])


def on_load(place: Any) -> None:
    witness = _here()
    name = _disk.name_of(place)
    if witness is None or witness.steps or name is None:
        return
    path = os.path.realpath(name)
    witness.write({"k": "load", "n": 0, "r": _digests.rank()[0], "t": time.time(), "path": path})


def note_save(witness: Witness, path: str, rank: int) -> None:
    witness.memory = witness.written = None
    if witness.saved_at != (witness.steps, witness.looked):  # one line a step, however many files
        witness.saved_at = (witness.steps, witness.looked)
        now = time.time()
        number, looked = witness.behind or witness.saved_at
        behind = witness.behind is not None
        line = {"k": "save", "n": number, "i": looked, "r": rank, "t": now, "path": path, "behind": behind}
        witness.write(line)


def on_audit(event: str, arguments: Any) -> None:
    # Called for all that Python does: nothing but comparisons unless something was saved into memory just now, or a
    # power cut is to come.
    witness = _process.witness
    if _disk.is_heard():
        _quietly(_disk.hear, event, arguments)
    if witness is None or (witness.memory is None and witness.written is None):
        return
    if event == "open" and witness.memory is not None:
        _quietly(_on_open, witness, arguments[0], arguments[2])
    elif event in ("os.rename", "shutil.move") and witness.written is not None:
        _quietly(_on_rename, witness, arguments[0], arguments[1])


def on_end() -> None:
    """The last save of a run: no step follows that would tell that it is whole. After an error it may be half."""
    witness, failed = _process.witness, hasattr(sys, "last_type")
    if witness is not None and witness.pid == os.getpid() and witness.written is not None and not failed:
        note_save(witness, witness.written, _digests.rank()[0])


def _on_open(witness: Witness, place: Any, flags: int) -> None:
    if witness.pid != os.getpid() or not isinstance(place, (str, os.PathLike)):
        return
    path = os.path.realpath(os.fspath(place))
    if not flags & (os.O_WRONLY | os.O_RDWR) or path.startswith("/dev/") or path.endswith(_NOT_WEIGHTS):
        return
    _end_outside(witness, path)
    half, witness.memory, witness.written = witness.memory, None, path
    if half and _strike.is_due(witness, "save"):
        if witness.holds(path):  # not a temporary file that is moved to its place when it is whole, as Lightning's
            with open(path, "wb") as file:  # noqa: PTH123
                file.write(half)
        _strike.strike(witness, path=path)


def _on_rename(witness: Witness, source: Any, target: Any) -> None:
    if os.path.realpath(os.fspath(source)) == witness.written:
        witness.written = os.path.realpath(os.fspath(target))
