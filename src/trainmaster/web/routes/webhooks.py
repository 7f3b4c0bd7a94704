"""Webhooks: signed notifications of jobs and budgets."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import Path, Request
from pydantic import Field
from starlette.responses import Response

from trainmaster.api.codec import fill
from trainmaster.api.webhooks import Deliveries, NewWebhook, Webhook, Webhooks
from trainmaster.control.notify import channels
from trainmaster.control.notify.send import check_url
from trainmaster.control.notify.signing import signing_key
from trainmaster.core.errors import Fault, UsageError
from trainmaster.core.ids import UUID_PATTERN
from trainmaster.pages import deliveries
from trainmaster.store import audit, webhooks
from trainmaster.store.database import Database
from trainmaster.web import dependencies
from trainmaster.web.auth import Caller
from trainmaster.web.errors import Refused
from trainmaster.web.routes import Body, group, reply

router = group("webhooks", prefix="/v1/webhooks")
Topic = Literal[
    "job.started", "job.completed", "job.failed", "job.cancelled", "job.stalled", "job.retried", "budget.warning",
    "budget.exceeded", "instance.leaked",
]  # fmt: skip
HookId = Annotated[str, Path(alias="id", pattern=f"^{UUID_PATTERN}$")]


class HookWish(Body):
    """A webhook to create."""

    url: str = Field(min_length=1, max_length=2048, description="https URL of another machine; without credentials")
    topics: list[Topic] = Field(default=[], max_length=32, description="topics to subscribe to; none: all")
    project: dependencies.Name | None = Field(default=None, description="limit to this project; null: all projects")


class Switch(Body):
    """State of a webhook: on or off."""

    enabled: bool = Field(strict=True)


@router.get("", response_model=Webhooks, dependencies=[dependencies.admins])
def list_webhooks(db: dependencies.Db, project: dependencies.Project) -> Response:
    """Webhooks, oldest first."""
    with db.read() as conn:
        rows = webhooks.list_webhooks(conn, project=project)
    return reply(Webhooks(webhooks=tuple(rows)))


@router.post("", response_model=NewWebhook, status_code=201)
def create_webhook(wish: HookWish, request: Request, db: dependencies.Db, who: dependencies.Admin) -> Response:
    """Create a webhook. Its signing key is only in this answer."""
    dependencies.need_all_of(who, wish.project)
    try:
        check_url(wish.url, allow_hosts=channels.load(request.app.state.home).allow_hosts)
    except UsageError as error:
        fault = Fault(path="url", message=str(error))
        raise Refused(422, "bad_url", str(error), faults=[fault]) from error
    hook_id = str(uuid.uuid4())
    key = signing_key(request.app.state.home, hook_id)  # first: a webhook without a key could not sign
    with db.write() as conn:
        at = datetime.now(UTC)
        webhooks.insert_webhook(conn, hook_id, url=wish.url, project=wish.project, topics=wish.topics, at=at)
        detail = {"url": wish.url, "project": wish.project, "topics": list(wish.topics)}
        audit.record(conn, who=who.name, action="webhook.create", subject=f"webhook:{hook_id}", detail=detail)
        row = webhooks.find_webhook(conn, hook_id)
    assert row is not None
    return reply(fill(NewWebhook, row, signing_key=key), status_code=201)


@router.patch("/{id}", response_model=Webhook)
def switch_webhook(hook_id: HookId, switch: Switch, db: dependencies.Db, who: dependencies.Admin) -> Response:
    """Switch a webhook on or off."""
    _find(db, hook_id, who)
    with db.write() as conn:
        webhooks.enable_webhook(conn, hook_id, enabled=switch.enabled)
        action = "webhook.enable" if switch.enabled else "webhook.disable"
        audit.record(conn, who=who.name, action=action, subject=f"webhook:{hook_id}")
    return reply(_find(db, hook_id, who))


@router.get("/{id}/deliveries", response_model=Deliveries)
def list_webhook_deliveries(
    hook_id: HookId,
    db: dependencies.Db,
    who: dependencies.Admin,
    failed: dependencies.Failed = False,
    limit: dependencies.Limit = 50,
) -> Response:
    """Deliveries to a webhook, newest first: delivered, waiting for a retry, or failed."""
    _find(db, hook_id, who)
    return reply(deliveries.read(db, webhook=hook_id, failed=failed, limit=limit))


@router.delete("/{id}", status_code=204, response_class=Response)
def remove_webhook(hook_id: HookId, db: dependencies.Db, who: dependencies.Admin) -> Response:
    """Remove a webhook; its pending deliveries are dropped."""
    _find(db, hook_id, who)
    with db.write() as conn:
        webhooks.remove_webhook(conn, hook_id)
        audit.record(conn, who=who.name, action="webhook.remove", subject=f"webhook:{hook_id}")
    return Response(status_code=204)


def _find(db: Database, hook_id: str, who: Caller) -> Webhook:
    with db.read() as conn:
        row = webhooks.find_webhook(conn, hook_id)
    if row is None or (who.project is not None and row.project != who.project):
        raise Refused(404, "not_found", f"no webhook {hook_id}")
    return row
