"""Caps and shares of projects: seen and set in Settings, seen in Queue, and named where one is spent."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from trainmaster.core.money.cost import month_of
from trainmaster.core.roles import Role
from trainmaster.store import audit, costs
from trainmaster.store.capacity import devices
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from trainmaster.web.kept import Kept
from web.conftest import BASE, LOCAL
from web.furnished import issue
from web.test_cost_page import HOUR, run


def projects_card(client: TestClient) -> str:
    return client.get("/settings").text.partition('id="projects"')[2].partition("</section>")[0]


def test_a_cap_is_set_seen_with_what_is_used_of_it_and_removed(db: Database, client: TestClient) -> None:
    run(db, cents=500, start=datetime.now(UTC) - HOUR, project="lab")
    set_cap = client.post("/settings/budgets", data={"project": "lab", "dollars": "12.5", "period": "total"})
    assert set_cap.status_code == 200 and "Project lab may spend $12.50 in all." in set_cap.text
    assert "$5.00 of $12.50" in projects_card(client)
    for typed in ("1e3", "-1", "1.234", "much"):
        bad = client.post("/settings/budgets", data={"project": "lab", "dollars": typed, "period": "total"})
        assert bad.status_code == 422 and "Nothing was set: dollars:" in bad.text and f'value="{typed}"' in bad.text
    assert client.post("/settings/budgets", data={"project": "a b", "dollars": "1"}).status_code == 422
    empty = client.post("/settings/budgets", data={"project": "lab", "dollars": "", "period": "total"})
    assert empty.status_code == 422 and "none for no cap" in empty.text and "$12.50" in projects_card(client)
    gone = client.post("/settings/budgets", data={"project": "lab", "dollars": "none", "period": "total"})
    assert gone.status_code == 200 and "$12.50" not in projects_card(client)
    assert client.post("/settings/budgets", data={"project": "lab", "dollars": "none"}).status_code == 404
    assert [entry.action for entry in audit.list_audit(db)] == ["budget.remove", "budget.set"]


def test_what_was_spent_without_a_cap_is_shown(db: Database, client: TestClient) -> None:
    now = datetime.now(UTC)
    run(db, cents=8_000, start=month_of(now).start, hours=0.001, project="lab")
    run(db, cents=70_000, start=now - timedelta(days=70), project="lab")
    run(db, cents=None, start=now - timedelta(days=70), project="lab")
    with db.write() as conn:
        costs.set_budget(conn, "capped", "month", 1000, at=now)
        devices.set_share(conn, "idle", weight=1, quota=1)
    rows = projects_card(client).partition("<tbody>")[2].partition("</tbody>")[0].split("<tr>")[1:]
    spent = {re.findall(">([^<]+)<", row)[0]: re.findall('<td class="num">(.*?)</td>', row)[3:5] for row in rows}
    assert spent == {
        "capped": ["$0.00 of $10.00", "–"],
        "idle": ["–", "–"],
        "lab": ["$0.08", '$700.08<span class="under">and 1 attempt without a price</span>'],
    }


def test_the_page_of_costs_leads_to_the_form_of_a_budget(db: Database, tmp_path: Path) -> None:
    app = create_app(db, tmp_path, reconcile=False, require_token=True)
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        whole, own = issue(db, "boss", Role.ADMIN), issue(db, "ann", Role.ADMIN, "lab")
        user = issue(db, "bob", Role.USER, "lab")

        def places(who: dict[str, str], path: str = "/cost") -> list[str]:
            client.app.state.kept = Kept()  # type: ignore[attr-defined]
            return re.findall('<a id="set-budget" href="([^"]+)">', client.get(path, headers=who).text)

        def check() -> None:
            assert places(whole) == ["/settings#projects"] and places(user) == []
            assert places(own) == [] and places(whole, "/cost?project=lab") == ["/settings?project=lab#projects"]

        check()  # nothing has cost anything
        run(db, cents=500, start=datetime.now(UTC) - HOUR, project="lab")
        check()
        with db.write() as conn:
            costs.set_budget(conn, "lab", "month", 1000, at=datetime.now(UTC))
        check()
        assert 'action="/settings/budgets"' in client.get("/settings?project=lab", headers=whole).text
        assert 'action="/settings/budgets"' not in client.get("/settings?project=lab", headers=own).text


def test_a_share_is_set_and_seen_in_settings_and_queue(db: Database, client: TestClient) -> None:
    done = client.post("/settings/shares", data={"project": "lab", "quota": "1", "weight": "2"})
    assert done.status_code == 200 and "Project lab may hold 1 device at once, with weight 2." in done.text
    assert "0 of 1<" in projects_card(client)
    queue = client.get("/queue").text.partition('id="shares"')[2].partition("</section>")[0]
    assert ">lab<" in queue and ">1<" in queue
    for field, value in (("quota", "-1"), ("weight", "0"), ("weight", "heavy"), ("weight", "nan"), ("project", "")):
        typed = {"project": "lab", "quota": "1", "weight": "1", field: value}
        assert client.post("/settings/shares", data=typed).status_code == 422, (field, value)
    assert devices.list_shares(db)["lab"].quota == 1
    assert [entry.action for entry in audit.list_audit(db)] == ["share.set"]


def test_an_empty_field_of_a_share_keeps_what_there_is(db: Database, client: TestClient) -> None:
    for typed, quota, weight in (
        ({"quota": "3", "weight": "2"}, 3, 2.0),
        ({"quota": "", "weight": "0.5"}, 3, 0.5),
        ({"quota": "4", "weight": ""}, 4, 0.5),
        ({}, 4, 0.5),
        ({"quota": "none", "weight": ""}, None, 0.5),
    ):
        assert client.post("/settings/shares", data={"project": "lab", **typed}).status_code == 200
        share = devices.list_shares(db)["lab"]
        assert (share.quota, share.weight) == (quota, weight), typed


def typed_in(text: str, *, hidden: bool = False) -> list[dict[str, str]]:
    """The fields of the forms for a cap and for a share, as they begin."""
    card = text.partition('id="projects"')[2].partition("</section>")[0]
    found = []
    for form in card.split("<form ")[1:]:
        fields = dict(re.findall(r'name="(\w+)"[^>]* value="([^"]*)"', form))
        if not hidden:
            fields = {name: value for name, value in fields.items() if not name.startswith("seen")}
        found.append(fields | dict.fromkeys(["period"] * ('value="total" selected' in form), "total"))
    return found


def test_the_forms_begin_with_what_a_project_has(db: Database, client: TestClient) -> None:
    with db.write() as conn:
        costs.set_budget(conn, "lab", "total", 123_456, at=datetime.now(UTC))
        costs.set_budget(conn, "other", "month", 700, at=datetime.now(UTC))
        devices.set_share(conn, "lab", weight=0.5, quota=6)
    assert 'href="/settings?project=lab#projects"' in projects_card(client)
    assert typed_in(client.get("/settings?project=lab").text) == [
        {"project": "lab", "dollars": "1234.56", "period": "total"},
        {"project": "lab", "quota": "6", "weight": "0.5"},
    ]
    assert typed_in(client.get("/settings?project=other").text) == [
        {"project": "other", "dollars": "7.00"},
        {"project": "other", "quota": "none", "weight": "1"},
    ]
    for path in ("/settings", "/settings?project=absent"):
        assert typed_in(client.get(path).text) == [
            {"project": "", "dollars": ""},
            {"project": "", "quota": "", "weight": ""},
        ]
    for fields, path in zip(typed_in(client.get("/settings?project=lab").text), ("budgets", "shares"), strict=True):
        assert client.post(f"/settings/{path}", data=fields).status_code == 200
    assert devices.list_shares(db)["lab"].quota == 6 and "$1,234.56" in projects_card(client), "as they were"


def test_what_another_admin_set_meanwhile_is_not_overwritten_unseen(db: Database, client: TestClient) -> None:
    def state() -> tuple[object, ...]:
        with db.read() as conn:
            caps = [(row.period, row.cap_cents) for row in costs.list_budgets(conn, project="lab")]
        return *caps, devices.list_shares(db).get("lab")

    for period, cents in (("month", 700), ("total", 500_000)):
        with db.write() as conn:
            costs.set_budget(conn, "lab", period, cents, at=datetime.now(UTC))
            devices.set_share(conn, "lab", weight=2.0, quota=4)
    cap, share = typed_in(client.get("/settings?project=lab").text, hidden=True)
    client.put("/v1/budgets/lab/month", json={"cap_cents": 100})  # somebody else
    client.put("/v1/shares/lab", json={"weight": 2.0, "quota": 1})
    before = state()
    for path, typed, now in (
        ("budgets", {**cap, "dollars": "9"}, "cap each month of project lab was changed meanwhile, to $1.00"),
        ("budgets", {**cap, "dollars": "none"}, "cap each month of project lab was changed meanwhile, to $1.00"),
        ("shares", {**share, "weight": "3"}, "quota of project lab was changed meanwhile, to 1"),
    ):
        refused = client.post(f"/settings/{path}", data=typed)
        assert refused.status_code == 409 and f"Nothing was set: the {now}; send" in refused.text
        assert state() == before
    again = typed_in(refused.text, hidden=True)[1]
    assert (again["quota"], again["weight"], again["seen_quota"]) == ("4", "3", "1"), "as typed, and what there is"
    assert client.post("/settings/shares", data=again).status_code == 200
    assert client.post("/settings/budgets", data={**cap, "period": "total", "dollars": "8"}).status_code == 200
    assert client.post("/settings/budgets", data={**cap, "project": "other", "dollars": "6"}).status_code == 200
    share_now = devices.list_shares(db)["lab"]
    assert state()[:2] == (("month", 100), ("total", 800)) and (share_now.quota, share_now.weight) == (4, 3.0)


def test_only_an_admin_of_the_server_sets_a_budget(db: Database, tmp_path: Path) -> None:
    app = create_app(db, tmp_path, reconcile=False, require_token=True)
    with db.write() as conn:
        costs.set_budget(conn, "lab", "month", 5, at=datetime.now(UTC))
    story = run(db, cents=500, start=datetime.now(UTC) - HOUR, project="lab", target="slurm")
    refusal = "set, raised and removed by an administrator of the server"
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        for name, role in (("ann", Role.ADMIN), ("bob", Role.USER)):
            client.headers.update(issue(db, name, role, "lab"))
            for project in ("lab", "other"):
                typed = {"project": project, "dollars": "1", "seen": project, "seen_month": "1"}
                answers = [
                    client.post("/settings/budgets", data=typed),
                    client.post("/settings/budgets", data={**typed, "dollars": "none"}),
                    client.put(f"/v1/budgets/{project}/month", json={"cap_cents": 10_000}),
                    client.delete(f"/v1/budgets/{project}/month"),
                ]
                assert all(answer.status_code == 403 and refusal in answer.text for answer in answers)
            gone = client.delete(f"/v1/training/jobs/{story.id}")
            assert gone.status_code == 403 and "administrator of the server" in gone.text
            assert client.post("/settings/shares", data={"project": "lab", "quota": "1"}).status_code == 403
        client.headers.update(issue(db, "boss", Role.ADMIN))
        assert client.put("/v1/budgets/lab/month", json={"cap_cents": 6}).status_code == 200


def test_a_resume_over_the_budget_says_what_to_do_and_leads_back(db: Database, client: TestClient) -> None:
    story = run(db, cents=500, start=datetime.now(UTC) - HOUR, project="lab", target="slurm")
    with db.write() as conn:
        costs.set_budget(conn, "lab", "month", 100, at=datetime.now(UTC))
    refused = client.post(f"/jobs/{story.id}/rerun")
    assert refused.status_code == 402, refused.text
    assert "ask an administrator of the server" in refused.text and "of $1.00" in refused.text
    assert 'href="/cost?project=lab"' in refused.text and f'href="/jobs/{story.id}"' in refused.text


@pytest.mark.parametrize("path", ["/settings/shares", "/settings/budgets"])
def test_a_secret_is_no_name_of_a_project(client: TestClient, db: Database, path: str) -> None:
    secret = "ghp_" + "A1b2" * 9
    answer = client.post(path, data={"project": secret, "dollars": "5", "weight": "2", "period": "month"})
    assert answer.status_code == 422 and "looks like a secret" in answer.text
    assert secret not in client.get("/settings").text
