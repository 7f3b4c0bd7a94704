"""State beside the optimizer's: the scale of a GradScaler, the weights of an AveragedModel.

Beside the witness in a stranger's program, and under the same rules.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from typing import Any

_digests: Any = importlib.import_module("trainmaster_digests")
_process: Any = importlib.import_module("trainmaster_process")
_TENSORS, _ELEMENTS = 64, 8  # as of the weights
_stepping: list[Any] = []  # GradScalers whose step is under way


def watch_scalers(kind: Any) -> None:
    """The scaler of a step is the one that is stepping: an optimizer's first line has it too, and each has its own."""
    if "step" not in vars(kind):  # torch.cuda.amp has one that inherits from the other
        return
    step = kind.step

    @functools.wraps(step)
    def step_under_watch(self: Any, *args: Any, **options: Any) -> Any:
        _stepping.append(self)
        try:
            return step(self, *args, **options)
        finally:
            _stepping.pop()

    kind.step = step_under_watch


def watch_averages(kind: Any) -> None:
    """One that is loaded whole by torch.load is not made by `__init__`."""
    make, load = kind.__init__, kind.__setstate__

    @functools.wraps(make)
    def make_and_note(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        _process.quietly(_note, self)

    @functools.wraps(load)
    def load_and_note(self: Any, state: Any) -> None:
        load(self, state)
        _process.quietly(_note, self)

    kind.__init__, kind.__setstate__ = make_and_note, load_and_note


def _note(one: Any) -> None:
    witness = _process.here()
    if witness is not None and all(other() is not one for other in witness.averages):
        witness.averages = [other for other in witness.averages if other() is not None] + [weakref.ref(one)]


def read_scales() -> list[list[float]]:
    """Of the GradScaler that makes this step its scale, and its steps since an infinite gradient."""
    return [[float(one.get_scale()), float(one._get_growth_tracker())] for one in _stepping[-1:] if one.is_enabled()]


def read_averages(witness: Any) -> list[list[Any]]:
    """Of each AveragedModel how many were averaged, and a digest of what is averaged.

    Of one that has averaged none yet, nothing: its first update overwrites what it holds.
    """
    found = []
    for one in [reference() for reference in witness.averages]:
        many = 0 if one is None else int(one.n_averaged)
        if many:
            kept = [*one.parameters(), *(one.module.buffers() if getattr(one, "use_buffers", False) else ())]
            found.append([many, _digests.digest(_digests.spread(kept, _TENSORS), _ELEMENTS)])
    return found
