"""A client that outlasts a short outage of the API server, for what no reconciler repeats: a test, a status.

Repeated are requests that change nothing when they are repeated: GET, and DELETE of an object by its UID. A POST is
not: who sends it looks first whether it was carried out. Logs are not either: the next look at the pods reads them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from trainmaster.core.backoff import backoff_s
from trainmaster.core.errors import TrainmasterError, Unreachable
from trainmaster.targets.kubernetes.client import Client, Object
from trainmaster.targets.kubernetes.kubeconfig import Access

PATIENCE_S = 60.0  # a control plane that is replaced is away for seconds
_FIRST_PATIENCE_S = 3.0  # of a server that has never answered: its address may be wrong
_FIRST_S, _LONGEST_S = 0.2, 5.0


class RetryingClient(Client):
    """Reads, and deletions by UID, are repeated after 429, 5xx and lost connections, for a bounded time."""

    def __init__(self, access: Access, *, patience_s: float = PATIENCE_S) -> None:
        super().__init__(access)
        self._patience_s, self._has_answered = patience_s, False

    async def get(self, path: str) -> Object:
        return await self._repeat(lambda: Client.get(self, path))

    async def list(self, path: str, **params: str) -> Object:
        return await self._repeat(lambda: Client.list(self, path, **params))

    async def delete_by_uid(self, path: str, uid: str) -> Object:
        return await self._repeat(lambda: Client.delete_by_uid(self, path, uid))

    async def _repeat(self, request: Callable[[], Awaitable[Object]]) -> Object:
        failures, until = 0, math.inf
        while True:
            try:
                answer = await request()
            except Unreachable:
                now, patience_s = time.monotonic(), self._patience_s if self._has_answered else _FIRST_PATIENCE_S
                until = min(until, now + patience_s)
                failures += 1
                rest_s = backoff_s(failures, first_s=_FIRST_S, longest_s=_LONGEST_S)
                if now + rest_s > until:
                    raise
                await asyncio.sleep(rest_s)
            except TrainmasterError:
                self._has_answered = True  # a refusal is an answer
                raise
            else:
                self._has_answered = True
                return answer
