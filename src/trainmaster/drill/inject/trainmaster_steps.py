"""A line for each optimizer step, and the batches and buffers that it is made of.

Beside the witness in a stranger's program, and under the same rules.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainmaster.drill.inject.trainmaster_process import Witness

_beside: Any = importlib.import_module("trainmaster_beside")
_digests: Any = importlib.import_module("trainmaster_digests")
_process: Any = importlib.import_module("trainmaster_process")
_saves: Any = importlib.import_module("trainmaster_saves")
_strike: Any = importlib.import_module("trainmaster_strike")
_here: Callable[[], Witness | None] = _process.here
_quietly: Callable[..., Any] = _process.quietly
_TENSORS, _ELEMENTS = 64, 8  # what a digest of the weights is taken from
_STATES = 24  # parameters whose optimizer state is looked at: two or three tensors each
_BATCH_TENSORS, _BATCH_ELEMENTS = 16, 64
_SAMPLES = 128  # of one step, of which each is told


def on_step(optimizer: Any, _args: Any, _options: Any) -> None:
    _quietly(note_step, optimizer)


def note_step(optimizer: Any) -> None:
    import torch

    witness = _here()
    if witness is None or _digests.is_making() or _is_compiling(torch) or _is_capturing(torch):
        return
    first = witness.turns.take(optimizer)
    number = witness.turns.number(optimizer)
    if not witness.turns.is_looked_at(number):
        return
    rank, world = _digests.rank()
    if witness.written is not None:  # by now it is whole, unless a thread of its own writes it
        _saves.note_save(witness, witness.written, rank)
    if first and not witness.steps:
        witness.write({"k": "versions", "versions": _digests.versions()})
    witness.steps += first
    witness.looked += 1
    groups = _digests.choose([group["params"] for group in optimizer.param_groups], _TENSORS)
    parameters = [parameter for group in groups for parameter in group]
    weights, each = _digests.digest_groups(groups, _ELEMENTS)
    state = [_digests.state(optimizer.state[p]) for p in _digests.spread(parameters, _STATES) if optimizer.state.get(p)]
    own = _digests.digest_states(state, _ELEMENTS)
    line = {
        "k": "step",
        "n": witness.steps,
        "i": witness.looked,
        "o": number,
        "r": rank,
        "w": world,
        "t": time.time(),
        "lr": [float(group.get("lr", 0.0)) for group in optimizer.param_groups][:64],
        "p": weights,
        "q": each,
        "s": own[0] if state else "empty",
        "x": own[1],
        "g": _digests.random_states(torch),
        "b": list(witness.batches),
    }
    settings = _quietly(lambda: [_digests.settings(group) for group in optimizer.param_groups[:64]])
    if (
        settings is not None and witness.settings.get(number) != settings
    ):  # a line has them where they are others than before
        line["h"] = witness.settings[number] = settings
    if witness.modules is not None:
        buffers = _digests.spread(_digests.buffers(witness.modules, optimizer), _TENSORS)
        line["u"] = _digests.digest(buffers, _ELEMENTS) if buffers else ""
    scales = _quietly(_beside.read_scales)
    if scales:
        line["z"] = scales
    averages = _quietly(_beside.read_averages, witness)
    if averages:
        line["a"] = averages
    if witness.ids:
        line["ids"] = hashlib.blake2b(json.dumps(witness.ids).encode(), digest_size=8).hexdigest()
        if len(witness.ids) <= _SAMPLES:
            line["samples"] = [hashlib.blake2b(one.encode(), digest_size=6).hexdigest() for one in witness.ids]
    witness.write(line)
    witness.batches.clear()
    witness.ids = []
    if first and witness.look is not None and witness.steps >= witness.look:
        os.kill(os.getpid(), signal.SIGKILL)  # what was to be seen has been seen, and the run must not end by it
    if first and _strike.is_due(witness, "step"):
        _strike.strike(witness)


def _is_compiling(torch: Any) -> bool:
    """Whether a graph is being made of this call. torch 2.0 has no word for it."""
    ask = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    return ask is not None and bool(ask())


def _is_capturing(torch: Any) -> bool:
    """Whether a CUDA graph is being made of this step: nothing can be copied off the device then."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def on_buffer(module: Any, _name: str, _buffer: Any) -> None:
    _quietly(_note_module, module)


def _note_module(module: Any) -> None:
    modules = None if _process.witness is None else _process.witness.modules
    if modules is not None and (id(module) not in modules or modules[id(module)]() is not module):
        modules.pop(id(module), None)  # of one that is gone: the order must be that of this registration
        modules[id(module)] = weakref.ref(module)


def on_batch(iterator: Any, data: Any) -> None:
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
    place = str(getattr(iterator, "_num_yielded", 0))  # of the batch in this pass through the data
    witness.batches.append([f"{type(dataset).__name__}:{size}", digest, place])
