"""Nodes: the map of machines and GPUs, the history of each, and the buttons that drain and give back."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from trainmaster import targets
from trainmaster.api.nodes import NodeHistory
from trainmaster.control.queueing import machines
from trainmaster.pages import node_history, node_map
from trainmaster.pages.parts import target_names
from trainmaster.pages.parts.node_journal import moment_of, read_targets
from trainmaster.store.database import Database
from trainmaster.web import dependencies
from trainmaster.web.auth import Caller
from trainmaster.web.errors import Refused
from trainmaster.web.sections import remedies
from trainmaster.web.sections.form import Posted, clean_word, link
from trainmaster.web.templating import render

router = APIRouter(include_in_schema=False)
State = Literal["bad", "used", "free", "out"]
NodeName = Annotated[str, Query(max_length=255)]
_MOST_OUT = 1_000_000
_FRESH_S = 5.0  # the map looks at every check of every node; an open page asks every 10 s
_WORDS: Mapping[str, Any] = {"link": link, "moment_of": moment_of}  # for the templates


@router.get("/nodes")
def show_map(
    *,
    request: Request,
    db: dependencies.Db,
    who: dependencies.Viewer,
    kept: dependencies.Answers,
    state: State | None = None,
    find: str = "",
    limit: Annotated[int, Query(ge=1, le=node_map.MOST)] = 60,
    offset: dependencies.Offset = 0,
    part: bool = False,
) -> Response:
    """Every machine that the caller's jobs were on; for the whole server also those that its operator has checked."""
    find = clean_word(find)
    home = _home(request, who)
    page = kept.read(
        ("nodes", who.project, state, find, limit, offset),
        lambda: node_map.read(db, home=home, project=who.project, state=state, find=find, limit=limit, offset=offset),
        for_s=_FRESH_S,
    )

    def here(**changes: object) -> str:
        asked = {"state": state, "find": find, "limit": limit if limit != 60 else None, "offset": offset}
        return link("/nodes", **{**asked, **changes})

    template = "nodes_part.html" if part else "nodes.html"
    names = target_names.read(db)
    return render(template, page=page, here=here, who=who, names=names, shorten=target_names.shorten, **_WORDS)


@router.get("/nodes/one")
def show_history(
    request: Request, db: dependencies.Db, who: dependencies.Viewer, node: NodeName = "", gpu: NodeName = ""
) -> Response:
    """What checks said of a node, or of a GPU by its serial number."""
    node, gpu = (text.replace("\x00", "").strip() for text in (node, gpu))
    if not node and not gpu:
        return RedirectResponse("/nodes", status_code=303)
    home = _home(request, who)
    page = node_history.read(db, node=node, gpu=gpu or None, home=home, project=who.project)
    if not page.lines and not page.used_by and page.out_since is None and not page.changes:
        raise Refused(404, "not_found", f"nothing is known of {page.word}")
    again = _plan_check(db, request.app.state.home, page) if who.runs_server and not page.gpu else None
    words: dict[str, Any] = {
        "page": page,
        "rows": node_history.merge(page),
        "names": target_names.read(db),
        "again": again,
    }
    return render("node.html", who=who, **words, **_WORDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """How a node is checked again."""

    command: str
    target: str | None  # None: not known
    elsewhere: bool = False  # the command is for another machine than that of this server


def _plan_check(db: Database, home: Path, page: NodeHistory) -> Again:
    word = page.target
    if word is None:  # no job and no check has named it; the queue may know it
        places = machines.list_places(db, page.word, checked_on=read_targets(home).get(page.word))
        word = targets.spell_place(places[0]) if len(places) == 1 else None
    stated = targets.find_traits(word) if word is not None else None
    if stated is not None and stated.here:
        return Again(command="trainmaster check", target=word, elsewhere=page.word != socket.gethostname())
    return Again(command=shlex.join(["trainmaster", "check", "--on", word or "TARGET"]), target=word)


@router.get("/nodes/drain")
def ask_drain(
    request: Request,
    db: dependencies.Db,
    who: dependencies.Operator,
    node: NodeName = "",
    most: Annotated[int | None, Query(ge=0, le=_MOST_OUT)] = None,
) -> Response:
    """The plan, as `trainmaster remedy` prints it, and the button that does it."""
    if not node:
        return RedirectResponse("/nodes", status_code=303)
    plan = remedies.plan_drain(db, request.app.state.home, node, most=most)
    seen = _read_own(db, request.app.state.home, plan)
    return render("node_remedy.html", plan=plan, seen=seen, verb="drain", most=most, fault=None, who=who, **_WORDS)


@router.post("/nodes/drain")
def drain(request: Request, db: dependencies.Db, who: dependencies.Operator, form: Posted) -> Response:
    """Drain a node by the rules of `trainmaster remedy --yes`."""
    node, most = form.required("node"), form.number("most", most=_MOST_OUT)
    plan = remedies.plan_drain(db, request.app.state.home, node, most=most)
    reason = form.required("reason") if plan.own else ""
    fault = None
    if plan.refusal is None:
        fault = remedies.drain(db, request.app.state.home, plan, by=who.name, reason=reason)
    return _done(db, request.app.state.home, plan, who, verb="drain", fault=fault, most=most)


@router.get("/nodes/readmit")
def ask_readmit(
    request: Request, db: dependencies.Db, who: dependencies.Operator, node: NodeName = "", allow_warn: bool = False
) -> Response:
    """Whether a drained node may return, as `trainmaster readmit` says it, and the button that gives it back."""
    if not node:
        return RedirectResponse("/nodes", status_code=303)
    plan = remedies.plan_readmit(db, request.app.state.home, node, allow_warn=allow_warn)
    seen = _read_own(db, request.app.state.home, plan)
    return render("node_remedy.html", plan=plan, seen=seen, verb="readmit", most=None, fault=None, who=who, **_WORDS)


@router.post("/nodes/readmit")
def readmit(request: Request, db: dependencies.Db, who: dependencies.Operator, form: Posted) -> Response:
    """Give a node back by the rules of `trainmaster readmit --yes`."""
    plan = remedies.plan_readmit(db, request.app.state.home, form.required("node"))
    fault = remedies.resume(db, request.app.state.home, plan, by=who.name) if plan.refusal is None else None
    return _done(db, request.app.state.home, plan, who, verb="readmit", fault=fault)


def _done(
    db: Database, home: Path, plan: remedies.Remedy, who: Caller, *, verb: str, fault: str | None,
    most: int | None = None,
) -> Response:  # fmt: skip
    seen = _read_own(db, home, plan)
    if plan.refusal is None and fault is None:
        # A machine that nothing is known of but its drain has no page once it is given back.
        known = seen is None or seen.lines or seen.used_by or seen.out_since
        return RedirectResponse(link("/nodes/one", node=plan.node) if known else "/queue", status_code=303)
    words = {"plan": plan, "seen": seen, "verb": verb, "most": most, "fault": fault, "who": who}
    return render("node_remedy.html", status_code=409, **words, **_WORDS)


def _read_own(db: Database, home: Path, plan: remedies.Remedy) -> NodeHistory | None:
    """What is known of a machine of our own queue, for the person who decides about it without asking for evidence."""
    return node_history.read(db, node=plan.node, home=home) if plan.own else None


def _home(request: Request, who: Caller) -> Path | None:
    """The operator's own records are of the whole server: for callers that see all of it."""
    home: Path = request.app.state.home
    return home if who.project is None else None
