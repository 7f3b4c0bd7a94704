"""Lines of CloudWatch Logs become files of the attempt; each byte once.

Each host writes one log stream, `NAME/algo-1-…`; a restarted host writes another. Lines of the agent carry their file
and offset, so that a line which is read twice changes nothing. With the toolkit of the image there is no agent: lines
are kept as the agent log, and a stream is read from its beginning again after a restart of the server.
"""

from __future__ import annotations

import re
from typing import Any

from trainmaster.core.errors import TargetError, Unreachable
from trainmaster.core.plan import AGENT_LOG
from trainmaster.remote.framed_lines import Frame, decode
from trainmaster.targets._spool import Spool
from trainmaster.targets.sagemaker.aws import Aws, Missing

GROUP = "/aws/sagemaker/TrainingJobs"
_HOST = re.compile(r"algo-([0-9]{1,5})-")
_MAX_PAGES = 1000  # of one stream in one copy: 1,000 MiB


class JobLogs:
    """Position in every log stream of one training job."""

    def __init__(self, name: str, spool: Spool, *, nodes: int, framed: bool) -> None:
        self._name, self._spool, self._nodes, self._framed = name, spool, nodes, framed
        self._tokens: dict[str, str] = {}
        self._sizes: dict[str, int] = {}  # bytes read of a stream without frames

    async def copy(self, aws: Aws) -> None:
        """Copy the lines that are new."""
        for stream in await self._list(aws):
            match = _HOST.match(stream.partition("/")[2])
            node = int(match[1]) - 1 if match else -1
            if 0 <= node < self._nodes:
                await self._copy_stream(aws, stream, node)

    def is_whole(self) -> bool:
        """Whether no bytes are missing between those that came."""
        return not any(self._spool.node(node).gaps() for node in range(self._nodes))

    def rewind(self) -> None:
        """Read every stream from its beginning at the next copy: a line may arrive behind later ones."""
        if self._framed:
            self._tokens.clear()

    def close(self) -> None:
        """Note bytes that will not come any more."""
        for node in range(self._nodes):
            self._spool.node(node).close_gaps()

    async def _list(self, aws: Aws) -> list[str]:
        """Log streams of the job, oldest first: a later one of a host continues its files."""
        streams: list[dict[str, Any]] = []
        given: dict[str, Any] = {"logGroupName": GROUP, "logStreamNamePrefix": f"{self._name}/"}
        while True:
            try:
                page = await aws.call("logs", "describe_log_streams", **given)
            except Missing:  # no job of the account has written yet
                return []
            streams += page.get("logStreams") or []
            if not page.get("nextToken"):
                break
            given["nextToken"] = page["nextToken"]
        streams.sort(key=lambda stream: (int(stream.get("creationTime") or 0), str(stream["logStreamName"])))
        return [str(stream["logStreamName"]) for stream in streams]

    async def _copy_stream(self, aws: Aws, stream: str, node: int) -> None:
        files = self._spool.node(node)
        files.begin(stream)
        for _ in range(_MAX_PAGES):
            given: dict[str, Any] = {"logGroupName": GROUP, "logStreamName": stream, "startFromHead": True}
            if stream in self._tokens:
                given["nextToken"] = self._tokens[stream]
            try:
                page = await aws.call("logs", "get_log_events", **given)
            except Missing:  # its retention time is over
                return
            except Unreachable:
                raise
            except TargetError:
                if self._tokens.pop(stream, None) is None:
                    raise
                self._sizes.pop(stream, None)  # a token ends after a day: next time from the beginning of the stream
                return
            for event in page.get("events") or ():
                if (frame := self._frame(stream, str(event.get("message") or ""))) is not None:
                    files.put(stream, frame)
            token = str(page.get("nextForwardToken") or "")
            if token == self._tokens.get(stream, ""):
                return  # the same token again is the end
            self._tokens[stream] = token

    def _frame(self, stream: str, message: str) -> Frame | None:
        text = message.removesuffix("\n")
        try:
            raw = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # half of a pair
            raw = text.encode("utf-8", "replace")
        if self._framed:
            return decode(raw)
        line = raw + b"\n"
        offset = self._sizes.get(stream, 0)
        self._sizes[stream] = offset + len(line)
        return Frame(stream=AGENT_LOG, offset=offset, data=line)
