"""One training step: forward, backward, gradients summed in buckets while the backward pass runs, optimizer.

On a GPU the model is compiled and the whole step is one CUDA graph: at a batch of 64 a modern GPU waits for Python
otherwise, and the measurement would be of the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainmaster.bench.accept.options import Options
from trainmaster.bench.accept.workload import Batch, loss_of

_GRAPH_WARMUP = 11  # steps before a capture: lazy initialisation and autotuning must be over


class Buckets:
    """Gradients of all parameters. Those of one bucket are averaged over the ranks once the last of them is there.

    The backward pass makes new gradients, which are copied into flat buffers for the exchange. Without an exchange
    nothing is copied: adding into buffers that were cleared before costs four times the traffic of a copy.
    """

    def __init__(self, model: nn.Module, *, bucket_bytes: float, world: int) -> None:
        self.sync = world > 1
        self.last = True  # whether this is the last batch of its step
        self._world = world
        self._parameters = list(model.parameters())
        self._average = dist.ReduceOp.AVG if self._parameters[0].is_cuda else None  # gloo has no average
        self._works: list[Any] = []
        self._members: list[Sequence[nn.Parameter]] = []
        self._buffers: list[Tensor] = []
        self._views: list[list[Tensor]] = []
        self._left: list[int] = []
        for members in _cut(self._parameters[::-1], bucket_bytes) if world > 1 else ():
            self._add(members)

    def begin(self) -> None:
        """Drop the gradients of the last step."""
        for parameter in self._parameters:
            parameter.grad = None
        self._left = [len(members) for members in self._members]

    def wait(self) -> None:
        """Return once every average is there."""
        for work in self._works:
            work.wait()
        if self._works and self._average is None:
            torch._foreach_div_(self._buffers, float(self._world))
        self._works = []

    def _add(self, members: Sequence[nn.Parameter]) -> None:
        number, first = len(self._buffers), members[0]
        buffer = torch.zeros(sum(parameter.numel() for parameter in members), dtype=first.dtype, device=first.device)
        views, offset = [], 0
        for parameter in members:
            views.append(buffer[offset : offset + parameter.numel()].as_strided(parameter.size(), parameter.stride()))
            offset += parameter.numel()
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, number=number: self._arrived(number)
            )
        self._buffers.append(buffer)
        self._members.append(members)
        self._views.append(views)

    def _arrived(self, number: int) -> None:
        if not (self.sync and self.last):
            return
        self._left[number] -= 1
        if self._left[number] == 0:
            self._exchange(number)

    @torch.no_grad()
    def _exchange(self, number: int) -> None:
        members, views = self._members[number], self._views[number]
        torch._foreach_copy_(views, [parameter.grad for parameter in members if parameter.grad is not None])
        for parameter, view in zip(members, views, strict=True):
            parameter.grad = view
        op = self._average or dist.ReduceOp.SUM
        self._works.append(dist.all_reduce(self._buffers[number], op=op, async_op=True))


class Step:
    """The step of one rank. `run` does one; the loss of the last is in `loss`."""

    def __init__(self, model: nn.Module, batch: Batch, options: Options, *, world: int, precision: str) -> None:
        self.model, self.batch, self.options = model, batch, options
        self._parts = batch.parts(options.accumulate)
        self._autocast = precision == "bf16"
        self.buckets = Buckets(model, bucket_bytes=options.bucket_mb * 1e6, world=world)
        device = batch.inputs.device
        self.device = device
        self._optimizer = torch.optim.SGD(
            model.parameters(), lr=options.learning_rate, momentum=0.9, fused=device.type == "cuda"
        )
        self.loss = torch.zeros((), device=device)
        self._forward: nn.Module = model
        self._graphs: dict[bool, Any] = {}
        self.notes: list[str] = []
        self.compiled = self.graphed = False

    def prepare(self) -> None:
        """Compile and capture where that is asked for or helps; what cannot be had is a note."""
        cuda = self.device.type == "cuda"
        if self.options.compile == "on" or (self.options.compile == "auto" and cuda):
            self._try("compile", self._compile, forced=self.options.compile == "on")
        if cuda and self.options.graph != "off":
            self._try("graph", self._capture, forced=self.options.graph == "on")

    def run(self) -> None:
        """One step, or its replay."""
        graph = self._graphs.get(self.buckets.sync)
        if graph is not None:
            graph.replay()
        else:
            self._eager()

    def take(self, batch: Batch) -> None:
        """Use this batch from the next step on. Copied: a CUDA graph reads from the addresses that it was made with."""
        self.batch.inputs.copy_(batch.inputs, non_blocking=True)
        self.batch.labels.copy_(batch.labels, non_blocking=True)

    def _eager(self) -> None:
        self.buckets.begin()
        total: Tensor = self.loss.new_zeros(())
        for number, batch in enumerate(self._parts, start=1):
            self.buckets.last = number == len(self._parts)
            loss = loss_of(self._forward, batch, autocast=self._autocast)
            loss = loss / len(self._parts) if len(self._parts) > 1 else loss
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        self.buckets.wait()
        self._optimizer.step()
        self.loss.copy_(total)

    def _compile(self) -> None:
        # Sizes of the fused kernels by trial: 2% of a step of ResNet-50, for a few more seconds of compiling.
        self._forward = torch.compile(self.model, options={"max_autotune_pointwise": True})  # type: ignore[assignment]
        self._eager()
        self.compiled = True

    def set_sync(self, sync: bool) -> None:
        """Sum gradients over the ranks from the next step on, or leave each rank its own."""
        self.buckets.sync = sync
        if self.graphed and sync not in self._graphs:
            self._capture()

    def _capture(self) -> None:
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_GRAPH_WARMUP):
                self._eager()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._eager()
        self._graphs[self.buckets.sync] = graph
        self.graphed = True

    def _try(self, name: str, act: Callable[[], None], *, forced: bool) -> None:
        try:
            act()
        except Exception as error:
            if forced:
                raise
            self.notes.append(f"{name}: {type(error).__name__}: {error}"[:300])
            self._forward = self.model if name == "compile" else self._forward
            self._graphs = {}


class Clock:
    """Times of steps: events on a GPU, which the device itself stamps, and the clock of the host otherwise."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between the marks, once the device is done."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._cuda:
            torch.cuda.synchronize()
            return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairs]
        return [later - earlier for earlier, later in pairs]


def _cut(parameters: Sequence[nn.Parameter], size: float) -> list[list[nn.Parameter]]:
    """Parameters in their order, in lists of about `size` bytes."""
    lists: list[list[nn.Parameter]] = [[]]
    held = 0
    for parameter in parameters:
        if lists[-1] and held + parameter.numel() * parameter.element_size() > size:
            lists.append([])
            held = 0
        lists[-1].append(parameter)
        held += parameter.numel() * parameter.element_size()
    return lists
