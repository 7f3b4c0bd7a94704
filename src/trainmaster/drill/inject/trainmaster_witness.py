"""Witness of a drill: one line for each optimizer step, saying what the process holds. And the strike, where it is due.

It lives inside a stranger's program, under that program's Python (3.8 on) and torch, so it imports nothing of ours.
It hears of steps from torch's own hook for all optimizers, of batches from the DataLoader, of saves from torch.save.
Nothing here raises, draws a random number or changes a tensor; digests are of a sample of elements, copied off the
device at once.

TRAINMASTER_DRILL_WITNESS=FOLDER   each process that steps an optimizer writes FOLDER/PID.jsonl
TRAINMASTER_DRILL_STRIKE=JSON      {"when": "step" | "save", "after": steps, "rank": number or null, "do": "kill" |
                                   "hold", "look": steps}: SIGKILL to itself, or wait until the drill has struck from
                                   outside. A rank that its launcher starts again after a kill ends after `look` steps
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

FOLDER_VARIABLE = "TRAINMASTER_DRILL_WITNESS"
STRIKE_VARIABLE = "TRAINMASTER_DRILL_STRIKE"
_TENSORS, _ELEMENTS = 64, 8  # what a digest of the weights is taken from
_STATES = 24  # parameters whose optimizer state is looked at: two or three tensors each
_BATCH_TENSORS, _BATCH_ELEMENTS = 16, 64
_MOST_LINES = 20_000  # of one process: about 10 MB
_MOST_BATCHES = 256  # of one step
_OPTIMIZERS = 8
_HOLD_S = 60.0


class _Witness:
    """Of this process; after a fork the child starts a file of its own."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.begin()

    def begin(self) -> None:
        self.pid, self.file, self.lines = os.getpid(), None, 0  # type: int, Any, int
        self.steps, self.saved_at = 0, -1
        self.optimizers: dict[int, int] = {}
        # The last ones: a program that skips what it has seen by reading it again fills the front.
        self.batches: deque[list[str]] = deque(maxlen=_MOST_BATCHES)
        self.ids: list[str] = []
        strike = os.environ.get(STRIKE_VARIABLE)
        self.strike: dict[str, Any] | None = json.loads(strike) if strike else None
        struck = self.strike is not None and any(name.startswith("struck-") for name in os.listdir(self.folder))  # noqa: PTH208
        self.look = int(self.strike["look"]) if self.strike and struck and self.strike["do"] == "kill" else None

    def write(self, line: dict[str, Any]) -> None:
        if self.lines >= _MOST_LINES:
            return
        if self.file is None:
            # Unbuffered: SIGKILL must not take lines away.
            self.file = open(os.path.join(self.folder, f"{os.getpid()}.jsonl"), "ab", buffering=0)  # noqa: PTH118, PTH123, SIM115
        self.lines += 1
        self.file.write(json.dumps(line).encode() + b"\n")


_witness: _Witness | None = None


def install() -> None:
    """Wait for torch: nothing is imported that the program does not import."""
    global _witness  # noqa: PLW0603 (a process has one)
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        _witness = _Witness(folder)
        sys.meta_path.insert(0, _AfterImport())


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
        result = save(obj, f, *args, **options)
        _quietly(_on_save, f)
        return result

    module.save = save_and_note


_AFTER: dict[str, Callable[[Any], None]] = {
    "torch.optim.optimizer": _watch_optimizers,
    "torch.utils.data.dataloader": _watch_loaders,
    "torch.serialization": _watch_saves,
}


def _on_step(optimizer: Any, _args: Any, _options: Any) -> None:
    _quietly(_note_step, optimizer)


def _note_step(optimizer: Any) -> None:
    import torch

    witness = _here()
    if witness is None or torch.compiler.is_compiling():
        return
    number = witness.optimizers.setdefault(id(optimizer), len(witness.optimizers))
    if number >= _OPTIMIZERS:
        return
    first = number == 0
    witness.steps += first
    rank, world = _rank()
    parameters = _spread([p for group in optimizer.param_groups for p in group["params"]], _TENSORS)
    state = [_state(optimizer.state[p]) for p in _spread(parameters, _STATES) if optimizer.state.get(p)]
    line = {
        "k": "step",
        "n": witness.steps,
        "o": number,
        "r": rank,
        "w": world,
        "t": time.time(),
        "lr": [float(group.get("lr", 0.0)) for group in optimizer.param_groups][:64],
        "p": _digest(parameters, _ELEMENTS),
        "s": _digest([tensor for some in state for tensor in some], _ELEMENTS) if state else "empty",
        "g": _random_states(torch),
        "b": list(witness.batches),
    }
    if witness.ids:
        line["ids"] = hashlib.blake2b(json.dumps(witness.ids).encode(), digest_size=8).hexdigest()
    witness.write(line)
    witness.batches.clear()
    witness.ids = []
    strike = witness.strike
    if first and witness.look is not None and witness.steps >= witness.look:
        os.kill(os.getpid(), signal.SIGKILL)  # what was to be seen has been seen, and the run must not end by it
    if first and strike and strike["when"] == "step" and witness.steps >= strike["after"]:
        _strike(witness, strike, rank)


def _on_batch(iterator: Any, data: Any) -> None:
    import torch

    witness = _here()
    # Evaluation reads batches too, and its place between the steps is not the same after a resume.
    if witness is None or not torch.is_grad_enabled():
        return
    dataset: Any = getattr(iterator, "_dataset", None)
    size = len(dataset) if hasattr(dataset, "__len__") else 0
    leaves: list[Any] = []
    _flatten(data, leaves, 0)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    words = [repr(leaf)[:64] for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    digest = _digest(tensors[:_BATCH_TENSORS], _BATCH_ELEMENTS, more=json.dumps(words[:64]).encode())
    witness.batches.append([f"{type(dataset).__name__}:{size}", digest])


def _on_save(place: Any) -> None:
    witness = _here()
    name = place if isinstance(place, (str, os.PathLike)) else getattr(place, "name", None)
    if witness is None or not isinstance(name, (str, os.PathLike)):
        return  # into memory: to be sent, not kept
    path = os.path.abspath(os.fspath(name))  # noqa: PTH100
    strike, (rank, _) = witness.strike, _rank()
    if strike and strike["when"] == "save" and witness.steps >= strike["after"]:
        # What a kill in the middle of writing leaves: a part of the file.
        if hasattr(place, "flush"):
            _quietly(place.flush)
        _quietly(lambda: os.truncate(path, os.path.getsize(path) // 2))  # noqa: PTH202
        _strike(witness, strike, rank, path=path)
    if witness.saved_at != witness.steps:  # one line a step, however many files
        witness.saved_at = witness.steps
        behind = threading.current_thread() is not threading.main_thread()
        line = {"k": "save", "n": witness.steps, "r": rank, "t": time.time(), "path": path, "behind": behind}
        witness.write(line)


def _strike(witness: _Witness, strike: dict[str, Any], rank: int, path: str = "") -> None:
    if strike.get("rank") not in (None, rank):
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
    end = time.monotonic() + _HOLD_S
    while time.monotonic() < end and not os.path.exists(os.path.join(witness.folder, "go")):  # noqa: PTH110, PTH118
        time.sleep(0.02)


def _rank() -> tuple[int, int]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _random_states(torch: Any) -> dict[str, str]:
    _, numbers, gauss = random.getstate()
    states = {"python": array("Q", numbers).tobytes() + repr(gauss).encode(), "torch": _bytes(torch.get_rng_state())}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kind, keys, *rest = numpy.get_state()
        states["numpy"] = repr((kind, rest)).encode() + keys.tobytes()
    if torch.cuda.is_initialized():
        states["cuda"] = _bytes(torch.cuda.get_rng_state())
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}


def _state(of_one: dict[str, Any]) -> list[Any]:
    return [of_one[name] for name in sorted(of_one, key=str)]


def _spread(items: list[Any], most: int) -> list[Any]:
    return items if len(items) <= most else [items[index * len(items) // most] for index in range(most)]


def _flatten(data: Any, leaves: list[Any], depth: int) -> None:
    if depth > 6 or len(leaves) > 256:
        return
    if isinstance(data, dict) or (hasattr(data, "keys") and hasattr(data, "values")):
        data = list(data.values())
    if isinstance(data, (list, tuple)):
        for item in data[:256]:
            _flatten(item, leaves, depth + 1)
    else:
        leaves.append(data)


def _digest(values: list[Any], elements: int, more: bytes = b"") -> str:
    """Digest of some elements of each tensor, gathered on its device and copied to the host at once."""
    import torch

    digest = hashlib.blake2b(more, digest_size=8)
    parts: dict[tuple[Any, Any], list[Any]] = {}
    with torch.no_grad():
        for value in values:
            if not isinstance(value, torch.Tensor):
                digest.update(repr(value)[:64].encode())
                continue
            tensor = getattr(value, "_local_tensor", value)  # this rank's shard of a DTensor
            if tensor.numel():
                parts.setdefault((tensor.device, tensor.dtype), []).append(_some(tensor, elements))
        for (_, dtype), some in parts.items():
            gathered = torch.cat(some).cpu()
            digest.update(str(dtype).encode())
            digest.update(_bytes(gathered.to(torch.uint8) if dtype is torch.bool else gathered.view(torch.uint8)))
    return digest.hexdigest()


def _bytes(tensor: Any) -> bytes:
    """Of a tensor of bytes on the host; torch may be there without numpy."""
    return bytes(tensor.numpy().tobytes() if "numpy" in sys.modules else tensor.tolist())


def _some(tensor: Any, most: int) -> Any:
    """Views of the tensor: nothing large is copied."""
    if tensor.is_contiguous():
        step = max(1, tensor.numel() // most)
        count = min(most, -(-tensor.numel() // step))
        return tensor.as_strided((count,), (step,), tensor.storage_offset())
    while tensor.dim() > 1:
        tensor = tensor[tensor.shape[0] // 2]
    return tensor.reshape(-1)[:most]
