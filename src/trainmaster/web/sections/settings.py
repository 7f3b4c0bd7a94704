"""Settings: tokens, projects, webhooks and channels with a test of each, audit log. By the rules of the REST API."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from trainmaster.api.projects import Project, Projects
from trainmaster.api.webhooks import Webhook
from trainmaster.control.notify import channels, trial
from trainmaster.control.notify.send import Sent
from trainmaster.core.errors import UsageError
from trainmaster.core.ids import is_uuid
from trainmaster.core.money.cost import dollars
from trainmaster.core.roles import Role
from trainmaster.pages import deliveries, projects
from trainmaster.store import audit, costs, people, tokens, webhooks
from trainmaster.store.capacity import devices
from trainmaster.store.database import Database
from trainmaster.store.page_rows.projects import count_jobs, count_tokens, list_granted
from trainmaster.web import dependencies
from trainmaster.web.auth import Caller
from trainmaster.web.errors import Refused
from trainmaster.web.kept import Kept
from trainmaster.web.routes import costs as costs_api
from trainmaster.web.routes import queue as queue_api
from trainmaster.web.routes import tokens as tokens_api
from trainmaster.web.routes import webhooks as webhooks_api
from trainmaster.web.sections.form import Form, Posted, link, refuse_invalid
from trainmaster.web.templating import render

router = APIRouter(include_in_schema=False)
_SPENT_FRESH_S = 30.0  # as on Cost: every attempt is in it
_AUDIT = 50  # entries on a page
_MOST_TOKENS = 200
_MOST_SESSIONS = 200
_AMOUNT = re.compile(r"([0-9]{1,13})(?:\.([0-9]{1,2}))?")  # dollars
_NONE = "none"  # in a field: no cap, no limit
_MOST_ID = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What the last request came to. `secret` is shown this once."""

    text: str
    good: bool = True
    secret: str | None = None
    next: str | None = None  # what the owner of the secret types
    grant: str | None = None  # a project that may use no target yet
    unused: str | None = None  # a project that nothing has: its name may be misspelt


@router.get("/settings")
def show_settings(
    *, request: Request, db: dependencies.Db, who: dependencies.Viewer, offset: dependencies.Offset = 0,
    subject: Annotated[str, Query(pattern=r"^[^\x00]{0,256}$")] = "",
    project: Annotated[str | None, Query(pattern=dependencies.NAME)] = None,
) -> Response:  # fmt: skip
    """What the caller may see: who they are; as an admin the tokens and webhooks; of the server also the rest.

    `project`: the one whose cap and share the forms begin with.
    """
    return _page(request, db, who, offset=offset, subject=subject, project=project)


@router.post("/settings/tokens")
def create_token(request: Request, db: dependencies.Db, who: dependencies.Admin, form: Posted) -> Response:
    """Create a token; it is on this page and nowhere else."""

    def create() -> Notice:
        wish = tokens_api.TokenWish.model_validate(
            {"name": form.text("name"), "role": form.text("role"), "project": form.text("project") or None}
        )
        unused = _find_unused(db, who, wish.project)  # before it has this token
        made = _plain(tokens_api.create_token(wish, db, who))
        return Notice(
            unused=unused,
            text=f"Token of {made['name']}. It is shown only now: copy it.",
            secret=made["token"],
            next=_say_next(request),
            grant=wish.project if wish.role is not Role.VIEWER and _lacks_target(request, db, wish.project) else None,
        )

    return _create(request, db, who, form, create)


def _say_next(request: Request) -> str:
    """The first commands of somebody who was given a token, as docs/guides/server.md has them."""
    server = str(request.base_url).rstrip("/")
    return (
        "(umask 077; cat > ~/.trainmaster-token)    # paste the token, then Ctrl-D\n"
        f"export TRAINMASTER_SERVER={shlex.quote(server)} TRAINMASTER_TOKEN_FILE=~/.trainmaster-token\n"
        "trainmaster jobs"
    )


def _find_unused(db: Database, who: Caller, project: str | None) -> str | None:
    """The project, where no job, no token and no granted target has it."""
    if project is None or project == who.project:
        return None
    with db.read() as conn:
        reads = (count_jobs, count_tokens, list_granted)
        return None if any(read(conn, project=project) for read in reads) else project


def _lacks_target(request: Request, db: Database, project: str | None) -> bool:
    """Whether jobs of a project are refused on every target, because none was granted to it."""
    if project is None or request.app.state.trust_jobs:
        return False
    with db.read() as conn:
        return not list_granted(conn, project=project)


@router.post("/settings/tokens/revoke")
def revoke_token(db: dependencies.Db, who: dependencies.Admin, form: Posted) -> Response:
    tokens_api.revoke_token(form.required("name"), db, who)
    return RedirectResponse("/settings#tokens", status_code=303)


@router.post("/settings/own-tokens")
def create_own_token(request: Request, db: dependencies.Db, who: dependencies.User, form: Posted) -> Response:
    """Create a token of a signed-in person, with the role and project that they work with now."""
    session = _need_session(who)

    def create() -> Notice:
        wish = tokens_api.TokenWish(name=form.text("name"), role=who.role, project=who.project)
        made = tokens_api.issue(db, wish, by=who.name, person=session.person)
        text = f"Token {wish.name} of yours. It is shown only now: copy it."
        return Notice(text=text, secret=made, next=_say_next(request))

    return _create(request, db, who, form, create)


@router.post("/settings/own-tokens/revoke")
def revoke_own_token(db: dependencies.Db, who: dependencies.User, form: Posted) -> Response:
    name = form.required("name")
    if name not in {token.name for token in tokens.list_owned(db, _need_session(who).person)}:
        raise Refused(404, "not_found", f"no token {name} of yours")
    tokens_api.revoke(db, name, by=who.name)
    return RedirectResponse("/settings#own-tokens", status_code=303)


def _need_session(who: Caller) -> people.Session:
    if who.session is None:
        raise Refused(403, "forbidden", "this is for people who signed in by OpenID Connect")
    return who.session


@router.post("/settings/project")
def choose_project(db: dependencies.Db, who: dependencies.Viewer, form: Posted) -> Response:
    """Continue with another of the roles that the sign-in gave."""
    role, _, project = form.required("grant").partition(" ")
    session = _need_session(who)
    if (role, project or None) not in session.grants:
        raise Refused(403, "forbidden", "this sign-in has no such role")
    with db.write() as conn:
        people.choose(conn, session.id, role=Role(role), project=project or None)
    return RedirectResponse("/settings", status_code=303)


@router.post("/settings/sessions/end")
def end_session(db: dependencies.Db, who: dependencies.Operator, form: Posted) -> Response:
    """End the session of a person; who may sign in is the provider's and the settings' to say."""
    number = form.number("id", most=_MOST_ID)
    with db.write() as conn:
        name = people.end(conn, number) if number is not None else None
        if name is not None:
            audit.record(conn, who=who.name, action="session.end", subject=f"person:{name}")
    return RedirectResponse("/settings#sessions", status_code=303)


@router.post("/settings/budgets")
def set_cap(request: Request, db: dependencies.Db, who: dependencies.User, form: Posted) -> Response:
    """Set what a project may spend, or remove it: an empty field must not, it may be one that nobody filled."""

    def change() -> Notice:
        project = _name(form)
        costs_api.need_budgets(who)  # before a cap is named
        period: Literal["total", "month"] = "total" if form.text("period") == "total" else "month"
        when, dollars_text = "in all" if period == "total" else "each month", form.text("dollars").removeprefix("$")
        if dollars_text == _NONE:
            _refuse_unseen(form, project, period, _find_cap(db, project, period))
            costs_api.remove_budget(project, period, db, who)
            return Notice(text=f"Project {project} has no cap {when} any more.")
        amount = _AMOUNT.fullmatch(dollars_text)
        if amount is None:
            raise Refused(422, "bad_form", f"dollars: write an amount as 5000 or 12.50, or {_NONE} for no cap")
        _refuse_unseen(form, project, period, _find_cap(db, project, period))
        cap = costs_api.Cap(cap_cents=int(amount[1]) * 100 + int((amount[2] or "").ljust(2, "0")))
        costs_api.set_budget(project, period, cap, db, who)
        return Notice(
            text=f"Project {project} may spend {dollars(cap.cap_cents)} {when}.", unused=_find_unused(db, who, project)
        )

    return _create(request, db, who, form, change, refusal="Nothing was set")


@router.post("/settings/shares")
def set_share(request: Request, db: dependencies.Db, who: dependencies.Operator, form: Posted) -> Response:
    """Set what a project may have of the machines that our own queue gives out. An empty field changes nothing."""

    def change() -> Notice:
        project = _name(form)
        now = devices.list_shares(db).get(project)
        quota = None if form.text("quota") == _NONE else form.number("quota", most=1_000_000)
        if not form.text("quota") and now is not None:
            quota = now.quota
        try:
            weight = float(form.text("weight") or (now.weight if now is not None else 1))
        except ValueError:
            raise Refused(422, "bad_form", "weight: a number over 0, as 2 or 0.5") from None
        _refuse_unseen(form, project, "quota", str(now.quota) if now is not None and now.quota is not None else _NONE)
        _refuse_unseen(form, project, "weight", f"{now.weight if now is not None else 1:.10g}")
        queue_api.set_share(project, queue_api.ShareBody(weight=weight, quota=quota), db, who)
        most = f"{quota:,} device{'s' if quota != 1 else ''} at once" if quota is not None else "any number of devices"
        return Notice(
            text=f"Project {project} may hold {most}, with weight {weight:g}.", unused=_find_unused(db, who, project)
        )

    return _create(request, db, who, form, change, refusal="Nothing was set")


def _find_cap(db: Database, project: str, period: str) -> str:
    with db.read() as conn:
        caps = {row.period: row.cap_cents for row in costs.list_budgets(conn, project=project)}
    return str(caps.get(period, _NONE))


def _refuse_unseen(form: Form, project: str, field: str, now: str) -> None:
    """Refuse to overwrite what was set since the form was filled. A form that began empty has seen nothing."""
    seen = form.text(f"seen_{field}")
    if seen and form.text("seen") == project and seen != now:
        shown = dollars(int(now)) if field in costs.PERIODS and now != _NONE else now
        what = {"month": "cap each month", "total": "cap in all"}.get(field, field)
        message = (
            f"the {what} of project {project} was changed meanwhile, to {shown}; send the form again to overwrite it"
        )
        raise Refused(409, "changed", message)


def _name(form: Form) -> str:
    project = form.required("project")
    if not re.fullmatch(dependencies.NAME, project):
        raise Refused(422, "bad_form", f"project: {project[:63]} is no name of a project")
    try:
        return dependencies.refuse_secret(project)
    except ValueError as error:
        raise Refused(422, "bad_form", f"project: {error}") from None


@router.post("/settings/webhooks")
def create_webhook(request: Request, db: dependencies.Db, who: dependencies.Admin, form: Posted) -> Response:
    """Create a webhook; its signing key is on this page and nowhere else."""

    def create() -> Notice:
        wish = webhooks_api.HookWish.model_validate(
            {"url": form.text("url"), "topics": form.every("topic"), "project": form.text("project") or None}
        )
        made = _plain(webhooks_api.create_webhook(wish, request, db, who))
        text = "Key that signs the messages of this webhook. It is shown only now: copy it."
        return Notice(text=text, secret=made["signing_key"])

    return _create(request, db, who, form, create)


@router.post("/settings/webhooks/switch")
def switch_webhook(db: dependencies.Db, who: dependencies.Admin, form: Posted) -> Response:
    switch = webhooks_api.Switch(enabled=form.text("enabled") == "1")
    webhooks_api.switch_webhook(form.required("id"), switch, db, who)
    return RedirectResponse("/settings#webhooks", status_code=303)


@router.post("/settings/webhooks/remove")
def remove_webhook(db: dependencies.Db, who: dependencies.Admin, form: Posted) -> Response:
    webhooks_api.remove_webhook(form.required("id"), db, who)
    return RedirectResponse("/settings#webhooks", status_code=303)


@router.post("/settings/webhooks/test")
async def test_webhook(request: Request, db: dependencies.Db, who: dependencies.Admin, form: Posted) -> Response:
    """Send a test to a webhook now, and say what it answered."""
    hook = await run_in_threadpool(_find_hook, db, form.required("id"), who)
    sent = await trial.try_webhook(request.app.state.home, hook, by=who.name)
    return await run_in_threadpool(_tested, request, db, who, sent, hook.url)


@router.post("/settings/channels/test")
async def test_channel(request: Request, db: dependencies.Db, who: dependencies.Operator, form: Posted) -> Response:
    """Send a test through a channel now."""
    name = form.required("name")
    sent = await trial.try_channel(request.app.state.home, name, by=who.name)
    return await run_in_threadpool(_tested, request, db, who, sent, name)


def _tested(request: Request, db: Database, who: Caller, sent: Sent, name: str) -> Response:
    with db.write() as conn:
        detail = {"status": sent.status, "error": sent.error}
        audit.record(conn, who=who.name, action="notify.test", subject=f"notify:{name}"[:255], detail=detail)
    answered = f" (HTTP {sent.status})" if sent.status is not None else ""
    if sent.error is None:
        return _page(request, db, who, notice=Notice(text=f"The test arrived at {name}{answered}."))
    return _page(request, db, who, notice=Notice(text=f"The test to {name} failed: {sent.error}", good=False))


def _find_hook(db: Database, hook_id: str, who: Caller) -> Webhook:
    with db.read() as conn:
        hook = webhooks.find_webhook(conn, hook_id)
    if hook is None or (who.project is not None and hook.project != who.project):
        raise Refused(404, "not_found", "no such webhook")
    return hook


def _create(
    request: Request, db: Database, who: Caller, form: Form, create: Callable[[], Notice], *,
    refusal: str = "Nothing was created",
) -> Response:  # fmt: skip
    """The page with what was created or set, or with why not and with what was typed."""
    try:
        return _page(request, db, who, notice=create())
    except ValidationError as error:
        refused = refuse_invalid(error)
    except Refused as error:
        if error.status not in (404, 409, 422):
            raise
        refused = error
    # Where the faults are the message, they would be read twice.
    told = [f"{fault.path}: {fault.message}" for fault in refused.faults if fault.message not in refused.message]
    notice = Notice(text="; ".join([f"{refusal}: {refused.message}", *told]), good=False)
    return _page(request, db, who, notice=notice, typed=form, status_code=refused.status)


def _page(
    request: Request, db: Database, who: Caller, *, offset: int = 0, subject: str = "", notice: Notice | None = None,
    typed: Form | None = None, status_code: int = 200, project: str | None = None,
) -> Response:  # fmt: skip
    admin, operator = who.may(Role.ADMIN), who.runs_server
    hooks: Sequence[Webhook] = ()
    if admin:
        with db.read() as conn:
            hooks = webhooks.list_webhooks(conn, project=who.project)
    entries = audit.list_audit(db, subject=subject or None, limit=_AUDIT + 1, offset=offset) if operator else []
    listed = None
    if admin:
        kept: Kept = request.app.state.kept
        key = ("spent", who.project)
        spent = kept.read(key, lambda: projects.read_spent(db, project=who.project), for_s=_SPENT_FRESH_S)
        listed = projects.read(db, project=who.project, spent=spent)
    wanted = who.project or project
    names, trouble, has_link = _channels(request) if operator else ((), "", True)
    return render(
        "settings.html",
        who=who,
        admin=admin,
        operator=operator,
        notice=notice,
        typed=typed,
        form=request.url.path,
        status_code=status_code,
        sessions=_sessions(request, db) if operator else None,
        roles=list(Role),
        own_tokens=tokens.list_owned(db, who.session.person) if who.session is not None else (),
        own_days=tokens.PERSONAL.days,
        tokens=tokens.list_tokens(db, project=who.project, limit=_MOST_TOKENS) if admin else (),
        projects=listed,
        chosen=_find_named(listed, wanted),
        seen=_find_named(listed, typed.text("project") if typed is not None else wanted),
        hooks=hooks,
        failing=_failing(db, hooks),
        topics=get_args(webhooks_api.Topic),
        channels=names,
        trouble=trouble,
        audit=entries[:_AUDIT],
        more=len(entries) > _AUDIT,
        offset=offset,
        subject=subject,
        size=_AUDIT,
        link=link,
        place_of=_place_of,
        has_link=has_link,
    )


def _find_named(listed: Projects | None, name: str | None) -> Project | None:
    return next((each for each in listed.projects if each.name == name), None) if listed is not None else None


def _place_of(subject: str) -> str | None:
    """The page of what an entry of the audit log is about."""
    kind, _, name = subject.partition(":")
    if kind in ("job", "set") and is_uuid(name):
        return f"/{kind}s/{name}"
    if kind == "node" and name:
        return link("/nodes/one", node=name)
    return {"token": "/settings#tokens", "budget": "/settings#projects", "share": "/settings#projects"}.get(kind)


def _sessions(request: Request, db: Database) -> list[people.Session] | None:
    """Who is signed in by OpenID Connect; None where this server has no such sign-in."""
    if request.app.state.sign_in is None:
        return None
    return people.list_sessions(db, at=datetime.now(UTC), limit=_MOST_SESSIONS)


def _failing(db: Database, hooks: Sequence[Webhook]) -> dict[str, Any]:
    """By webhook: its newest delivery that failed or waits."""
    newest = {hook.id: deliveries.read(db, webhook=hook.id, failed=True, limit=1).deliveries for hook in hooks[:50]}
    return {hook: rows[0] for hook, rows in newest.items() if rows}


def _channels(request: Request) -> tuple[tuple[tuple[str, channels.Channel], ...], str, bool]:
    """The channels by name, or why they cannot be read, and whether messages have the address of this server.

    Their URLs are secrets, and shown to nobody.
    """
    try:
        config = channels.load(request.app.state.home)
    except UsageError as error:
        return (), str(error).replace(str(request.app.state.home), "HOME"), True
    return tuple(config.channels.items()), "", bool(config.link)


def _plain(answer: Response) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(bytes(answer.body))
    return body
