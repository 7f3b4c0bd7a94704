"""What a checkpoint holds of a run, found once and kept.

Naming every weight and moment takes the interpreter some 20 ms for a model of 1B, while the GPU has nothing to do. They
are the same objects from save to save, until a rollback fills the optimizer anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

from trainmaster.train.checkpoint.layout import Layout, pickled

_SETTINGS = ("optimizer", "param_groups")  # where they are in the tree; they change between saves, and hold no tensor
_NAMES = "params"  # of the weights of a group: the only one that is not the optimizer's own


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    sources: Sequence[tuple[Tensor, int]]  # every tensor of the run, and where its memory is
    tensors: Sequence[Tensor]
    things: Sequence[bytes]


class Contents:
    """This rank's tensors, and on rank 0 the other things, as they are now."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, group: dist.ProcessGroup, files: int
    ) -> None:
        self._model, self._optimizer, self._group, self._files = model, optimizer, group, files
        self._layout: Layout | None = None
        self._found: _Found | None = None

    def read(self) -> tuple[Layout, Sequence[Tensor], Sequence[bytes]]:
        """The first call agrees with the other ranks on the layout."""
        sources = self._list_sources()
        found = self._found
        if self._layout is not None and found is not None and _same(sources, found.sources):
            things = [self._refresh(path, old) for path, old in zip(self._layout.paths, found.things, strict=True)]
            return self._layout, found.tensors, things
        weights, moments = get_state_dict(self._model, self._optimizer)
        tree = {"model": weights, "optimizer": moments}
        if self._layout is None:
            self._layout = Layout(tree, group=self._group, files=self._files)
        tensors, things = self._layout.pick(tree)
        # Listed again: the first look at an optimizer makes its state.
        self._found = _Found(sources=self._list_sources(), tensors=tensors, things=things)
        return self._layout, tensors, things

    def forget(self) -> None:
        """Keep no tensor of the run: a rollback may replace them, and the GPU has no room for both."""
        self._found = None

    def _list_sources(self) -> list[tuple[Tensor, int]]:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        for state in self._optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return [(tensor, _address(tensor)) for tensor in tensors]

    def _refresh(self, path: Sequence[Any], old: bytes) -> bytes:
        """A thing as it is now; what is no setting of the optimizer does not change."""
        if tuple(path[:2]) != _SETTINGS or path[-1] == _NAMES:
            return old
        settings: Mapping[str, Any] = self._optimizer.param_groups[path[2]]
        return pickled(settings[path[3]])


def _address(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()


def _same(left: Sequence[tuple[Tensor, int]], right: Sequence[tuple[Tensor, int]]) -> bool:
    return len(left) == len(right) and all(
        one is other and here == there for (one, here), (other, there) in zip(left, right, strict=True)
    )
