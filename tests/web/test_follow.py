"""Events and logs as they come, over a real socket: nothing missed, nothing twice, and an end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from pages import samples
from trainmaster.core.events import Event
from trainmaster.core.states import Stage, Status
from trainmaster.store import attempts, events, tokens
from trainmaster.store.database import Database
from trainmaster.store.tokens import Role
from trainmaster.web.app import create_app
from trainmaster.web.streaming import Followers
from web.furnished import JOBS, issue, keep, serving

SSE = {"Accept": "text/event-stream"}


@pytest.fixture
def followers() -> Followers:
    return Followers(look_s=0.01, alive_s=0.05, most=2)


@pytest.fixture
def web(db: Database, tmp_path: Path, followers: Followers) -> Iterator[httpx.Client]:
    with serving(create_app(db, tmp_path, reconcile=False, followers=followers)) as url, caller(url) as found:
        yield found


def caller(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=30, verify=False)  # there is no TLS here; certificates take long to load


def messages(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """Server-sent messages; a comment is one with the name `:`."""
    held: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            yield {"event": ":"}
        elif line:
            name, _, value = line.partition(": ")
            held[name] = value
        elif held:
            found, held = held, {}
            if "event" in found:
                yield found


def going(db: Database) -> samples.Story:
    return samples.Story(db).start().move(Stage.RUNNING)


def test_events_are_followed_to_the_end_of_the_job(db: Database, web: httpx.Client) -> None:
    story = going(db).tell([samples.project("x")])
    received: list[dict[str, str]] = []
    with web.stream("GET", f"{JOBS}/{story.id}/events", headers=SSE) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for message in messages(answer.iter_lines()):
            received.append(message)
            if [each["event"] for each in received] == ["event", ":"]:  # a sign of life: it waits for us now
                story.tell([b"garbage\n", Event(phase="STEP", event="metrics", data={"step": 1})])
                story.end_attempt().finish(Status.COMPLETED)
    events_received = [message for message in received if message["event"] != ":"]
    assert [message["event"] for message in events_received] == ["event", "event", "event", "end"]
    assert [json.loads(message["data"]).get("phase") for message in events_received[:3]] == ["PROJECT", None, "STEP"]
    assert json.loads(events_received[3]["data"]) == {"status": "completed", "reason": None}


def test_a_follower_goes_on_where_it_was_cut_off(db: Database, web: httpx.Client) -> None:
    story = samples.resumed(db)  # two attempts
    rows = events.list_events(db, story.id, limit=10_000)
    story.end_attempt().finish(Status.COMPLETED)
    seen: list[str] = []
    last = ""
    while last != "end":
        headers = {**SSE, "Last-Event-ID": last} if last else SSE
        with web.stream("GET", f"{JOBS}/{story.id}/events", headers=headers) as answer:
            for count, message in enumerate(messages(answer.iter_lines())):
                last = message["id"]
                seen.append(last)
                if count == 70:
                    break  # the line is cut
    assert seen == [*("{}:{}".format(*row.cursor) for row in rows), "end"]
    # A browser connects again after every end; this tells it that there is no more.
    assert web.get(f"{JOBS}/{story.id}/events", headers={**SSE, "Last-Event-ID": "end"}).status_code == 204


def test_nonsense_for_a_place_is_refused(db: Database, web: httpx.Client) -> None:
    story = samples.completed(db)
    answer = web.get(f"{JOBS}/{story.id}/events", headers={**SSE, "Last-Event-ID": "1:x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_place")


def test_there_is_a_most_of_followers_and_a_lost_one_makes_room(
    db: Database, web: httpx.Client, followers: Followers
) -> None:
    story = going(db)
    address = f"{JOBS}/{story.id}/events"
    with web.stream("GET", address, headers=SSE), web.stream("GET", address, headers=SSE):
        refused = web.get(address, headers=SSE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_open")
    wait(lambda: followers.open == 0)


def test_a_revoked_token_ends_what_it_follows(db: Database, tmp_path: Path, followers: Followers) -> None:
    story, ann = going(db), issue(db, "ann", Role.VIEWER)
    app = create_app(db, tmp_path, reconcile=False, require_token=True, followers=followers)
    with serving(app) as url, caller(url) as web:
        with web.stream("GET", f"{JOBS}/{story.id}/events", headers={**SSE, **ann}) as answer:
            received = messages(answer.iter_lines())
            assert next(received)["event"] == ":"
            with db.write() as conn:
                tokens.revoke(conn, "ann", at=datetime.now(UTC))
            assert {message["event"] for message in received} <= {":"}  # and then it ends


def placed(db: Database, folder: Path) -> samples.Story:
    """A running job whose attempt lies in a folder of this machine."""
    story = going(db)
    folder.mkdir(parents=True)
    with db.write() as conn:
        attempts.set_handle(conn, story.attempt, {"attempt": story.attempt, "folder": str(folder)})
    return story


def test_a_log_is_followed_while_it_is_written(db: Database, web: httpx.Client, tmp_path: Path) -> None:
    story = placed(db, tmp_path / "a")
    log = tmp_path / "a" / "rank-0.log"
    log.write_bytes(b"one\n")
    received = b""
    with web.stream("GET", f"{JOBS}/{story.id}/logs/rank-0.log?follow=true") as answer:
        assert answer.headers["trainmaster-attempt"] == "1"
        for piece in answer.iter_raw():
            received += piece
            if received == b"one\n":
                with log.open("ab") as file:
                    file.write(b"\xfftwo\n")
                story.end_attempt().finish(Status.COMPLETED)
    assert received == b"one\n\xfftwo\n"


def test_a_log_is_read_by_parts_at_its_target_and_then_in_storage(
    db: Database, web: httpx.Client, tmp_path: Path
) -> None:
    story = placed(db, tmp_path / "a")
    (tmp_path / "a" / "agent.log").write_bytes(b"0123456789")
    address = f"{JOBS}/{story.id}/logs"
    part = web.get(f"{address}/agent.log?offset=2&limit=3")
    assert (part.content, part.headers["trainmaster-next-offset"]) == (b"234", "5")
    assert web.get(f"{address}/agent.log?offset=10").content == b""
    stream = {"attempt": 1, "stream": "agent.log", "size_bytes": 10, "stored": False}
    assert web.get(address).json() == {"streams": [stream]}
    story.end_attempt().finish(Status.COMPLETED)
    keep(db, tmp_path, story.id, {"attempts/1/agent.log": b"ABCDEFGHIJ"})  # so that one sees where it comes from
    assert web.get(f"{address}/agent.log?offset=8").content == b"IJ"
    assert web.get(f"{address}/agent.log?follow=true").content == b"ABCDEFGHIJ"
    assert web.get(address).json() == {"streams": [{**stream, "stored": True}]}


def test_only_streams_are_read(db: Database, web: httpx.Client) -> None:
    story = samples.completed(db)
    for stream in (
        "plan.json",
        "agent.lock",
        "..%2fagent.log",
        "rank-x.log",
        "rank-0.log%00",
        "outputs%2fx",
        "%2fetc%2fpasswd",
    ):
        assert web.get(f"{JOBS}/{story.id}/logs/{stream}").status_code in (404, 422), stream


def test_a_job_that_was_never_placed_has_no_log(db: Database, web: httpx.Client) -> None:
    story = samples.pending(db)
    assert web.get(f"{JOBS}/{story.id}/logs").json() == {"streams": []}
    assert web.get(f"{JOBS}/{story.id}/logs/agent.log").status_code == 404
    assert web.get(f"{JOBS}/{samples.completed(db).id}/logs/agent.log?attempt=7").status_code == 404


def test_a_target_that_this_server_does_not_have_is_said(db: Database, web: httpx.Client) -> None:
    answer = web.get(f"{JOBS}/{samples.completed(db, target='moon').id}/logs")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "unusable")


def wait(done: Any) -> None:
    pause = threading.Event()
    for _ in range(2000):
        if done():
            return
        pause.wait(0.01)
    raise AssertionError("it never came true")


def test_a_stream_of_a_node_that_the_job_does_not_have_is_not_found(db: Database, web: httpx.Client) -> None:
    job = samples.completed(db)
    for stream in ("events.node-1.jsonl", "events.node-4430.jsonl", "agent.node-1.log"):
        answer = web.get(f"{JOBS}/{job.id}/logs/{stream}")
        assert (answer.status_code, "its nodes are 1" in answer.text) == (404, True), stream
