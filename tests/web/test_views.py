"""Every page for people, its errors, and the cancel button."""

from __future__ import annotations

import logging

import pytest
from starlette.testclient import TestClient

from pages import samples
from trainmaster import report
from trainmaster.pages import job
from trainmaster.store import jobs
from trainmaster.store.database import Database
from trainmaster.store.database import Database as Store
from trainmaster.web.views import FINAL

NOBODY = "00000000-0000-4000-8000-000000000000"


def test_an_empty_list_says_how_to_begin(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert "No jobs yet" in answer.text
    assert "trainmaster demo" in answer.text


def test_the_list_names_every_job_and_links_to_it(client: TestClient, db: Database) -> None:
    story, other = samples.resumed(db), samples.failed_run(db)
    text = client.get("/").text
    assert f'href="/jobs/{story.id}"' in text
    assert f'href="/jobs/{other.id}"' in text
    assert "140 / 200" in text
    assert "out of memory" in text
    only = client.get("/?status=failed").text
    assert story.id not in only
    assert other.id in only


def test_the_list_pages(client: TestClient, db: Database) -> None:
    for _ in range(5):
        samples.pending(db)
    first = client.get("/?limit=2").text
    assert 'href="/?limit=2&amp;offset=2"' in first
    assert "1–2 of 5" in first
    assert 'rel="next"' not in client.get("/?limit=2&offset=4").text


def test_a_filter_nothing_fits(client: TestClient, db: Database) -> None:
    samples.pending(db)
    assert "Nothing fits this filter" in client.get("/?status=completed").text


def test_a_job_is_found_by_its_name(client: TestClient, db: Database) -> None:
    story = samples.completed(db)
    page = client.get("/?find=llama").text
    assert f"/jobs/{story.id}" in page and 'value="llama"' in page
    assert "Nothing fits this filter" in client.get("/?find=%3Cscript%3E").text


def test_part_is_what_the_page_holds(client: TestClient, db: Database) -> None:
    samples.completed(db)
    part = client.get("/?part=1").text
    assert "<html" not in part
    assert "llama-trial" in part


def test_a_running_job_refreshes_and_can_be_cancelled(client: TestClient, db: Database) -> None:
    story = samples.resumed(db)
    answer = client.get(f"/jobs/{story.id}")
    assert f'data-from="/jobs/{story.id}/part"' in answer.text
    assert f'action="/jobs/{story.id}/cancel"' in answer.text
    part = client.get(f"/jobs/{story.id}/part")
    assert FINAL not in part.headers
    assert "<html" not in part.text
    story.tell(samples.training(141, 150, end=False))
    assert "150 / 200" in client.get(f"/jobs/{story.id}/part").text


def test_a_final_job_asks_no_more(client: TestClient, db: Database) -> None:
    story = samples.completed(db)
    answer = client.get(f"/jobs/{story.id}")
    assert "data-from" not in answer.text
    assert "/cancel" not in answer.text
    assert client.get(f"/jobs/{story.id}/part").headers[FINAL] == "1"


def test_a_job_that_ends_while_watched_shows_its_end(client: TestClient, db: Database) -> None:
    story = samples.resumed(db)
    client.get(f"/jobs/{story.id}")
    story.tell(samples.training(141, 200)).end_attempt().finish(samples.Status.COMPLETED)
    part = client.get(f"/jobs/{story.id}/part")
    assert part.headers[FINAL] == "1"
    assert "200 of 200 steps" in part.text


def test_the_report_is_the_file(client: TestClient, db: Database) -> None:
    story = samples.completed(db)
    answer = client.get(f"/jobs/{story.id}/report")
    page = job.read(db, story.id)
    assert page is not None
    when = page.made_at.isoformat()[:4]
    ours, theirs = report.render_html(page), answer.text
    assert ours.split(when)[0] == theirs.split(when)[0]
    assert "'sha256-" in answer.headers["content-security-policy"]


def test_cancel_from_the_page(client: TestClient, db: Database) -> None:
    story = samples.resumed(db)
    answer = client.post(f"/jobs/{story.id}/cancel", headers={"origin": "http://127.0.0.1:8470"})
    assert (answer.status_code, answer.headers["location"]) == (303, f"/jobs/{story.id}")
    row = jobs.find_job(db, story.id)
    assert row is not None
    assert row.cancel_requested
    assert "Cancel job" not in client.get(f"/jobs/{story.id}").text


def test_resume_from_the_page(client: TestClient, db: Database) -> None:
    story = samples.failed_run(db)
    assert f'action="/jobs/{story.id}/resume"' in client.get(f"/jobs/{story.id}").text
    answer = client.post(f"/jobs/{story.id}/resume", headers={"origin": "http://127.0.0.1:8470"})
    following = jobs.find_job(db, answer.headers["location"].rpartition("/")[2])
    assert answer.status_code == 303 and following is not None
    assert following.spec.resume_from == story.id
    assert client.post(f"/jobs/{story.id}/resume", headers={"origin": "http://127.0.0.1:8470"}).status_code == 409


@pytest.mark.parametrize(
    "path", [f"/jobs/{NOBODY}", f"/jobs/{NOBODY}/part", f"/jobs/{NOBODY}/report", "/jobs/x", "/no"]
)
def test_not_found_is_a_page_in_the_same_style(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "/static/style.css" in answer.text


def test_our_own_fault_is_a_page_without_a_trace(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Store) -> None:
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(Store, "read", refuse)
    with caplog.at_level(logging.ERROR):
        answer = client.get("/")
        as_json = client.get("/v1/training/jobs")
    assert answer.status_code == as_json.status_code == 500
    assert "disk on fire" not in answer.text + as_json.text
    assert "disk on fire" in caplog.text
    assert as_json.json()["error"]["code"] == "internal"
    assert "content-security-policy" in answer.headers


def test_static_files_and_nothing_else(client: TestClient) -> None:
    for name, kind in (("style.css", "text/css"), ("chart.js", "text/javascript"), ("icon.svg", "image/svg+xml")):
        answer = client.get(f"/static/{name}")
        assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, kind)
        again = client.get(f"/static/{name}", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304
    assert client.get("/static/..%2Fapp.py").status_code == 404
    assert client.get("/static/app.py").status_code == 404
