"""Logs of a job: the list of streams, a part of one, or one while it grows."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from trainmaster.api.files import Logs
from trainmaster.control.log_view import logs
from trainmaster.core.plan import split_node_file
from trainmaster.store.attempts import list_attempts
from trainmaster.web import dependencies, streaming
from trainmaster.web.errors import Refused
from trainmaster.web.routes import TRAINING, group, reply

router = group("logs", prefix=f"{TRAINING}/jobs/{{uuid}}/logs")
MOST_BYTES = 1 << 20
_TEXT = "text/plain; charset=utf-8"
Stream = Annotated[str, Path(pattern=f"^{logs.STREAM}$", description="agent.log, rank-N.log, events.jsonl, exit.json")]
Number = Annotated[int | None, Query(ge=1, le=1_000_000, description="number of the attempt; default: the newest")]


@router.get("", response_model=Logs)
async def list_logs(job: dependencies.Job, db: dependencies.Db) -> Response:
    """Every log stream that can be read, with its size."""
    attempts = await run_in_threadpool(list_attempts, db, job.id)
    streams = await logs.list_streams(db, job, attempts)
    return reply(Logs(streams=tuple(streams)))


@router.get(
    "/{stream}",
    response_class=Response,
    responses={
        200: {
            "content": {"text/plain": {"schema": {"type": "string"}}},
            "description": "Bytes as they were written",
            "headers": {
                "Trainmaster-Next-Offset": {"description": "offset of the next byte", "schema": {"type": "string"}},
                "Trainmaster-Attempt": {"description": "number of the attempt", "schema": {"type": "string"}},
            },
        }
    },
)
async def read_log(
    *,
    request: Request,
    job: dependencies.Job,
    db: dependencies.Db,
    storage: dependencies.Storage,
    who: dependencies.Viewer,
    stream: Stream,
    attempt: Number = None,
    offset: Annotated[int, Query(ge=0, le=2**62, description="first byte")] = 0,
    limit: Annotated[int, Query(ge=1, le=MOST_BYTES, description="maximum number of bytes")] = MOST_BYTES,
    follow_it: Annotated[bool, Query(alias="follow", description="stream it while it grows")] = False,
) -> Response:
    """Bytes of a log from `offset`; with `follow`, streamed until the attempt has ended."""
    nodes = job.spec.resources.machines
    if split_node_file(stream)[0] >= nodes:
        raise Refused(404, "not_found", f"{stream} is of a node that job {job.id} does not have: its nodes are {nodes}")
    attempts = await run_in_threadpool(list_attempts, db, job.id)
    chosen = next((row for row in reversed(attempts) if attempt is None or row.number == attempt), None)
    if chosen is None:
        which = f"attempt {attempt}" if attempt is not None else "attempt yet"
        raise Refused(404, "not_found", f"job {job.id} has no {which}")
    headers = {"Trainmaster-Attempt": str(chosen.number)}
    if follow_it:
        followers: streaming.Followers = request.app.state.followers
        followers.refuse_when_full()
        body = streaming.log(followers, db, storage, job, chosen, who=who, stream=stream, offset=offset)
        return StreamingResponse(body, media_type=_TEXT, headers={**headers, "X-Accel-Buffering": "no"})
    piece = await logs.read(db, storage, job, chosen, stream, offset=offset, limit=limit)
    return Response(piece, media_type=_TEXT, headers={**headers, "Trainmaster-Next-Offset": str(offset + len(piece))})
