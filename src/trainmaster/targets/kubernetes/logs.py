"""Logs of pods become files of the attempt: followed while a pod runs, read to the end when it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from trainmaster.core.backoff import backoff_s
from trainmaster.core.errors import TrainmasterError, Unreachable
from trainmaster.remote.framed_lines import decode
from trainmaster.targets._spool import NodeSpool
from trainmaster.targets.kubernetes import names
from trainmaster.targets.kubernetes.client import Client, path_of
from trainmaster.targets.kubernetes.errors import Missing
from trainmaster.targets.kubernetes.states import container_state

log = logging.getLogger(__name__)
_DRAIN_S = 60.0
_ASK_S = 2.0
_OLDER_S = 30.0  # that the log of a new pod waits for the end of the one before it: the grace of a pod by default
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)")


class PodLog:
    """The log of one container, from its first line on."""

    def __init__(self, client: Client, namespace: str, pod: Mapping[str, Any], spool: NodeSpool) -> None:
        self._client, self._spool = client, spool
        self.name, self._restart = str(pod["metadata"]["name"]), container_state(pod)[1]
        self.start = start_of(pod)
        self._container = str(pod["spec"]["container"])
        self._path = path_of("v1", "pods", namespace=namespace, name=self.name)
        self._since = ""
        self._heard: dict[str, str] = {}  # stream → when its last whole line was written
        self._asked, self._next_ask = "", 0.0
        self._task: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()  # a log that was followed came to its end

    def follow(self, *, after: PodLog | None = None) -> None:
        """Copy lines as they come, in the background.

        `after` is that of the pod before it on its node. Its last lines are copied first, for a while: what it writes
        when this one has begun would stand in the middle of what is kept, and is dropped.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._follow(after), name=f"log {self.name}")

    async def drain(self, *, previous: bool = False) -> bool:
        """Copy everything up to the end, or as much as is still there; False where it cannot be read now."""
        await self.close()
        try:
            async with asyncio.timeout(_DRAIN_S):
                await self._copy({"previous": "true"} if previous else {})
        except (Unreachable, TimeoutError) as error:
            log.debug("log of pod %s: %s", self.name, error)
            return False
        except TrainmasterError as error:
            log.debug("log of pod %s: %s", self.name, error)
        return True

    async def hear(self, stream: str) -> bool:
        """Copy everything up to now; False where it cannot be read now, or no whole line of this stream is left in it.

        What is left ends now, so a stream whose lines are repeated is whole when one of them is there.
        """
        await self.close()
        known = self._heard.pop(stream, None)
        self._since = known or self._since
        is_whole = await self.drain() and stream in self._heard
        if known is not None:
            self._heard.setdefault(stream, known)
        return is_whole

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _follow(self, after: PodLog | None) -> None:
        if after is not None and not self._spool.has_begun(self.start):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(after._ended.wait(), _OLDER_S)
        failures = 0
        while True:
            try:
                await self._copy({"follow": "true"})
                self._ended.set()
                failures = 0
            except Missing:
                self._ended.set()
                return
            except TrainmasterError as error:
                failures += 1
                log.debug("log of pod %s: %s", self.name, error)
            await asyncio.sleep(backoff_s(failures + 1, first_s=0.2, longest_s=10.0))

    async def _copy(self, params: Mapping[str, str]) -> None:
        self._spool.begin(self.start)
        given = {"container": self._container, "timestamps": "true", **params}
        if self._since:
            given["sinceTime"] = self._since  # whole seconds: lines come again, and are known by their offset
        async for line in self._client.lines(f"{self._path}/log", given):
            stamp, _, text = line.partition(b" ")
            if (frame := decode(text)) is None:
                continue
            is_whole = self._spool.put(self.start, frame)
            if not is_whole:
                await self._request_resend()
            if match := _STAMP.fullmatch(stamp):
                self._since = (match[1] + match[2]).decode()
                if is_whole and frame.data.endswith(b"\n"):
                    self._heard[frame.stream] = self._since

    async def _request_resend(self) -> None:
        """Ask the agent for lines that were lost: the log was rotated before it was read."""
        wanted = "\n".join(f"{stream} {offset}" for stream, offset in sorted(self._spool.gaps().items()))
        if wanted == self._asked or time.monotonic() < self._next_ask:
            return
        self._asked, self._next_ask = wanted, time.monotonic() + _ASK_S
        with contextlib.suppress(TrainmasterError):
            await self._client.merge(self._path, {"metadata": {"annotations": {names.RESEND_ANNOTATION: wanted}}})


def start_of(pod: Mapping[str, Any]) -> str:
    """Identity of one start of a container: its pod, and how often it was restarted."""
    return f"{pod['metadata']['uid']}/{container_state(pod)[1]}"


class LogReader:
    """The log of one pod, read in steps: each line once."""

    def __init__(self, client: Client, namespace: str, pod: Mapping[str, Any]) -> None:
        self._client = client
        self.pod = str(pod["metadata"]["name"])
        self._path = path_of("v1", "pods", namespace=namespace, name=self.pod) + "/log"
        self._container = str(pod["spec"]["containers"][0]["name"])
        self._last = b""  # stamp of the newest line
        self._same: list[bytes] = []  # lines with that stamp

    async def read(self, *, tail: int | None = None) -> AsyncIterator[bytes]:
        """New lines, each with the time that the cluster put before it."""
        given = {"container": self._container, "timestamps": "true"}
        if tail is not None:
            given["tailLines"] = str(tail)
        if self._last:
            given["sinceTime"] = _whole_second(self._last)
        async for line in self._client.lines(self._path, given):
            stamp = line.partition(b" ")[0]
            if stamp < self._last or (stamp == self._last and line in self._same):
                continue
            self._same = [*self._same, line] if stamp == self._last else [line]
            self._last = stamp
            yield line


def _whole_second(stamp: bytes) -> str:
    """A stamp for `sinceTime`, which has no fractions."""
    text = stamp.decode()
    return text if "." not in text else f"{text.partition('.')[0]}{'Z' if text.endswith('Z') else text[-6:]}"
