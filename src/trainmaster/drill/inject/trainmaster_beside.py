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


def watch_scalers(kind: Any) -> None:
    """A GradScaler is known from its first step on, before the optimizer does its own."""
    if "step" not in vars(kind):  # torch.cuda.amp has one that inherits from the other
        return
    step = kind.step

    @functools.wraps(step)
    def step_and_note(self: Any, *args: Any, **options: Any) -> Any:
        _process.quietly(_note, "scalers", self)
        return step(self, *args, **options)

    kind.step = step_and_note


def watch_averages(kind: Any) -> None:
    make = kind.__init__

    @functools.wraps(make)
    def make_and_note(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        _process.quietly(_note, "averages", self)

    kind.__init__ = make_and_note


def _note(name: str, one: Any) -> None:
    witness = _process.here()
    if witness is not None and all(other() is not one for other in witness.beside[name]):
        witness.beside[name] = [other for other in witness.beside[name] if other() is not None] + [weakref.ref(one)]


def read_scales(witness: Any) -> list[list[float]]:
    """Of each GradScaler its scale, and its steps since an infinite gradient."""
    scalers = [one for one in (reference() for reference in witness.beside["scalers"]) if one is not None]
    return [[float(one.get_scale()), float(one._get_growth_tracker())] for one in scalers if one.is_enabled()]


def read_averages(witness: Any) -> list[list[Any]]:
    """Of each AveragedModel how many were averaged, and a digest of the weights."""
    models = [one for one in (reference() for reference in witness.beside["averages"]) if one is not None]
    return [
        [int(one.n_averaged), _digests.digest(_digests.spread(list(one.parameters()), _TENSORS), _ELEMENTS)]
        for one in models
    ]
