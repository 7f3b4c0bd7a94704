"""A collection kept up to date by one list and one watch, whatever the number of jobs in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from trainmaster.core.backoff import backoff_s
from trainmaster.core.errors import TrainmasterError, Unreachable
from trainmaster.targets.kubernetes.client import Client, Object
from trainmaster.targets.kubernetes.errors import Expired

_STALE_S = 30.0  # without contact for so long, what is known counts as unknown
_FIRST_S = 20.0
_BRIEF_S = 1.0  # a watch that ends sooner is not asked for again at once
_RELIST = 2  # failures in a row after which the collection is listed again


class Watch:
    """Objects of one collection by name, and by the value of a label. Starts with its first use, ends with `close`."""

    def __init__(self, client: Client, path: str, *, trim: Callable[[Object], Any], label: str, **params: str) -> None:
        self._client, self._path, self._params, self._trim, self._label = client, path, params, trim, label
        self.objects: dict[str, Any] = {}
        self._marked: dict[str, dict[str, Any]] = {}  # by the label's value: a poll looks at its own pods only
        self.lists = self.changes = 0  # for tests and benchmarks: what it cost
        self._version = ""
        self._heard = 0.0
        self._fault: TrainmasterError | None = None
        self._listed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Return once the collection is known and fresh; Unreachable, or the refusal, where it is not."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"watch {self._path}")
        if not self._listed.is_set():
            try:
                async with asyncio.timeout(_FIRST_S):
                    await self._listed.wait()
            except TimeoutError:
                raise self._fault or Unreachable(f"kubernetes: no list within {_FIRST_S:g} s") from None
        if self._fault is not None and (not self._heard or time.monotonic() - self._heard > _STALE_S):
            raise self._fault

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        failures = 0
        while True:
            begin = time.monotonic()
            try:
                if not self._version:
                    await self._list()
                async for change in self._client.watch(self._path, self._version, **self._params):
                    self._apply(change)
                    failures = 0
                self._touch()
                failures = 0 if time.monotonic() - begin > _BRIEF_S else failures + 1
            except Expired:
                self._version = ""  # the server forgot this point of the history
                failures += 1
            except TrainmasterError as error:
                failures += 1
                self._fail(error, failures)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                failures += 1
                words = f"{type(error).__name__}: {error}"
                self._fail(Unreachable(f"kubernetes: an object that cannot be read: {words}"), failures)
            if failures:
                await asyncio.sleep(backoff_s(failures, first_s=0.2, longest_s=10.0))

    def _fail(self, error: TrainmasterError, failures: int) -> None:
        self._fault = error
        if not self._version:
            self._listed.set()  # those who wait get the refusal
        if failures >= _RELIST:
            self._version = ""

    async def _list(self) -> None:
        listed = await self._client.list(self._path, **self._params)
        self.lists += 1
        self.objects, self._marked = {}, {}
        for item in listed.get("items") or ():
            self._put(item)
        self._version = str(listed["metadata"]["resourceVersion"])
        self._touch()
        self._listed.set()

    def _apply(self, change: Object) -> None:
        item = change["object"]
        self._version = str(item["metadata"]["resourceVersion"])
        self._touch()
        if change["type"] == "BOOKMARK":
            return
        self.changes += 1
        self._drop(item["metadata"]["name"])
        if change["type"] != "DELETED":
            self._put(item)

    def _put(self, item: Object) -> None:
        name, kept = item["metadata"]["name"], self._trim(item)
        self.objects[name] = kept
        self._marked.setdefault(self._mark(kept), {})[name] = kept

    def _drop(self, name: str) -> None:
        if (kept := self.objects.pop(name, None)) is not None:
            marked = self._marked[self._mark(kept)]
            del marked[name]
            if not marked:
                del self._marked[self._mark(kept)]

    def _mark(self, kept: Any) -> str:
        return str((kept["metadata"].get("labels") or {}).get(self._label, ""))

    def marked(self, value: str) -> list[Any]:
        """Objects whose label has this value."""
        return list(self._marked.get(value, {}).values())

    def _touch(self) -> None:
        self._heard, self._fault = time.monotonic(), None
