"""Witness of a drill: one line for each optimizer step, saying what the process holds. And the strike, where it is due.

This file puts the hooks into torch and safetensors; trainmaster_steps.py and trainmaster_saves.py are called by them.

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
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

# Beside this file. Imported at once: the folder leaves sys.path when the witness has started.
_beside: Any = importlib.import_module("trainmaster_beside")
_digests: Any = importlib.import_module("trainmaster_digests")
_disk: Any = importlib.import_module("trainmaster_disk")
_process: Any = importlib.import_module("trainmaster_process")
_saves: Any = importlib.import_module("trainmaster_saves")
_steps: Any = importlib.import_module("trainmaster_steps")
_quietly: Callable[..., Any] = _process.quietly


def install() -> None:
    """Wait for torch: nothing is imported that the program does not import."""
    folder = os.environ.get(_process.FOLDER_VARIABLE)
    if folder:
        witness = _process.start(folder)
        _quietly(_disk.prepare, witness.strike, folder)
        sys.meta_path.insert(0, _AfterImport())
        sys.addaudithook(_saves.on_audit)
        atexit.register(_quietly, _saves.on_end)
        for name, after in _AFTER.items():
            if name in sys.modules:  # by a .pth file, or a sitecustomize before ours
                _quietly(after, sys.modules[name])


def sample(ids: Any) -> None:
    """Note which samples the next optimizer step is made of."""
    witness = _process.here()
    if witness is not None:
        _quietly(lambda: witness.ids.extend(str(one)[:64] for one in list(ids)[:4096]))


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
    module.register_optimizer_step_pre_hook(_steps.on_step)


def _watch_states(module: Any) -> None:
    module._init_optim_state = _digests.unseen(module._init_optim_state)


def _watch_modules(module: Any) -> None:
    module.register_module_buffer_registration_hook(_steps.on_buffer)  # torch 2.0 and later
    if _process.witness is not None:
        _process.witness.modules = {}


def _watch_scalers(module: Any) -> None:
    _beside.watch_scalers(module.GradScaler)


def _watch_averages(module: Any) -> None:
    _beside.watch_averages(module.AveragedModel)


def _watch_loaders(module: Any) -> None:
    # The iterator's own method, not a wrapper around the iterator: programs look at its attributes.
    kind = module._BaseDataLoaderIter
    following = kind.__next__

    @functools.wraps(following)
    def __next__(self: Any) -> Any:  # noqa: N807
        data = following(self)
        _quietly(_steps.on_batch, self, data)
        return data

    kind.__next__ = __next__


def _watch_saves(module: Any) -> None:
    save = module.save

    @functools.wraps(save)
    def save_and_note(obj: Any, f: Any, *args: Any, **options: Any) -> Any:
        return _saves.call_save(save, f, obj, f, *args, **options)

    load = module.load

    @functools.wraps(load)
    def load_and_note(f: Any, *args: Any, **options: Any) -> Any:
        _quietly(_saves.on_load, f)
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
        return _saves.call_save(save_file, filename, tensors, filename, *args, **options)

    module.save_file = save_and_note


_AFTER: dict[str, Callable[[Any], None]] = {
    "torch.nn.modules.module": _watch_modules,
    "torch.optim.optimizer": _watch_optimizers,
    "torch.optim.swa_utils": _watch_averages,
    "torch.amp.grad_scaler": _watch_scalers,
    "torch.cuda.amp.grad_scaler": _watch_scalers,  # torch 2.2 and before
    "torch.distributed.checkpoint.state_dict": _watch_states,
    "torch.utils.data.dataloader": _watch_loaders,
    "torch.serialization": _watch_saves,
    "safetensors.torch": _watch_safetensors,
}
