"""`asyncio.timeout` of Python 3.11. Apart from the rest: to import asyncio takes time, and most programs need none."""

from __future__ import annotations

import asyncio
import sys

if sys.version_info >= (3, 11):  # noqa: UP036 (a node may have 3.10)
    from asyncio import timeout
else:

    class timeout:  # noqa: N801 (as asyncio names it)
        """`async with timeout(seconds)`: TimeoutError where the block takes longer."""

        def __init__(self, seconds: float | None) -> None:
            self._seconds, self._over = seconds, False

        async def __aenter__(self) -> None:
            self._task, loop = asyncio.current_task(), asyncio.get_running_loop()
            self._timer = None if self._seconds is None else loop.call_later(self._seconds, self._end)

        async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
            if self._timer is not None:
                self._timer.cancel()
            if self._over and kind is asyncio.CancelledError:
                raise TimeoutError

        def _end(self) -> None:
            self._over = True
            assert self._task is not None
            self._task.cancel()


__all__ = ["timeout"]
