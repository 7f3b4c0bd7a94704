"""SIGTERM and a closed terminal (SIGHUP) as Ctrl-C: what was started on other machines is ended first.

Without it the allocations of a Slurm cluster, and pods, would be held until their time limit. A further SIGTERM changes
nothing: `timeout` sends it to the process and to its group, and the second would end the clean-up. A second Ctrl-C only
says so; a third one ends the clean-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

log = logging.getLogger(__name__)
Made = TypeVar("Made")
_handlers: list[bool] = []  # one for each that is set, the outermost first, which is True once there was a signal


def run(work: Coroutine[Any, Any, Made], *, runner: asyncio.Runner | None = None) -> Made:
    """`asyncio.run`, or a run of that runner. Ctrl-C, SIGTERM and SIGHUP cancel the work, as KeyboardInterrupt."""

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
    loop, pressed = task.get_loop() if task is not None else None, 0

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += number == signal.SIGINT
        if any(_handlers):
            if number == signal.SIGINT:
                _press_again(pressed)
            return
        _handlers[0] = True
        if task is None or loop is None:
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(task.cancel)  # wakes the loop, too

    _handlers.append(False)
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the terminal may go
        numbers.append(signal.SIGHUP)
    if task is not None and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        numbers.append(signal.SIGINT)  # at a second one asyncio's own handler would end the clean-up
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _handlers.pop()


def _press_again(pressed: int) -> None:
    if pressed > 2:
        raise KeyboardInterrupt
    log.warning("ending what was started on other machines; Ctrl-C once more leaves it there")
