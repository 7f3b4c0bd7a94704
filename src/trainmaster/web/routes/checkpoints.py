"""Newest checkpoint of a job: its files, and each file by its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from fastapi import Path, Query, Request
from starlette.responses import Response, StreamingResponse

from trainmaster.api.files import CheckpointFile, CheckpointFiles
from trainmaster.control import checkpoints
from trainmaster.web import dependencies
from trainmaster.web.routes import TRAINING, group, reply

router = group("checkpoints", prefix=f"{TRAINING}/jobs/{{uuid}}/checkpoint")
_CHUNK = 1 << 20


@router.get("", response_model=CheckpointFiles)
def find_checkpoint(job: dependencies.Job, request: Request) -> Response:
    """Step and files of the newest checkpoint. 404 where the job has saved none, or its target keeps it elsewhere."""
    with dependencies.finding():
        newest = checkpoints.find_newest(request.app.state.home, job)
    files = tuple(
        CheckpointFile(path=name, size_bytes=size, sha256=digest) for name, (size, digest) in newest.files.items()
    )
    return reply(CheckpointFiles(step=newest.step, name=newest.folder.name, files=files))


@router.get(
    "/{step}/{name:path}",
    response_class=Response,
    responses={
        200: {
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
            "description": "The file",
        }
    },
)
def read_checkpoint_file(
    job: dependencies.Job,
    request: Request,
    step: Annotated[int, Path(ge=0, le=2**53)],
    name: Annotated[str, Path(description="name of the file, as in the list")],
    offset: Annotated[int, Query(ge=0, le=2**62, description="first byte, to continue a download")] = 0,
) -> Response:
    """One file of a checkpoint from `offset`. `ETag` is the SHA-256 of the whole file, where the job wrote it down."""
    with dependencies.finding():
        listing = checkpoints.find_step(request.app.state.home, job, step)
        first = checkpoints.read(listing, name, offset=offset, limit=_CHUNK)
    size, digest = listing.files[name]

    def pieces() -> Iterator[bytes]:
        yield first
        for start in range(offset + _CHUNK, size, _CHUNK):
            yield checkpoints.read(listing, name, offset=start, limit=_CHUNK)

    headers = {"Content-Length": str(max(0, size - offset))} | ({"ETag": f'"{digest}"'} if digest else {})
    return StreamingResponse(pieces(), media_type="application/octet-stream", headers=headers)
