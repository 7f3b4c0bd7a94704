"""Notifications, inserted in the transaction of the change that they report; and the dispatcher that sends them.

    put ─▶ outbox ─ spread ─▶ deliveries, one for each webhook and channel that wants it ─ claim, send, mark ─▶ done

The dispatcher runs beside the reconciler and shares nothing with it but the database. It is level-triggered: what is
due is sent, however old it is. Several may run on one database. A delivery is sent at least once:
a dispatcher that dies between the sending and the mark leaves one that is sent again, under the same delivery id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from trainmaster.api.webhooks import Webhook
from trainmaster.control import failpoints
from trainmaster.control.context import log_failure
from trainmaster.control.notify import send, signing
from trainmaster.control.notify.channels import Config, Watched
from trainmaster.control.notify.send import Sent
from trainmaster.core.backoff import backoff_s
from trainmaster.core.errors import UsageError
from trainmaster.store import leases, outbox, webhooks
from trainmaster.store.database import Connection, Database
from trainmaster.store.outbox import DeliveryRow, NewsRow

GIVE_UP_S = 24 * 3600.0  # after the news came up; shown as given up from then on
_HOOK = "webhook:"

log = logging.getLogger(__name__)


def put(
    conn: Connection,
    *,
    key: str,
    topic: str,
    project: str,
    job_id: str | None,
    payload: Mapping[str, Any],
    at: datetime | None = None,
) -> bool:
    """Put one piece of news in; False where this key was put in before. No payload holds a secret."""
    at = at if at is not None else datetime.now(UTC)
    return outbox.insert_news(conn, key=key, topic=topic, project=project, job_id=job_id, payload=payload, at=at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds and counts of the dispatcher. A claim outlasts the longest sending, or two would send one thing."""

    tick_s: float = 1.0
    claim_s: float = 90.0
    webhook_s: float = send.WEBHOOK_S
    apprise_s: float = send.APPRISE_S
    first_rest_s: float = 5.0  # doubled with each try that fails
    longest_rest_s: float = 3600.0
    give_up_s: float = GIVE_UP_S
    per_channel: int = 2  # sendings at once: a receiver that hangs holds up its own news and no other's
    at_once: int = 64

    def rest_s(self, tries: int) -> float:
        return backoff_s(tries, first_s=self.first_rest_s, longest_s=self.longest_rest_s)


async def run(db: Database, home: Path, *, stop: asyncio.Event, pace: Pace | None = None) -> None:
    """Carry news out until `stop` is set."""
    dispatcher = _Dispatcher(db=db, home=home, pace=pace or Pace(), watched=Watched(home))
    try:
        while not stop.is_set():
            try:
                await dispatcher.poll()
            except Exception as error:  # a database that restarts must not end the dispatcher
                log_failure(log, "the outbox could not be looked at; trying again", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), dispatcher.pace.tick_s)
    finally:
        await dispatcher.close()


@dataclass(slots=True, kw_only=True)
class _Dispatcher:
    db: Database
    home: Path
    pace: Pace
    watched: Watched
    sending: Counter[str] = field(default_factory=Counter)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def poll(self) -> None:
        """Spread what is new, and begin to send what is due."""
        config = await asyncio.to_thread(self.watched.read)
        for delivery, hook in await asyncio.to_thread(self._find, config):
            self.sending[delivery.channel] += 1
            task = asyncio.create_task(self._deliver(delivery, hook, config), name=f"delivery {delivery.id}")
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def close(self) -> None:
        """Cut off sends in progress; the next dispatcher sends them again."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _find(self, config: Config) -> list[tuple[DeliveryRow, Webhook | None]]:
        if outbox.has_unspread(self.db):
            self._spread(config)
        with self.db.read() as conn:
            now = leases.clock(conn)
        due: list[tuple[DeliveryRow, Webhook | None]] = []
        for channel in outbox.due_channels(self.db, now=now):
            hook = self._find_hook(channel)
            if hook is None and channel not in config.channels:
                self._forget(channel, now)
                continue
            room = min(self.pace.per_channel - self.sending[channel], self.pace.at_once - len(self.tasks) - len(due))
            if room > 0:
                due += [(row, hook) for row in outbox.list_due(self.db, channel, now=now, limit=room)]
        return due

    def _spread(self, config: Config) -> None:
        with failpoints.around("commit spread"), self.db.write() as conn:
            hooks, at = webhooks.list_webhooks(conn), leases.clock(conn)
            for row in outbox.list_unspread(conn):
                names = [f"{_HOOK}{hook.id}" for hook in hooks if hook.wants(row.topic, row.project)]
                names += [name for name, way in config.channels.items() if way.wants(row.topic, row.project)]
                outbox.spread(conn, row, names, at=at)

    def _find_hook(self, channel: str) -> Webhook | None:
        if not channel.startswith(_HOOK):
            return None
        with self.db.read() as conn:
            hook = webhooks.find_webhook(conn, channel.removeprefix(_HOOK))
        return hook if hook is not None and hook.enabled else None

    def _forget(self, channel: str, now: datetime) -> None:
        """Nobody here can send it. A webhook was removed for good; a channel another server may know."""
        hook = channel.startswith(_HOOK)
        why = "given up: the webhook was removed or switched off" if hook else "given up: no server knows this channel"
        before = now + timedelta(days=1) if hook else now - timedelta(seconds=self.pace.give_up_s)
        with failpoints.around("commit given up"), self.db.write() as conn:
            outbox.give_up(conn, channel, why, before=before)

    async def _deliver(self, delivery: DeliveryRow, hook: Webhook | None, config: Config) -> None:
        """One try. Never raises; what cannot be noted now is sent again when the claim runs out."""
        try:
            until = await asyncio.to_thread(self._claim, delivery)
            if until is None:
                return
            began = time.monotonic()
            with failpoints.around("call deliver"):
                sent = await self._send(delivery, hook, config)
            took_s = time.monotonic() - began
            await asyncio.to_thread(self._mark, delivery, sent, claimed_until=until, took_s=took_s)
        except Exception:
            log.exception("delivery %s could not be noted", delivery.id)
        finally:
            self.sending[delivery.channel] -= 1

    def _claim(self, delivery: DeliveryRow) -> datetime | None:
        with failpoints.around("commit claim"), self.db.write() as conn:
            until = leases.clock(conn) + timedelta(seconds=self.pace.claim_s)
            return until if outbox.claim(conn, delivery, until=until) else None

    async def _send(self, delivery: DeliveryRow, hook: Webhook | None, config: Config) -> Sent:
        if hook is None:
            title, text = render(delivery.news, link=config.link)
            url = config.channels[delivery.channel].url
            return await send.send_apprise(url, title=title, body=text, limit_s=self.pace.apprise_s)
        name = f"{hook.id}.{delivery.id}"
        body = signing.render_body(message(delivery.news, delivery=name, link=config.link))
        try:
            key = await asyncio.to_thread(signing.signing_key, self.home, hook.id)
        except (UsageError, OSError) as error:
            return Sent(error=f"cannot be signed: {error}")
        headers = signing.webhook_headers(key, body, topic=delivery.news.topic, delivery=name)
        return await send.send_webhook(
            hook.url, body, headers, allow_hosts=config.allow_hosts, limit_s=self.pace.webhook_s
        )

    def _mark(self, delivery: DeliveryRow, sent: Sent, *, claimed_until: datetime, took_s: float) -> None:
        tries = delivery.tries + 1
        with failpoints.around("commit delivery"), self.db.write() as conn:
            now = leases.clock(conn)
            if sent.error is None:
                outbox.mark_done(conn, delivery.id, at=now, status=sent.status, took_s=took_s)
                return
            error, following = sent.error, now + timedelta(seconds=self.pace.rest_s(tries))
            over = sent.final or following > delivery.news.at + timedelta(seconds=self.pace.give_up_s)
            if over:
                error = f"given up after {tries} {'try' if tries == 1 else 'tries'}: {error}"
                log.warning("news %s was not delivered to %s: %s", delivery.news.key, delivery.channel, error)
            next_at = None if over else following
            outbox.mark_failed(
                conn, delivery.id, claimed_until=claimed_until, next_at=next_at, status=sent.status, error=error,
                took_s=took_s,
            )  # fmt: skip


def message(row: NewsRow, *, delivery: str, link: str = "") -> dict[str, Any]:
    """What a webhook is sent. `id` is the news's own; `delivery` is this receiver's, the same at every try.

    `link` is the address of the server, put before the path of the page; where nobody stated one it is the path.
    """
    url = row.payload.get("url")
    return {
        "v": 1,
        "id": row.id,
        "delivery": delivery,
        "topic": row.topic,
        "project": row.project,
        "job_id": row.job_id,
        "at": row.at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "data": {**row.payload, "url": f"{link}{url}"} if url else row.payload,
    }


def render(row: NewsRow, *, link: str = "") -> tuple[str, str]:
    """Title and text for people."""
    payload = row.payload
    name = payload.get("name") or row.project
    lines = [str(payload.get("message") or "")]
    lines += [f"{word}: {payload[word]}" for word in ("status", "reason", "action") if payload.get(word)]
    lines += [
        f"project: {row.project}",
        f"job: {row.job_id}" if row.job_id else "",
        f"{link}{payload.get('url') or ''}",
    ]
    return f"{row.topic}: {name}", "\n".join(line for line in lines if line)
