"""Failed checks are counted and found alike, be they pre-flights of jobs or the operator's own."""

from __future__ import annotations

from pathlib import Path

from cli.test_history import run_on
from pages import samples
from trainmaster.cluster.health import journal
from trainmaster.core.states import Reason, Status
from trainmaster.pages import node_history, search
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from web.test_node_targets import checked, run
from web.test_nodes_page import checks
from web.test_nodes_page import run as preflight

SERIAL = "1652922003456"


def test_the_verb_counts_the_runs_that_the_page_counts(tmp_path: Path) -> None:
    db = open_database(tmp_path / "trainmaster.db")
    for bad in (True, True, False):
        preflight(db, "n1", checks([SERIAL], bad=SERIAL if bad else ""))
    preflight(db, "n2", checks(["1652922000001"]))
    journal.record(tmp_path, run_on("n1", 1))
    page = node_history.read(db, node="n1", home=tmp_path)
    assert (page.failed, page.runs) == (3, 4)
    db.close()
    printed = run(tmp_path, "history", "--repeat", "--json").output
    assert printed.count('"key"') == 1 and f"serial:{SERIAL}" in printed
    assert '"failed": 3' in printed and '"runs": 4' in printed
    for word in (SERIAL, f"serial:{SERIAL}"):
        assert run(tmp_path, "history", "--serial", word, "--json").output.count('"run"') == 4
    assert not (tmp_path / "other").exists() and "no GPU failed" in run(tmp_path / "other", "history").output
    assert not (tmp_path / "other" / "trainmaster.db").exists(), "nothing is made by looking"


def test_the_words_of_a_failed_check_are_found(any_db: Database, tmp_path: Path) -> None:
    journal.record(tmp_path, checked("gpu-01"))
    reason = "Xid 79: GPU has fallen off the bus"
    preflight(any_db, "gpu-02", checks(["1652922000002"], bad="1652922000002", reason=reason))
    preflight(any_db, "gpu-03", checks(["1652922000003"]))
    for word in ("Xid", "xid 79", "fallen off"):
        found = search.read(any_db, word, home=tmp_path)
        assert {hit.title for hit in found.hits if hit.kind in ("node", "gpu")} == {"gpu-01", "gpu-02"}, word
        alone = search.read(any_db, word, project="lab", home=None)
        assert not [hit for hit in alone.hits if hit.kind in ("node", "gpu")], "of other projects"


def test_a_reason_is_found_by_its_code(any_db: Database) -> None:
    story = samples.Story(any_db).start()
    story.end_attempt(Reason.OVER_BUDGET).finish(Status.FAILED, Reason.OVER_BUDGET, "no dollar is left")
    for word in ("over_budget", "Over budget"):
        (hit,) = search.read(any_db, word).hits
        assert (hit.kind, hit.job_id, hit.text) == ("failure", story.id, "over_budget: no dollar is left")
    assert search.read(any_db, "over_budget", project="other").hits == ()
