"""The server as the receiver of a working folder: it is asked what it lacks, and sent that."""

from __future__ import annotations

from collections.abc import Sequence

from trainmaster.api.codec import decode
from trainmaster.api.paths import chunks
from trainmaster.api.paths import workdir as workdir_path
from trainmaster.api.workdirs import MissingChunks, StoredWorkdir
from trainmaster.client.transport import Transport


class Receiver:
    """Chunks and snapshots of one project of a server."""

    def __init__(self, transport: Transport, project: str) -> None:
        self._transport, self._project = transport, project

    def find_missing(self, digests: Sequence[str]) -> Sequence[str]:
        answer = self._transport.request("POST", chunks(self._project, "missing"), body={"sha256": list(digests)})
        return decode(MissingChunks, answer.json()).missing

    def put_chunk(self, sha256: str, data: bytes) -> None:
        sent = {"Content-Type": "application/octet-stream"}
        self._transport.request("PUT", chunks(self._project, sha256), content=data, headers=sent)

    def put_workdir(self, sha256: str, parts: Sequence[str]) -> Sequence[str]:
        answer = self._transport.request("PUT", workdir_path(self._project, sha256), body={"chunks": list(parts)})
        return decode(StoredWorkdir, answer.json()).missing
