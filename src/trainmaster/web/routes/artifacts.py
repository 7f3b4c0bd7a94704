"""What is kept of a job in storage: a list, and each object by its path."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated
from urllib.parse import quote

from fastapi import Path, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response, StreamingResponse

from trainmaster.api.files import Artifacts
from trainmaster.control.logs import read_stored
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
_SIGNED_S = 900  # long enough to begin a download, too short to be worth passing on


@router.get("", response_model=Artifacts)
def list_artifacts(job: dependencies.Job, db: dependencies.Db) -> Response:
    """Everything that is kept of a job: its project file, logs, events, outputs."""
    return reply(artifacts.read(db, job.id))


@router.get(
    "/{path:path}",
    response_class=Response,
    responses={
        200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
              "description": "The object, through this server"},
        307: {"description": "Where the object store gives it out itself, for a quarter of an hour"},
    },
)  # fmt: skip
async def read_artifact(
    *,
    job: dependencies.Job,
    db: dependencies.Db,
    storage: dependencies.Storage,
    path: Annotated[str, Path(description="as the list names it")],
    offset: Annotated[int, Query(ge=0, le=2**62, description="first byte: goes on with a download cut off")] = 0,
    signed: Annotated[bool, Query(description="to the object store's own URL, where it has them")] = False,
) -> Response:
    """One object from `offset`, read by this server. `ETag` is the SHA-256 of the whole.

    With `signed`, an object store gives it out itself: the answer leads to a URL that is good for a quarter of an hour.
    """
    row = await run_in_threadpool(find_artifact, db, job.id, path) if "\x00" not in path else None
    if row is None:
        raise Refused(404, "not_found", f"job {job.id} keeps no {path[:200]!r}")
    if signed:
        with contextlib.suppress(NoSignedUrls):  # a folder has none: then it is read here
            return RedirectResponse(storage.sign(f"jobs/{job.id}/{row.path}", expires_s=_SIGNED_S), status_code=307)
    headers = {
        "Content-Length": str(max(0, row.size_bytes - offset)),
        "ETag": f'"{row.sha256}"',
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(row.path.rpartition('/')[2], safe='')}",
    }
    # The first piece is read now: a storage that is away is an error, and not half an answer.
    first = await read_stored(storage, row, offset=offset, limit=_CHUNK) if offset < row.size_bytes else b""
    return StreamingResponse(
        _pieces(storage, row, offset, first), media_type="application/octet-stream", headers=headers
    )


async def _pieces(storage: Store, row: ArtifactRow, offset: int, first: bytes) -> AsyncIterator[bytes]:
    yield first
    for start in range(offset + _CHUNK, row.size_bytes, _CHUNK):
        yield await read_stored(storage, row, offset=start, limit=_CHUNK)
