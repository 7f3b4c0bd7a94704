"""Logs of a run: one rank or all of them, by byte offset, with search on the server and links to a line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response, StreamingResponse

from trainmaster.api.files import LogStream
from trainmaster.control.log_view import logs
from trainmaster.control.log_view import search as log_search
from trainmaster.control.log_view import window as log_window
from trainmaster.control.log_view.search import Found, LogLine
from trainmaster.control.log_view.window import Log, Window
from trainmaster.core.errors import StorageError, TargetError
from trainmaster.core.plan import EVENTS_FILE, EXIT_FILE, split_node_file
from trainmaster.core.roles import Role
from trainmaster.report import html
from trainmaster.store.attempts import list_attempts
from trainmaster.store.rows import AttemptRow, JobRow
from trainmaster.web import ansi, dependencies, rows, streaming
from trainmaster.web.auth import Caller
from trainmaster.web.errors import Refused, not_found
from trainmaster.web.sections.run import TABS
from trainmaster.web.templating import render

ALL = "all"  # every stream, merged
Level = Literal["", "warning", "error"]
_MOST = 200  # lines of one search
_PIECE = 1 << 20  # bytes of a download
_LOOK_S = 0.7
_LEVELS = {"warning": log_search.WARNING, "error": log_search.ERROR}
_BAD, _WARN = re.compile(log_search.ERROR), re.compile(r"\bWARN(ING)?\b")
router = APIRouter(include_in_schema=False)


class _Scene:
    """What a request is about: the attempt, its streams, and which of them are chosen."""

    def __init__(self, request: Request, db: Any, job: JobRow, attempts: list[AttemptRow]) -> None:
        self.request, self.db, self.job, self.attempts = request, db, job, attempts
        self.attempt: AttemptRow | None = None
        self.streams: list[LogStream] = []
        self.away: str | None = None
        self.stream = ALL
        self.caller = ""  # who searches
        self._starts: dict[str, str] = {}  # by stream, the links to its lines up to the place

    def logs(self) -> list[Log]:
        assert self.attempt is not None
        names = [one.stream for one in self.streams] if self.stream == ALL else [self.stream]
        storage = self.request.app.state.storage
        return [Log(db=self.db, storage=storage, job=self.job, attempt=self.attempt, stream=name) for name in names][
            : log_window.MOST_STREAMS
        ]

    def link(self, **values: object) -> str:
        number = self.attempt.number if self.attempt is not None else None
        asked = {"attempt": number, "stream": self.stream, **values}
        return f"/jobs/{self.job.id}/logs?" + urlencode({k: v for k, v in asked.items() if v not in (None, "")})

    def link_line(self, line: LogLine) -> str:
        """A page has hundreds: what their links have in common is put together once, and they leave out its path."""
        if (start := self._starts.get(line.stream)) is None:
            start = self._starts[line.stream] = f"?{self.link(stream=line.stream).partition('?')[2]}"
        return f"{start}&at={line.offset}#L{line.offset}"


@router.get("/jobs/{uuid}/logs")
async def read(
    *,
    request: Request,
    row: dependencies.Job,
    db: dependencies.Db,
    live: dependencies.Live,
    who: dependencies.Viewer,
    attempt: int | None = None,
    stream: str = "",
    at: int | None = None,
    before: int | None = None,
    find: str = "",
    case: bool = False,
    regex: bool = False,
    level: Level = "",
    skip: int = 0,
) -> Response:
    """The end of the log, a place in it, or the lines that hold a text or match an expression."""
    page, whole = await run_in_threadpool(live.glance, row.id)
    if page is None:
        raise not_found(row.id)
    scene = await _open(request, db, row, attempt=attempt, stream=stream)
    window, found, wrong = Window(lines=(), start=0, end=0), None, scene.away
    if scene.attempt is not None and scene.streams:
        try:
            if find or level:
                scene.caller = who.name
                found = await _search(scene, find, case=case, regex=regex, level=level, skip=max(0, min(skip, 2**62)))
            else:
                window = await _window(scene, at, before)
        except (TargetError, StorageError) as error:
            wrong = str(error)
    lines = found.lines if found is not None else window.lines
    offsets = {one.stream: one.size_bytes for one in scene.streams}
    if scene.stream != ALL:
        offsets = {scene.stream: window.end}
    over = scene.attempt is None or logs.is_over(row, scene.attempt)
    values: dict[str, Any] = {
        "whole": whole, "tab": "logs", "tabs": TABS, "who": who, "may_act": who.may(Role.USER), "scene": scene,
        "window": window, "found": found, "wrong": wrong, "lines": [_line(scene, line) for line in lines], "at": at,
        "find": find, "case": case, "regex": regex, "level": level, "over": over, "tail": at is None and before is None,
        "attempts": [one.number for one in scene.attempts], "offsets": json.dumps(offsets),
        "size_of": {one.stream: one.size_bytes for one in scene.streams}, "all_streams": ALL,
    }  # fmt: skip
    return await run_in_threadpool(lambda: render("logs.html", **html.context(page, drawn=False), **values))


@router.get("/jobs/{uuid}/logs/first-error")
async def first_error(
    *, request: Request, row: dependencies.Job, db: dependencies.Db, who: dependencies.Viewer,
    attempt: int | None = None, stream: str = "",
) -> Response:  # fmt: skip
    """Redirect to the first line that looks like an error, in the chosen stream or in the first one that has any."""
    scene = await _open(request, db, row, attempt=attempt, stream=stream)
    scene.caller = who.name
    if scene.attempt is not None:
        for log in scene.logs():
            found = await _grep(scene, log, log_search.ERROR, limit=1)
            if found.lines:
                line = found.lines[0]
                link = scene.link(stream=line.stream, at=line.offset)
                return RedirectResponse(f"{link}#L{line.offset}", status_code=303)
            if found.next is not None or found.fault:  # not searched to its end: the page of the search says so
                link = scene.link(stream=log.stream, level="error", skip=found.next)
                return RedirectResponse(link, status_code=303)
    return RedirectResponse(scene.link(level="error"), status_code=303)


@router.get("/jobs/{uuid}/logs/follow")
async def follow(
    *,
    request: Request,
    row: dependencies.Job,
    db: dependencies.Db,
    who: dependencies.Viewer,
    attempt: int | None = None,
    stream: str = "",
    offsets: str = "{}",
) -> Response:
    """New lines as server-sent events, until the attempt has ended."""
    scene = await _open(request, db, row, attempt=attempt, stream=stream)
    followers: streaming.Followers = request.app.state.followers
    followers.refuse_when_full()
    places: dict[str, int] = {}
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        places = {str(k): v for k, v in json.loads(offsets).items() if isinstance(v, int) and 0 <= v < 2**62}
    body = _follow(followers, scene, places, who)
    return StreamingResponse(body, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


@router.get("/jobs/{uuid}/logs/download")
async def download(
    request: Request, row: dependencies.Job, db: dependencies.Db, attempt: int | None = None, stream: str = ""
) -> Response:
    """A whole stream, as far as it is written, a piece at a time."""
    scene = await _open(request, db, row, attempt=attempt, stream=stream)
    size = next((one.size_bytes for one in scene.streams if one.stream == stream), None)
    if size is None or scene.attempt is None:
        raise Refused(404, "not_found", f"job {row.id} has no such log")
    (log,) = scene.logs()

    async def pieces() -> AsyncIterator[bytes]:
        at = 0
        while at < size and (piece := await log.read(at, min(_PIECE, size - at))):
            at += len(piece)
            yield piece

    name = f"{row.name}-{row.id[:8]}-{scene.attempt.number}-{stream}"  # names have no quotes: core/spec.py, logs.STREAM
    return StreamingResponse(
        pieces(), media_type="text/plain; charset=utf-8",
        headers={"Content-Disposition": f'attachment; filename="{name}"', "Content-Length": str(size)},
    )  # fmt: skip


async def _follow(
    followers: streaming.Followers, scene: _Scene, places: dict[str, int], who: Caller
) -> AsyncIterator[str]:
    with followers.one_more():
        checked = time.monotonic()
        yield "retry: 2000\n\n"
        while scene.attempt is not None:
            if time.monotonic() - checked >= followers.token_check_s:
                if not await streaming.is_live(scene.db, who):
                    return
                checked = time.monotonic()
            job, attempt = await run_in_threadpool(streaming.read_again, scene.db, scene.job.id, scene.attempt.number)
            if job is None or attempt is None:
                return
            over = logs.is_over(job, attempt)
            scene.job, scene.attempt = job, attempt
            fresh: list[LogLine] = []
            for log in scene.logs():
                with contextlib.suppress(TargetError, StorageError):
                    window = await log_window.read_new(log, places.get(log.stream, 0), last=over)
                    fresh += window.lines
                    places[log.stream] = window.end
            if fresh:
                text = "".join(_line(scene, line) for line in fresh)
                data = json.dumps({"html": text, "offsets": places})
                yield f"event: lines\ndata: {data}\n\n"
            elif over:
                yield "event: end\ndata: {}\n\n"
                return
            else:
                yield ": alive\n\n"
                await asyncio.sleep(_LOOK_S)


async def _open(request: Request, db: Any, job: JobRow, *, attempt: int | None, stream: str) -> _Scene:
    attempts = await run_in_threadpool(list_attempts, db, job.id)
    scene = _Scene(request, db, job, attempts)
    scene.attempt = next((row for row in reversed(attempts) if attempt is None or row.number == attempt), None)
    if scene.attempt is None:
        return scene
    try:
        listed = await logs.list_streams(db, job, attempts)
    except (TargetError, StorageError) as error:
        scene.away, listed = str(error), []
    own = [one for one in listed if one.attempt == scene.attempt.number and _is_log(one.stream)]
    scene.streams = sorted(own, key=lambda one: _order(one.stream))
    names = [one.stream for one in own]
    ranks = [one.stream for one in scene.streams if one.stream.startswith("rank-")]
    scene.stream = stream if stream in (*names, ALL) else ranks[0] if len(ranks) == 1 else ALL
    return scene


def _is_log(stream: str) -> bool:
    return split_node_file(stream)[1] not in (EVENTS_FILE, EXIT_FILE)


def _order(stream: str) -> tuple[int, int, str]:
    rank = re.fullmatch(r"rank-(\d+)\.log", stream)
    return (0, int(rank[1]), "") if rank else (1, split_node_file(stream)[0], stream)


async def _window(scene: _Scene, at: int | None, before: int | None) -> Window:
    opened = scene.logs()
    sizes = {one.stream: one.size_bytes for one in scene.streams}
    if scene.stream == ALL:
        return Window(
            lines=tuple(await log_window.read_merged(opened, [sizes[log.stream] for log in opened])), start=0, end=0
        )
    if at is not None:
        return await log_window.read_from(opened[0], max(0, min(at, 2**62)))
    if before is not None:
        return await log_window.read_before(opened[0], max(0, min(before, 2**62)))
    window = await log_window.read_before(opened[0], sizes[scene.stream])
    more = await log_window.read_new(opened[0], window.end, last=False)  # written since the sizes were listed
    return Window(lines=(*window.lines, *more.lines)[-log_window.LINES :], start=window.start, end=more.end)


async def _search(scene: _Scene, find: str, *, case: bool, regex: bool, level: Level, skip: int) -> Found:
    """Lines that match; with a level and a text or an expression, those that match both."""
    if len(find) > log_search.LONGEST:
        fault = f"what is looked for has {log_search.LONGEST} characters at most, and this has {len(find)}"
        return Found(lines=(), next=None, fault=fault)
    lines: list[LogLine] = []
    following: int | None = None
    all_logs = scene.logs()
    for number, log in enumerate(all_logs):
        found = await _grep(
            scene, log, find or _LEVELS[level], limit=_MOST - len(lines), ignore_case=bool(find) and not case,
            offset=skip if scene.stream != ALL else 0, also=_LEVELS[level] if level and find else None,
            literal=bool(find) and not regex,
        )  # fmt: skip
        if found.fault:
            return found
        lines += found.lines
        following = found.next if following is None else following
        if len(lines) >= _MOST:
            if number + 1 < len(all_logs) and following is None:
                following = 0  # of the logs that are left
            break
    return Found(lines=tuple(lines), next=following)


async def _grep(
    scene: _Scene, log: Log, pattern: str, *, limit: int, ignore_case: bool = False, offset: int = 0,
    also: str | None = None, literal: bool = False,
) -> Found:  # fmt: skip
    return await log_search.search(
        log.db, log.storage, log.job, log.attempt, log.stream, slots=scene.request.app.state.searches,
        caller=scene.caller, pattern=pattern, ignore_case=ignore_case, offset=offset, limit=limit, also=also,
        literal=literal,
    )  # fmt: skip


def _line(scene: _Scene, line: LogLine) -> Markup:
    """One line as the page has it."""
    short = line.text[:300]
    tone = "bad" if _BAD.search(short) else "warn" if _WARN.search(short) else ""
    label, link = "" if scene.stream != ALL else line.stream.removesuffix(".log"), scene.link_line(line)
    return rows.log_line(offset=line.offset, label=label, link=link, tone=tone, text=ansi.render(line.text))
