"""The page of a job names its machine as Nodes does, with a link to the page of that machine where there is one."""

from __future__ import annotations

import re
from pathlib import Path

from pages import samples
from trainmaster.core.events import Event
from trainmaster.core.roles import Role
from trainmaster.core.states import Stage, Status
from trainmaster.pages import job as job_page
from trainmaster.report.html import render_html
from trainmaster.store import attempts
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from web.conftest import BASE, LOCAL, TestClient
from web.furnished import issue


def begin(db: Database, nodes: list[str] | None, *, checks: bool) -> samples.Story:
    story = samples.Story(db, samples.spec(target="ssh:hosts.yaml")).start()
    with db.write() as conn:
        attempts.set_handle(conn, story.attempt, {"folder": "/x"} | ({"nodes": nodes} if nodes is not None else {}))
    story.tell([Event(phase="PROJECT", event="start", data={"attempt": story.attempt, "host": "vm"})])
    if checks:
        story.tell(samples.preflight())
    return story.move(Stage.RUNNING)


def facts(text: str) -> dict[str, str]:
    return dict(re.findall(r"<div><dt>(Host|Machines?)</dt><dd>(.*?)</dd>", text))


def test_a_machine_has_its_own_name_and_a_link(db: Database, client: TestClient) -> None:
    story = begin(db, ["gpu-03"], checks=False)
    assert facts(client.get(f"/jobs/{story.id}").text) == {"Machine": '<a href="/nodes/one?node=gpu-03">gpu-03</a>'}
    assert client.get("/nodes/one?node=gpu-03").status_code == 200
    story.end_attempt().finish(Status.COMPLETED)
    assert facts(client.get(f"/jobs/{story.id}").text) == {"Machine": "gpu-03"}
    assert client.get("/nodes/one?node=gpu-03").status_code == 404, "it was never checked"
    page = job_page.read(db, story.id)
    assert page is not None and facts(render_html(page)) == {"Machine": "gpu-03"}, "a report has no links into a server"


def test_many_machines_are_named_and_counted(db: Database, client: TestClient) -> None:
    story = begin(db, [f"gpu-{number:02}" for number in range(10)], checks=False)
    shown = facts(client.get(f"/jobs/{story.id}").text)["Machines"]
    assert shown.count("<a ") == 8 and shown.endswith("gpu-07</a> and 2 more")
    odd = begin(db, ['a/b "c"&d'], checks=False)
    assert "node=a%2Fb+%22c%22%26d" in facts(client.get(f"/jobs/{odd.id}").text)["Machine"]


def test_where_the_target_names_none_the_checks_do_and_else_the_host(db: Database, tmp_path: Path) -> None:
    app = create_app(db, tmp_path, reconcile=False, require_token=True)
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        client.headers.update(issue(db, "ann", Role.USER, "research"))
        checked = begin(db, None, checks=True)
        checked.end_attempt().finish(Status.COMPLETED)
        shown = facts(client.get(f"/jobs/{checked.id}").text)
        assert list(shown) == ["Machine"] and "/nodes/one?node=" in shown["Machine"]
        address = re.search(r'href="([^"]+)"', shown["Machine"])
        assert address is not None and client.get(address[1]).status_code == 200
        assert facts(client.get(f"/jobs/{begin(db, None, checks=False).id}").text) == {"Host": "vm"}
