"""Events of a job: a page as JSON, or a stream of server-sent events."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from trainmaster.api.events import Events
from trainmaster.pages import events
from trainmaster.web import dependencies, streaming
from trainmaster.web.errors import Refused
from trainmaster.web.routes import TRAINING, group, reply

router = group("events", prefix=TRAINING)
_PLACE = r"\d{1,9}:\d{1,18}"
_STREAM = "text/event-stream"
After = Annotated[
    str | None, Query(pattern=f"^{_PLACE}$", description="cursor: `next` of the last answer, or the id of an event")
]
Phase = Annotated[str | None, Query(pattern=r"^[^\x00]{1,64}$", description="events of this phase (not for a stream)")]

Node = Annotated[int, Query(ge=0, le=99_999, description="node of the job; each has cursors of its own")]


@router.get(
    "/jobs/{uuid}/events",
    response_model=Events,
    responses={
        200: {
            "content": {_STREAM: {"schema": {"type": "string"}}},
            "description": "Events; a stream with Accept: text/event-stream",
        },
        204: {"description": "Nothing more to send: the stream of an ended job is complete"},
    },
)
async def list_events(
    *,
    request: Request,
    job: dependencies.Job,
    db: dependencies.Db,
    who: dependencies.Viewer,
    after: After = None,
    phase: Phase = None,
    node: Node = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="maximum number of results (not for a stream)")] = 1000,
    last_event_id: Annotated[
        str | None, Header(description="cursor of the last received event, to resume a stream")
    ] = None,
) -> Response:
    """Events in order, invalid lines included. `next` is the cursor of the following page; it stays the same where no
    event is new.

    With `Accept: text/event-stream` they are streamed until the job is final, with heartbeats in between.
    `Last-Event-ID` resumes an interrupted stream: nothing is missed and nothing is repeated.
    """
    if _STREAM in request.headers.get("accept", ""):
        followers: streaming.Followers = request.app.state.followers
        if last_event_id == streaming.END and job.status.final:
            return Response(status_code=204)
        followers.refuse_when_full()
        place = _cursor(last_event_id if last_event_id not in (None, "", streaming.END) else after)
        body = streaming.events(followers, db, job.id, who, after=place, node=node)
        # A buffering proxy would delay the events.
        return StreamingResponse(body, media_type=_STREAM, headers={"X-Accel-Buffering": "no"})
    place = _cursor(after)
    page = await run_in_threadpool(events.read, db, job.id, phase=phase, after=place, limit=limit, node=node)
    return reply(page)


def _cursor(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    if not re.fullmatch(_PLACE, text, re.ASCII):
        raise Refused(400, "bad_place", "Last-Event-ID is the id of an event: ATTEMPT:OFFSET")
    number, _, offset = text.partition(":")
    return int(number), int(offset)
