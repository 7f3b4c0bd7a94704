"""News reaches every receiver that wants it, whatever receivers, dispatchers and the network do."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fork_server import ForkServer
from trainmaster.control import failpoints
from trainmaster.control.notify import outbox, signing
from trainmaster.control.notify.outbox import Pace
from trainmaster.store import leases, webhooks
from trainmaster.store import outbox as deliveries
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.store.outbox import DeliveryRow

from .receiver import Got, Receiver, receiving

pytestmark = pytest.mark.both_databases

HOW = Path(__file__).parents[2] / "docs" / "how" / "notify.md"
QUICK = Pace(tick_s=0.02, claim_s=20, webhook_s=10, first_rest_s=0.02)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest.fixture(autouse=True)
def allowed(tmp_path: Path) -> None:
    """Receivers of these tests are on this machine, which an admin must allow."""
    file = tmp_path / "notify.yaml"
    file.write_text("allow_hosts: [127.0.0.1, localhost]\n")
    file.chmod(0o600)


def hook(db: Database, url: str, *, topics: tuple[str, ...] = (), project: str | None = None) -> str:
    key = str(uuid.uuid4())
    with db.write() as conn:
        webhooks.insert_webhook(conn, key, url=url, project=project, topics=topics, at=datetime.now(UTC))
    return key


def put(db: Database, key: str, *, topic: str = "job.failed", project: str = "default") -> bool:
    payload = {"message": f"it is about {key}", "name": "trial", "url": "/jobs/x", "reason": "script_failed"}
    with db.write() as conn:
        return outbox.put(conn, key=key, topic=topic, project=project, job_id=None, payload=payload)


def dispatch(db: Database, home: Path, until: Callable[[], bool], *, pace: Pace = QUICK, many: int = 1) -> None:
    async def main() -> None:
        stop = asyncio.Event()
        running = [asyncio.create_task(outbox.run(db, home, stop=stop, pace=pace)) for _ in range(many)]
        while not await asyncio.to_thread(until):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        stop.set()
        await asyncio.gather(*running)

    asyncio.run(main())


def rows(db: Database) -> list[DeliveryRow]:
    return deliveries.list_deliveries(db)


def settled(db: Database, count: int = 1) -> Callable[[], bool]:
    """Whether so many deliveries are over, one way or the other."""
    return lambda: sum(row.next_at is None for row in rows(db)) >= count


def hmac_sha256(key: bytes, text: bytes) -> str:
    """As RFC 2104 writes it: the receiver's side, made without the module that we sign with."""
    block = key.ljust(64, b"\0") if len(key) <= 64 else hashlib.sha256(key).digest().ljust(64, b"\0")
    inner = hashlib.sha256(bytes(b ^ 0x36 for b in block) + text).digest()
    return hashlib.sha256(bytes(b ^ 0x5C for b in block) + inner).hexdigest()


def test_news_arrives_signed_and_the_signature_holds(db: Database, tmp_path: Path, receiver: Receiver) -> None:
    name = hook(db, f"{receiver.url}/tell?who=me")
    assert put(db, "first") and not put(db, "first"), "the same news is put in once"
    dispatch(db, tmp_path, settled(db))
    (got,) = receiver.got
    assert got.path == "/tell?who=me" and got.json["topic"] == got.headers["Trainmaster-Topic"] == "job.failed"
    assert got.json["data"]["message"] == "it is about first"
    assert got.headers["Trainmaster-Delivery"] == got.json["delivery"]
    home_key = (tmp_path / "secret.key").read_bytes()
    key = hmac_sha256(home_key, f"webhook:{name}".encode())
    at, _, digest = got.headers["Trainmaster-Signature"].partition(",")
    seconds = int(at.removeprefix("t="))
    assert digest == "v1=" + hmac_sha256(key.encode(), f"{seconds}.".encode() + got.body)
    assert abs(time.time() - seconds) < 3600 and key == signing.signing_key(tmp_path, name)
    page: dict[str, Any] = {}
    exec(re.search(r"```python\n(.*?)```", HOW.read_text(), re.DOTALL)[1], page)  # what we tell receivers to do
    assert page["is_ours"](got.headers["Trainmaster-Signature"], got.body, key)
    assert not page["is_ours"](got.headers["Trainmaster-Signature"], got.body + b" ", key)
    assert (tmp_path / "secret.key").stat().st_mode & 0o777 == 0o600 and len(home_key) == 32
    (row,) = rows(db)
    assert row.done_at is not None and (row.status, row.tries, row.error) == (204, 1, None)


def test_a_flaky_receiver_is_tried_again_under_the_same_id(db: Database, tmp_path: Path, receiver: Receiver) -> None:
    hook(db, receiver.url)
    receiver.answer = lambda _got: [500, 429, 200][min(len(receiver.got) - 1, 2)]
    put(db, "flaky")
    dispatch(db, tmp_path, settled(db))
    assert len(receiver.got) == 3 and len({got.headers["Trainmaster-Delivery"] for got in receiver.got}) == 1
    (row,) = rows(db)
    assert (row.tries, row.status, row.error) == (3, 200, None)


def test_a_clock_that_was_set_back_delays_no_news(db: Database, tmp_path: Path, receiver: Receiver) -> None:
    key = hook(db, receiver.url)
    assert put(db, "one")
    now = datetime.now(UTC)
    with db.write() as conn:
        (news,) = deliveries.list_unspread(conn)
        deliveries.spread(conn, news, [key], at=now + timedelta(minutes=59))
    assert deliveries.due_channels(db, now=now) == [], "it rests"
    assert deliveries.due_channels(db, now=now - timedelta(days=1)) == [key]
    assert len(deliveries.list_due(db, key, now=now - timedelta(days=1), limit=10)) == 1


def test_what_nobody_takes_is_given_up_and_shown(db: Database, tmp_path: Path, receiver: Receiver) -> None:
    with receiving() as gone:
        pass
    hook(db, gone.url)
    hook(db, receiver.url)
    receiver.answer = lambda _got: 410
    put(db, "down")
    dispatch(db, tmp_path, settled(db, 2), pace=replace(QUICK, give_up_s=0.2))
    down, unwanted = sorted(deliveries.list_deliveries(db, failed=True), key=lambda row: row.status or 0)
    assert down.done_at is None and down.next_at is None and down.error is not None
    assert down.error.startswith("given up after") and "ConnectError" in down.error
    assert unwanted.tries == 1 and "HTTP 410" in str(unwanted.error), "410 says that no further try is wanted"


def test_a_redirect_is_not_followed(db: Database, tmp_path: Path, receiver: Receiver) -> None:
    hook(db, f"{receiver.url}/here")
    receiver.answer = lambda got: (302, {"Location": f"{receiver.url}/there"}) if got.path == "/here" else 200
    put(db, "moved")
    dispatch(db, tmp_path, settled(db), pace=replace(QUICK, give_up_s=0.2))
    assert {got.path for got in receiver.got} == {"/here"}
    assert "redirects are not followed" in str(rows(db)[0].error)


def test_a_receiver_that_hangs_holds_up_its_own_news_only(db: Database, tmp_path: Path, receiver: Receiver) -> None:
    slow = hook(db, f"{receiver.url}/slow")
    hook(db, f"{receiver.url}/quick")
    ended: list[bool] = []

    def answer(got: Got) -> int:
        while got.path == "/slow" and not ended:
            time.sleep(0.01)
        return 200

    def until() -> bool:
        found = rows(db)
        return (
            any("no answer within" in str(row.error) for row in found)
            and sum(row.done_at is not None for row in found) == 6
        )

    receiver.answer = answer
    for number in range(6):
        put(db, f"news {number}")
    pace = replace(QUICK, webhook_s=0.3, first_rest_s=0.3)
    try:
        dispatch(db, tmp_path, until, pace=pace)
    finally:
        ended.append(True)
    assert all(row.done_at is None for row in rows(db) if row.channel == f"webhook:{slow}")


def test_each_receiver_hears_what_it_asked_for(db: Database, tmp_path: Path, receiver: Receiver) -> None:
    hook(db, f"{receiver.url}/all")
    hook(db, f"{receiver.url}/failed", topics=("job.failed",))
    hook(db, f"{receiver.url}/mine", project="mine")
    put(db, "1", topic="job.failed", project="mine")
    put(db, "2", topic="job.completed", project="other")
    dispatch(db, tmp_path, settled(db, 4))
    heard = sorted((got.path, got.json["topic"]) for got in receiver.got)
    assert heard == [
        ("/all", "job.completed"), ("/all", "job.failed"), ("/failed", "job.failed"), ("/mine", "job.failed"),
    ]  # fmt: skip


def test_two_dispatchers_at_once_send_nothing_twice(db: Database, tmp_path: Path, receiver: Receiver) -> None:
    hook(db, f"{receiver.url}/a")
    hook(db, f"{receiver.url}/b")
    for number in range(12):
        put(db, f"news {number}")
    dispatch(db, tmp_path, settled(db, 24), many=2)
    times = Counter(got.headers["Trainmaster-Delivery"] for got in receiver.got)
    assert len(times) == 24 and set(times.values()) == {1}
    assert all(row.tries == 1 for row in rows(db))


DISPATCHER = """
import asyncio, sys
from pathlib import Path
from trainmaster.control.notify import outbox
from trainmaster.store.migrate import open_database
pace = outbox.Pace(tick_s=0.02)
asyncio.run(outbox.run(open_database(sys.argv[1]), Path(sys.argv[2]), stop=asyncio.Event(), pace=pace))
"""


def expire_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the time of the claims pass. A claim of a second could end while its own dispatcher, slow, still sends."""
    clock, passed = leases.clock, timedelta(seconds=2 * Pace().claim_s)
    monkeypatch.setattr(leases, "clock", lambda conn: clock(conn) + passed)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.matrix(one_in=2)
def test_killed_between_the_sending_and_the_mark(
    programs: ForkServer, database_url: str, tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least once: what was sent and not noted is sent again, and the receiver sees that it is the same."""
    db = open_database(database_url)
    hook(db, receiver.url)
    put(db, "once")
    started = threading.Event()

    def answer(_got: Got) -> int:
        if len(receiver.got) == 1:
            started.wait()
            os.kill(child.pid, signal.SIGKILL)  # it has sent, and will never hear that it did
            while is_running(child.pid):
                time.sleep(0.01)
        return 200

    receiver.answer = answer
    child = programs.start("-c", DISPATCHER, database_url, str(tmp_path), env=os.environ)
    started.set()
    try:
        assert child.wait(timeout=120) == -signal.SIGKILL
        (row,) = rows(db)
        assert row.done_at is None and row.tries == 1
        expire_claims(monkeypatch)
        dispatch(db, tmp_path, settled(db))
    finally:
        child.kill()
        child.wait()
    first, second = receiver.got
    assert first.headers["Trainmaster-Delivery"] == second.headers["Trainmaster-Delivery"]
    assert first.body == second.body and rows(db)[0].tries == 2
    db.close()


PLACES = [f"{what}: {when}" for what in ("commit spread", "commit claim", "call deliver", "commit delivery")
          for when in ("before", "after")]  # fmt: skip


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("place", PLACES)
def test_killed_at_every_commit_and_effect(
    programs: ForkServer, place: str, tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = open_database(tmp_path / "trainmaster.db")
    hook(db, receiver.url)
    put(db, "once")
    env = {**os.environ, failpoints.KILL_AT_VARIABLE: f"{place} 1"}
    killed = programs.run("-c", DISPATCHER, str(tmp_path / "trainmaster.db"), str(tmp_path), env=env)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    expire_claims(monkeypatch)
    dispatch(db, tmp_path, settled(db))
    (row,) = rows(db)
    assert row.done_at is not None and row.status == 204
    assert len({got.headers["Trainmaster-Delivery"] for got in receiver.got}) == 1
    assert len(receiver.got) == (2 if place in ("call deliver: after", "commit delivery: before") else 1)
    db.close()


def test_a_removed_webhook_is_given_up(db: Database, tmp_path: Path, receiver: Receiver) -> None:
    name = hook(db, receiver.url)
    receiver.answer = lambda _got: 500
    put(db, "too late")
    dispatch(db, tmp_path, lambda: len(receiver.got) > 0 and rows(db)[0].tries > 0)
    with db.write() as conn:
        assert webhooks.remove_webhook(conn, name)
    dispatch(db, tmp_path, settled(db))
    assert "removed" in str(rows(db)[0].error)
