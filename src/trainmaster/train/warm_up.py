"""Compile while a checkpoint is loaded: one forward and backward pass over weights that are half read.

Loading waits for disk and hashes, compiling for the interpreter, so that beside each other they take as long as the
longer one. The pass has the shapes of every later one, and nothing that it computes is kept: weights and moments are
those of the checkpoint, and every step draws its random numbers anew.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future

from trainmaster.core.config.train import TrainConfig
from trainmaster.models.decoder import Decoder
from trainmaster.train.compute import forward_backward
from trainmaster.train.feed import Feed
from trainmaster.train.parallel.blocks import compiles
from trainmaster.train.parallel.shard import World

_SWITCH_S = 0.001


class WarmUp:
    """The pass beside the first load of a process. Called on all ranks alike."""

    def __init__(self, config: TrainConfig, world: World, model: Decoder, feed: Feed) -> None:
        self._model, self._feed = model, feed
        self._wanted = compiles(config.parallel, world.device)
        self.beyond_s = 0.0  # how long it took after the load was over

    def __call__(self, loading: Future[None]) -> None:
        if not self._wanted or (batches := self._feed.example()) is None:
            return
        self._wanted = False
        loaded_at: list[float] = []
        loading.add_done_callback(lambda _: loaded_at.append(time.perf_counter()))
        with _shared_interpreter():
            forward_backward(self._model, batches)
        for weight in self._model.parameters():
            weight.grad = None
        self.beyond_s = time.perf_counter() - loaded_at[0] if loaded_at else 0.0


@contextlib.contextmanager
def _shared_interpreter() -> Iterator[None]:
    """Hand the interpreter on sooner: a thread that reads needs it for microseconds, and would wait 5 ms each time."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
