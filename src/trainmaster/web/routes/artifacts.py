"""Stored files of a job: the list, and each file by its path."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated
from urllib.parse import quote

from fastapi import Path, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response, StreamingResponse

from trainmaster.api.files import Artifacts
from trainmaster.control.log_view.logs import read_stored
from trainmaster.core.errors import NoSignedUrls
from trainmaster.pages import artifacts
from trainmaster.storage import Store
from trainmaster.store.artifacts import find_artifact
from trainmaster.store.rows import ArtifactRow
from trainmaster.web import dependencies
from trainmaster.web.errors import Refused
from trainmaster.web.routes import TRAINING, group, reply

router = group("artifacts", prefix=f"{TRAINING}/jobs/{{uuid}}/artifacts")
_CHUNK = 1 << 20
_SIGNED_S = 900  # long enough to start a download, too short to be passed on


@router.get("", response_model=Artifacts)
def list_artifacts(job: dependencies.Job, db: dependencies.Db) -> Response:
    """Stored files of a job: project file, logs, events, outputs."""
    return reply(artifacts.read(db, job.id))


@router.get(
    "/{path:path}",
    response_class=Response,
    responses={
        200: {
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
            "description": "The file, through this server",
        },
        307: {"description": "Signed URL of the object store, valid for 15 minutes"},
    },
)
async def read_artifact(
    *,
    job: dependencies.Job,
    db: dependencies.Db,
    storage: dependencies.Storage,
    path: Annotated[str, Path(description="path of the file, as in the list")],
    offset: Annotated[int, Query(ge=0, le=2**62, description="first byte, to continue a download")] = 0,
    signed: Annotated[
        bool, Query(description="redirect to a signed URL of the object store, where it has them")
    ] = False,
) -> Response:
    """One file from `offset`. `ETag` is the SHA-256 of the whole file.

    With `signed`, the answer redirects to a URL of the object store that is valid for 15 minutes.
    """
    row = await run_in_threadpool(find_artifact, db, job.id, path) if "\x00" not in path else None
    if row is None:
        raise Refused(404, "not_found", f"job {job.id} has no stored file {path[:200]!r}")
    if signed:
        with contextlib.suppress(NoSignedUrls):  # a folder has none: then it is sent from here
            return RedirectResponse(storage.sign(f"jobs/{job.id}/{row.path}", expires_s=_SIGNED_S), status_code=307)
    headers = {
        "Content-Length": str(max(0, row.size_bytes - offset)),
        "ETag": f'"{row.sha256}"',
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(row.path.rpartition('/')[2], safe='')}",
    }
    # The first piece is read now: an unavailable storage is an error answer, not a truncated one.
    first = await read_stored(storage, row, offset=offset, limit=_CHUNK) if offset < row.size_bytes else b""
    return StreamingResponse(
        _pieces(storage, row, offset, first), media_type="application/octet-stream", headers=headers
    )


async def _pieces(storage: Store, row: ArtifactRow, offset: int, first: bytes) -> AsyncIterator[bytes]:
    yield first
    for start in range(offset + _CHUNK, row.size_bytes, _CHUNK):
        yield await read_stored(storage, row, offset=start, limit=_CHUNK)
