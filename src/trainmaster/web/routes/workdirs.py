"""Working folders of jobs, uploaded by content: ask for missing chunks, put them, record the snapshot.

A client asks which chunks the project lacks, puts those, and records the snapshot by its manifest (core/workdir.py).
Everything belongs to one project; bounds are those of core/workdir.py and the project's quota.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from trainmaster.api.workdirs import MissingChunks, StoredChunk, StoredWorkdir
from trainmaster.control import workdir
from trainmaster.core.errors import OverQuota, SpecError
from trainmaster.core.roles import Role
from trainmaster.core.workdir import CHUNK_BYTES, MOST_MANIFEST_BYTES, PREFIX
from trainmaster.web import dependencies, json_body
from trainmaster.web.auth import need
from trainmaster.web.errors import Refused
from trainmaster.web.routes import Body, group, reply

router = group("workdirs", prefix="/v1/projects/{project}")
Digest = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="SHA-256 in hex")]
_Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_BYTES = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


class Chunks(Body):
    """Chunks by their SHA-256."""

    sha256: list[_Hex] = Field(max_length=10_000)


class ManifestChunks(Body):
    """Chunks of a manifest, in order."""

    chunks: list[_Hex] = Field(min_length=1, max_length=MOST_MANIFEST_BYTES // CHUNK_BYTES)


@router.post("/chunks/missing", response_model=MissingChunks)
def find_missing_chunks(
    project: dependencies.ProjectName, chunks: Chunks, db: dependencies.Db, who: dependencies.User
) -> Response:
    """The chunks of a list that the project does not have."""
    need(who, Role.USER, project=project)
    return reply(MissingChunks(missing=tuple(workdir.find_missing(db, project, chunks.sha256))))


@router.put(
    "/chunks/{sha256}",
    response_model=StoredChunk,
    status_code=201,
    openapi_extra=_BYTES,
    responses={200: {"model": StoredChunk, "description": "The project had it already"}},
)
async def put_chunk(
    *,
    request: Request,
    project: dependencies.ProjectName,
    sha256: Digest,
    db: dependencies.Db,
    storage: dependencies.Storage,
    who: dependencies.User,
) -> Response:
    """Store one chunk of at most 1 MiB. The bytes must have this SHA-256; 413 where the project has no room."""
    need(who, Role.USER, project=project)
    data = await json_body.read_bytes(request)
    try:
        new = await run_in_threadpool(workdir.put_chunk, db, storage, project, sha256, data)
    except SpecError as error:
        raise Refused(422, "bad_chunk", str(error), faults=error.faults) from error
    except OverQuota as error:
        raise Refused(413, "over_quota", str(error)) from error
    return reply(StoredChunk(sha256=sha256, size_bytes=len(data)), status_code=201 if new else 200)


@router.put("/workdirs/{sha256}", response_model=StoredWorkdir)
def put_workdir(
    *,
    project: dependencies.ProjectName,
    sha256: Digest,
    manifest: ManifestChunks,
    db: dependencies.Db,
    storage: dependencies.Storage,
    who: dependencies.User,
) -> Response:
    """Record a snapshot by the chunks of its manifest. It is recorded once `missing` is empty."""
    need(who, Role.USER, project=project)
    try:
        missing = workdir.put_workdir(db, storage, project, sha256, manifest.chunks)
    except SpecError as error:
        raise Refused(422, "bad_manifest", "the manifest has faults", faults=error.faults[:100]) from error
    return reply(StoredWorkdir(workdir=f"{PREFIX}{sha256}", missing=tuple(missing[:10_000])))
