"""SIGTERM as Ctrl-C: what was started on other machines is ended first.

Without it the allocations of a Slurm cluster, and pods, would be held until their time limit. A further SIGTERM changes
nothing: `timeout` sends it to the process and to its group, and the second would end the clean-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

Made = TypeVar("Made")
_handlers: list[bool] = []  # one for each that is set, the outermost first, which is True once there was a signal


def run(work: Coroutine[Any, Any, Made], *, runner: asyncio.Runner | None = None) -> Made:
    """`asyncio.run`, or a run of that runner. Ctrl-C and SIGTERM cancel the work; both raise KeyboardInterrupt."""

    async def cancellable() -> Made:
        task = asyncio.current_task()
        assert task is not None
        with until_terminated(task):
            return await work

    try:
        return asyncio.run(cancellable()) if runner is None else runner.run(cancellable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@contextlib.contextmanager
def until_terminated(task: asyncio.Task[Any] | None = None) -> Iterator[None]:
    """SIGTERM cancels the task, as Ctrl-C does; without a task it raises KeyboardInterrupt. Afterwards as before."""
    if threading.current_thread() is not threading.main_thread():  # only the main one may set a handler
        yield
        return
    loop = task.get_loop() if task is not None else None

    def end(_number: int, _frame: FrameType | None) -> None:
        if any(_handlers):
            return
        _handlers[0] = True
        if task is None or loop is None:
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(task.cancel)  # wakes the loop, too

    _handlers.append(False)
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _handlers.pop()
