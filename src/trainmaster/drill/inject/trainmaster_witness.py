"""Witness of a drill: one line for each optimizer step, saying what the process holds. And the strike, where it is due.

It lives inside a stranger's program, under that program's Python (3.8 on) and torch, so it imports nothing of ours.
It hears of steps from torch's own hook for all optimizers, of batches from the DataLoader, of saves from torch.save and
safetensors, and of a file that is opened after a torch.save into memory, which is how Lightning writes.
Nothing here raises, draws a random number or changes a tensor; digests are of a sample of elements, copied off the
device at once.

TRAINMASTER_DRILL_WITNESS=FOLDER   each process that steps an optimizer writes FOLDER/PID.jsonl
TRAINMASTER_DRILL_STRIKE=JSON      {"when": "step" | "save", "after": steps, "rank": number or null, "do": "kill" |
                                   "hold" | "power" | "full" | "readonly", "look": steps}: SIGKILL to itself, or wait
                                   until the drill has struck from outside; trainmaster_disk.py tells of the last three.
                                   A rank that its launcher starts again after a kill ends after `look` steps, one
                                   whose disk is full (past "room" bytes) or read-only after "until" steps
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib
import json
import os
import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

# Beside this file. Imported at once: the folder leaves sys.path when the witness has started.
_digests: Any = importlib.import_module("trainmaster_digests")
_disk: Any = importlib.import_module("trainmaster_disk")
_rank: Callable[[], tuple[int, int]] = _digests.rank
FOLDER_VARIABLE = "TRAINMASTER_DRILL_WITNESS"
STRIKE_VARIABLE = "TRAINMASTER_DRILL_STRIKE"
_TENSORS, _ELEMENTS = 64, 8  # what a digest of the weights is taken from
_STATES = 24  # parameters whose optimizer state is looked at: two or three tensors each
_BATCH_TENSORS, _BATCH_ELEMENTS = 16, 64
_MOST_LINES = 20_000  # of one process: about 10 MB
_MOST_BATCHES = 256  # of one step
_OPTIMIZERS = 8
_HOLD_S = 60.0
_NOT_WEIGHTS = (".log", ".txt", ".csv", ".json", ".jsonl", ".yaml", ".html", ".lock")


class _Witness:
    """Of this process; after a fork the child starts a file of its own."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        # By id: modules that have registered a buffer; None: this torch does not tell. A child of a fork has them too.
        self.modules: dict[int, Any] | None = None
        self.begin()

    def holds(self, path: str) -> bool:
        """Whether a resolved path is of the drill, and not a file of the user's own."""
        ours = os.path.realpath(os.path.join(self.folder, "..", ".."))  # noqa: PTH118
        return path.startswith(ours + os.sep)

    def begin(self) -> None:
        self.pid, self.file, self.lines = os.getpid(), None, 0  # type: int, Any, int
        self.steps, self.saved_at = 0, -1
        self.optimizers: dict[int, int] = {}
        # The last ones: a program that skips what it has seen by reading it again fills the front.
        self.batches: deque[list[str]] = deque(maxlen=_MOST_BATCHES)
        self.ids: list[str] = []
        # After a torch.save into memory: the first half of it where it is to be struck, and the file that it went to.
        self.memory: bytes | None = None
        self.written: str | None = None
        self.behind = False  # it is written by a thread of its own, while training goes on
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


_witness: _Witness | None = None


def install() -> None:
    """Wait for torch: nothing is imported that the program does not import."""
    global _witness  # noqa: PLW0603 (a process has one)
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        _witness = _Witness(folder)
        _quietly(_disk.prepare, _witness.strike, folder)
        sys.meta_path.insert(0, _AfterImport())
        sys.addaudithook(_on_audit)
        atexit.register(_quietly, _on_end)
        for name, after in _AFTER.items():
            if name in sys.modules:  # by a .pth file, or a sitecustomize before ours
                _quietly(after, sys.modules[name])


def sample(ids: Any) -> None:
    """Note which samples the next optimizer step is made of."""
    witness = _here()
    if witness is not None:
        _quietly(lambda: witness.ids.extend(str(one)[:64] for one in list(ids)[:4096]))


def _here() -> _Witness | None:
    if _witness is not None and _witness.pid != os.getpid():
        _witness.begin()
    return _witness


def _quietly(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except Exception:  # whatever it is, the program goes on without its line
        return None


class _AfterImport:
    """Calls one of ours when a module of torch has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        after = _AFTER.get(name)
        if after is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _quietly(_call_after, spec.loader, after)
                return spec
        return None


def _call_after(loader: Any, after: Callable[[Any], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        _quietly(after, module)

    loader.exec_module = exec_module


def _watch_optimizers(module: Any) -> None:
    module.register_optimizer_step_pre_hook(_on_step)


def _watch_states(module: Any) -> None:
    module._init_optim_state = _digests.unseen(module._init_optim_state)


def _watch_modules(module: Any) -> None:
    module.register_module_buffer_registration_hook(_on_buffer)  # torch 2.0 and later
    if _witness is not None:
        _witness.modules = {}


def _watch_loaders(module: Any) -> None:
    # The iterator's own method, not a wrapper around the iterator: programs look at its attributes.
    kind = module._BaseDataLoaderIter
    following = kind.__next__

    @functools.wraps(following)
    def __next__(self: Any) -> Any:  # noqa: N807
        data = following(self)
        _quietly(_on_batch, self, data)
        return data

    kind.__next__ = __next__


def _watch_saves(module: Any) -> None:
    save = module.save

    @functools.wraps(save)
    def save_and_note(obj: Any, f: Any, *args: Any, **options: Any) -> Any:
        return _call_save(save, f, obj, f, *args, **options)

    load = module.load

    @functools.wraps(load)
    def load_and_note(f: Any, *args: Any, **options: Any) -> Any:
        _quietly(_on_load, f)
        return load(f, *args, **options)

    for name, old, new in (("save", save, save_and_note), ("load", load, load_and_note)):
        setattr(module, name, new)
        torch = sys.modules.get("torch")
        if getattr(torch, name, None) is old:  # it was imported before us
            setattr(torch, name, new)


def _watch_safetensors(module: Any) -> None:
    save_file = module.save_file

    @functools.wraps(save_file)
    def save_and_note(tensors: Any, filename: Any, *args: Any, **options: Any) -> Any:
        return _call_save(save_file, filename, tensors, filename, *args, **options)

    module.save_file = save_and_note


_AFTER: dict[str, Callable[[Any], None]] = {
    "torch.nn.modules.module": _watch_modules,
    "torch.optim.optimizer": _watch_optimizers,
    "torch.distributed.checkpoint.state_dict": _watch_states,
    "torch.utils.data.dataloader": _watch_loaders,
    "torch.serialization": _watch_saves,
    "safetensors.torch": _watch_safetensors,
}


def _on_step(optimizer: Any, _args: Any, _options: Any) -> None:
    _quietly(_note_step, optimizer)


def _note_step(optimizer: Any) -> None:
    import torch

    witness = _here()
    if witness is None or _digests.is_making() or torch.compiler.is_compiling():
        return
    number = witness.optimizers.setdefault(id(optimizer), len(witness.optimizers))
    if number >= _OPTIMIZERS:
        return
    first = number == 0
    rank, world = _rank()
    if first and witness.written is not None:  # by now it is whole, unless a thread of its own writes it
        _note_save(witness, witness.written, rank)
    if first and not witness.steps:
        witness.write({"k": "versions", "versions": _digests.versions()})
    witness.steps += first
    parameters = _digests.spread([p for group in optimizer.param_groups for p in group["params"]], _TENSORS)
    state = [_digests.state(optimizer.state[p]) for p in _digests.spread(parameters, _STATES) if optimizer.state.get(p)]
    line = {
        "k": "step",
        "n": witness.steps,
        "o": number,
        "r": rank,
        "w": world,
        "t": time.time(),
        "lr": [float(group.get("lr", 0.0)) for group in optimizer.param_groups][:64],
        "p": _digests.digest(parameters, _ELEMENTS),
        "s": _digests.digest([tensor for some in state for tensor in some], _ELEMENTS) if state else "empty",
        "g": _digests.random_states(torch),
        "b": list(witness.batches),
    }
    if witness.modules is not None:
        buffers = _digests.spread(_digests.buffers(witness.modules, optimizer), _TENSORS)
        line["u"] = _digests.digest(buffers, _ELEMENTS) if buffers else ""
    if witness.ids:
        line["ids"] = hashlib.blake2b(json.dumps(witness.ids).encode(), digest_size=8).hexdigest()
    witness.write(line)
    witness.batches.clear()
    witness.ids = []
    if first and witness.look is not None and witness.steps >= witness.look:
        os.kill(os.getpid(), signal.SIGKILL)  # what was to be seen has been seen, and the run must not end by it
    if first and _is_due(witness, "step"):
        _strike(witness)


def _on_buffer(module: Any, _name: str, _buffer: Any) -> None:
    _quietly(_note_module, module)


def _note_module(module: Any) -> None:
    modules = None if _witness is None else _witness.modules
    if modules is not None and (id(module) not in modules or modules[id(module)]() is not module):
        modules.pop(id(module), None)  # of one that is gone: the order must be that of this registration
        modules[id(module)] = weakref.ref(module)


def _on_batch(iterator: Any, data: Any) -> None:
    import torch

    witness = _here()
    # Evaluation reads batches too, and its place between the steps is not the same after a resume.
    if witness is None or not torch.is_grad_enabled():
        return
    dataset: Any = getattr(iterator, "_dataset", None)
    size = len(dataset) if hasattr(dataset, "__len__") else 0
    leaves: list[Any] = []
    _digests.flatten(data, leaves, 0)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    words = [repr(leaf)[:64] for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    digest = _digests.digest(tensors[:_BATCH_TENSORS], _BATCH_ELEMENTS, more=json.dumps(words[:64]).encode())
    witness.batches.append([f"{type(dataset).__name__}:{size}", digest])


def _call_save(save: Callable[..., Any], place: Any, *args: Any, **options: Any) -> Any:
    _quietly(_before_save, place)
    try:
        result = save(*args, **options)
    except BaseException as error:
        _quietly(_on_refused, error)
        raise
    _quietly(_on_save, place)
    return result


def _before_save(place: Any) -> None:
    witness = _here()
    name = _disk.name_of(place)
    if witness is not None and name is not None:
        path = os.path.realpath(name)
        _end_outside(witness, path)
        _disk.wrote(path)


def _on_refused(error: BaseException) -> None:
    witness = _here()
    if witness is not None:
        words = f"{type(error).__name__}: {error}"[:200]
        witness.write({"k": "refused", "n": witness.steps, "r": _rank()[0], "t": time.time(), "words": words})


def _end_outside(witness: _Witness, path: str) -> None:
    """End the program before it saves over a file of the user's own: drilled, it is killed there and damaged."""
    harmless = ("/tmp/", "/var/tmp/", "/dev/", os.path.expanduser("~/.cache/"))  # noqa: PTH111, S108
    if not witness.holds(path) and not path.startswith(harmless):
        witness.write({"k": "outside", "n": witness.steps, "r": _rank()[0], "t": time.time(), "path": path})
        os.kill(os.getpid(), signal.SIGKILL)


def _on_save(place: Any) -> None:
    witness = _here()
    if witness is None:
        return
    name = _disk.name_of(place, witness.holds)
    if name is None:  # into memory: to be sent, or to be written next
        raw = getattr(place, "getbuffer", bytes)()
        witness.memory = bytes(raw[: len(raw) // 2]) if _is_due(witness, "save") else b""
        witness.behind = _disk.is_in_a_thread()
        return
    path = os.path.realpath(name)
    witness.memory = witness.written = None
    if _is_due(witness, "save") and witness.holds(path):
        # What a kill in the middle of writing leaves: a part of the file.
        for file in (place, getattr(place, "raw", None)):
            _quietly(lambda of=file: of.flush())
        _quietly(lambda: os.truncate(path, os.path.getsize(path) // 2))  # noqa: PTH202
        _strike(witness, path=path)
    witness.behind = _disk.is_in_a_thread()
    _note_save(witness, path, _rank()[0])


def _on_load(place: Any) -> None:
    witness = _here()
    name = _disk.name_of(place)
    if witness is None or witness.steps or name is None:
        return
    path = os.path.realpath(name)
    witness.write({"k": "load", "n": 0, "r": _rank()[0], "t": time.time(), "path": path})


def _note_save(witness: _Witness, path: str, rank: int) -> None:
    witness.memory = witness.written = None
    if witness.saved_at != witness.steps:  # one line a step, however many files
        witness.saved_at = witness.steps
        now = time.time()
        line = {"k": "save", "n": witness.steps, "r": rank, "t": now, "path": path, "behind": witness.behind}
        witness.write(line)


def _on_audit(event: str, arguments: Any) -> None:
    # Called for all that Python does: nothing but comparisons unless something was saved into memory just now, or a
    # power cut is to come.
    witness = _witness
    if _disk.is_heard():
        _quietly(_disk.hear, event, arguments)
    if witness is None or (witness.memory is None and witness.written is None):
        return
    if event == "open" and witness.memory is not None:
        _quietly(_on_open, witness, arguments[0], arguments[2])
    elif event in ("os.rename", "shutil.move") and witness.written is not None:
        _quietly(_on_rename, witness, arguments[0], arguments[1])


def _on_end() -> None:
    """The last save of a run: no step follows that would tell that it is whole. After an error it may be half."""
    failed = hasattr(sys, "last_type")
    if _witness is not None and _witness.pid == os.getpid() and _witness.written is not None and not failed:
        _note_save(_witness, _witness.written, _rank()[0])


def _on_open(witness: _Witness, place: Any, flags: int) -> None:
    if witness.pid != os.getpid() or not isinstance(place, (str, os.PathLike)):
        return
    path = os.path.realpath(os.fspath(place))
    if not flags & (os.O_WRONLY | os.O_RDWR) or path.startswith("/dev/") or path.endswith(_NOT_WEIGHTS):
        return
    _end_outside(witness, path)
    half, witness.memory, witness.written = witness.memory, None, path
    if half and _is_due(witness, "save"):
        if witness.holds(path):  # not a temporary file that is moved to its place when it is whole, as Lightning's
            with open(path, "wb") as file:  # noqa: PTH123
                file.write(half)
        _strike(witness, path=path)


def _on_rename(witness: _Witness, source: Any, target: Any) -> None:
    if os.path.realpath(os.fspath(source)) == witness.written:
        witness.written = os.path.realpath(os.fspath(target))


def _is_due(witness: _Witness, when: str) -> bool:
    strike = witness.strike
    return (
        strike is not None
        and strike["when"] == when
        and witness.steps >= strike["after"]
        and strike.get("rank") in (None, _rank()[0])
    )


def _strike(witness: _Witness, path: str = "") -> None:
    strike, rank = witness.strike, _rank()[0]
    if strike is None:
        return
    mark = os.path.join(witness.folder, f"struck-{rank}")  # noqa: PTH118
    try:
        # Once in an attempt: a launcher may start the rank again, and the run must get past this place.
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    witness.write({"k": "struck", "n": witness.steps, "r": rank, "t": time.time(), "path": path})
    if strike["do"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    witness.strike = None
    if strike["do"] in ("full", "readonly"):
        witness.look = int(strike["until"])
    if strike["do"] == "full":
        _disk.fill(int(strike["room"]))
        return
    end = time.monotonic() + _HOLD_S
    while time.monotonic() < end and not os.path.exists(os.path.join(witness.folder, "go")):  # noqa: PTH110, PTH118
        time.sleep(0.02)
