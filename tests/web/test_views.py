"""Every page for people, its errors, and the cancel button."""

from __future__ import annotations

import logging
import re

import pytest
from starlette.testclient import TestClient

from pages import samples
from trainmaster import report
from trainmaster.core.roles import Role
from trainmaster.pages import job
from trainmaster.store import jobs
from trainmaster.store.database import Database
from trainmaster.store.database import Database as Store
from trainmaster.web import navigation
from trainmaster.web.sections.run import FINAL
from web.furnished import issue

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
    assert "/static/page.js" in answer.text and "<style>" in answer.text and 'id="advice"' in answer.text
    assert 'aria-label="Sections"' in answer.text and 'id="to-runs"' in answer.text, "the way onward"


def test_a_refusal_says_what_to_do_and_leads_onward(client: TestClient, db: Database) -> None:
    story, viewer = samples.resumed(db), issue(db, "ann", Role.VIEWER)
    refused = client.post(f"/jobs/{story.id}/cancel", headers=viewer)
    assert refused.status_code == 403 and "An administrator of the project" in refused.text
    assert 'aria-label="Sections"' in refused.text, "who is known has the navigation, also where a role is missing"
    stranger = client.post(f"/jobs/{story.id}/cancel", headers={"Authorization": "Bearer tm_" + "x" * 43})
    assert stranger.status_code == 401
    assert 'aria-label="Sections"' not in stranger.text and 'href="/login"' in stranger.text


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
    assert 'id="again"' in answer.text and " UTC" in answer.text, "load it again, or tell the operator when it was"
    assert "disk on fire" in caplog.text
    assert as_json.json()["error"]["code"] == "internal"
    assert "content-security-policy" in answer.headers


def test_static_files_and_nothing_else(client: TestClient) -> None:
    for name, kind in (("page.js", "text/javascript"), ("icon.svg", "image/svg+xml")):
        answer = client.get(f"/static/{name}")
        assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, kind)
        again = client.get(f"/static/{name}", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304
    assert client.get("/static/style.css").status_code == 404, "the style is in the page"
    assert client.get("/static/..%2Fapp.py").status_code == 404
    assert client.get("/static/app.py").status_code == 404


def test_a_browser_keeps_a_script_until_it_is_another(client: TestClient) -> None:
    links = re.findall(r'(?:src|href)="(/static/[^"]+)"', client.get("/").text)
    assert len(links) >= 2
    for link in links:
        assert "immutable" in client.get(link).headers["cache-control"], link
        assert client.get(link.partition("?")[0]).headers["cache-control"] == "max-age=60"
        assert client.get(f"{link}0").headers["cache-control"] == "max-age=60", "of another version"


def test_the_navigation_has_the_sections_that_exist(client: TestClient) -> None:
    text = client.get("/").text
    for entry in navigation.ENTRIES:
        status = client.get(entry.path).status_code
        assert (f'<a href="{entry.path}" data-key="{entry.key}"' in text) == (status == 200), entry.label
    assert '<a href="/" data-key="r" aria-current="page">Runs</a>' in text


def test_search_finds_jobs_failures_nodes_and_gpus_of_the_callers_project(client: TestClient, db: Database) -> None:
    broken, run = samples.failed_check(db), samples.failed_run(db)
    serial = {"check": "gpu_model", "verdict": "pass", "reason": "one H200", "device": "gpu0",
              "values": {"serial": "1652922000123"}}  # fmt: skip
    other = samples.Story(db, samples.spec(name="secret-run", project="other")).start()
    hot = {"check": "gpu_thermal", "verdict": "warn", "reason": "throttled at 93 C", "device": "gpu5"}
    other.tell([samples.project(other.attempt), *samples.preflight([serial, hot])])

    def kinds(word: str, **headers: str) -> list[tuple[str, str]]:
        answer = client.get("/v1/search", params={"q": word}, headers=headers).json()
        page = client.get("/search", params={"q": word}, headers=headers).text
        assert all(f'href="/jobs/{hit["job_id"]}' in page for hit in answer["hits"])
        return [(hit["kind"], hit["job_id"]) for hit in answer["hits"]]

    assert kinds("llama-8b") == [("job", broken.id)]
    assert kinds(run.id[:8]) == [("job", run.id)]
    assert ("failure", run.id) in kinds("out of MEMORY")
    assert ("gpu", other.id) in kinds("1652922000123") and kinds("THROTTLED at") == [("gpu", other.id)]
    assert {kind for kind, _ in kinds("node-17")} == {"node"}
    ours = issue(db, "ann", Role.VIEWER, project="research")
    assert kinds("1652922000123", **ours) == [] and kinds("secret-run", **ours) == []
    assert "Nothing was found" in client.get("/search", params={"q": "no such thing"}).text
    hostile = "<img src=x onerror=alert(1)>%_"
    assert "<img" not in client.get("/search", params={"q": hostile}).text and kinds(hostile) == []


@pytest.mark.parametrize("word", ["", "no such thing"])
def test_the_search_says_where_logs_are_searched(client: TestClient, word: str) -> None:
    text = client.get("/search", params={"q": word}).text
    assert "Logs are not searched here: open a job, then its tab Logs" in text


def test_a_filter_that_fits_no_job_leads_to_the_search(client: TestClient, db: Database) -> None:
    """The text of an error, typed into the filter of names."""
    samples.pending(db)
    text = client.get("/", params={"find": "no such file & more"}).text
    assert 'id="search-instead" href="/search?q=no+such+file+%26+more"' in text and 'id="show-all"' in text
    assert "search-instead" not in client.get("/?by=nobody").text
