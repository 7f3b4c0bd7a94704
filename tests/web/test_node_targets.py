"""A node that only the operator has checked: its target is that of the check, for the pages and for drains."""

from __future__ import annotations

import socket
from datetime import UTC, datetime
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner, Result

from control.test_drained_places import is_closed, write_hosts
from trainmaster.cli.health import _evidence
from trainmaster.cli.main import build
from trainmaster.cluster.health import journal
from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.results import CheckResult, fail
from trainmaster.pages import machines as machines_page
from trainmaster.pages import node_history, node_map
from trainmaster.store.database import Database
from web.test_health import over


def checked(*nodes: str) -> ClusterHealth:
    bad = CheckResult(
        check="xid", findings=(fail("Xid 79: GPU has fallen off the bus", action="replace it"),), took_s=0.1
    )
    return ClusterHealth(
        asked=nodes,
        nodes=tuple(NodeHealth(node=name, level=1, planned=("xid",), results=(bad,)) for name in nodes),
        started_at=datetime.now(UTC).isoformat(),
    )


def run(home: Path, *words: str) -> Result:
    env = {"TRAINMASTER_HOME": str(home), "COLUMNS": "160", "TERM": "dumb"}
    return CliRunner(env=env).invoke(build(), list(words))


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder := tmp_path / "proj").mkdir()
    monkeypatch.chdir(folder)
    return write_hosts(folder / "hosts.yaml")


@pytest.fixture
def client(db: Database, tmp_path: Path) -> TestClient:
    return over(db, tmp_path)


def test_it_is_known_by_the_target_of_its_check(
    client: TestClient,
    db: Database,
    hosts: Path,
    tmp_path: Path,
) -> None:
    _evidence.remember(tmp_path, checked("gpu-01"), "", on="ssh:hosts.yaml")
    word = f"ssh:{hosts}"
    assert [line.target for line in machines_page.read(db, home=tmp_path).machines] == [word]
    assert [tile.target for tile in node_map.read(db, home=tmp_path).nodes] == [word]
    assert f"<pre>trainmaster check --on {word}</pre>" in client.get("/nodes/one?node=gpu-01").text
    drained = run(tmp_path, "nodes", "drain", "gpu-01", "--reason", "Xid 79")
    assert drained.exit_code == 0 and is_closed(db, word), drained.output
    back = run(tmp_path, "nodes", "readmit", "gpu-01")
    assert back.exit_code == 0 and "gpu-01: takes jobs again" in back.output
    assert "careful: its newest check failed" in back.output and not is_closed(db, word)
    page = node_history.read(db, node="gpu-01", home=tmp_path)
    assert [(change.drained, change.who, change.reason) for change in page.changes] == [
        (False, "local", ""), (True, "local", "Xid 79"),
    ]  # fmt: skip
    text = client.get("/nodes/one?node=gpu-01").text
    assert text.index(">given back<") < text.index(">drained<") < text.index(">Xid 79<") < text.index("fallen off")
    assert node_history.read(db, node="gpu-01", project="default").changes == (), "the operator's own words"
    went = client.post("/nodes/drain", data={"node": "gpu-01", "reason": "again"}, follow_redirects=False)
    assert went.status_code == 303 and is_closed(db, word)


def test_without_a_known_target_no_false_command_is_shown(client: TestClient, db: Database, tmp_path: Path) -> None:
    journal.record(tmp_path, checked("gpu-09"))
    text = client.get("/nodes/one?node=gpu-09").text
    assert "<pre>trainmaster check --on TARGET</pre>" in text and "has named the target of this node" in text
    listed = run(tmp_path, "nodes")
    assert "not known" in listed.output
    refused = run(tmp_path, "nodes", "drain", "gpu-09", "--reason", "x")
    assert "no job, `target add` or check has named its target" in str(refused.exception)


def test_this_machine_is_checked_without_a_target(client: TestClient, tmp_path: Path) -> None:
    _evidence.remember(tmp_path, checked(socket.gethostname()), "", on=None)
    text = client.get("/nodes/one", params={"node": socket.gethostname()}).text
    assert "<pre>trainmaster check</pre>" in text and "On the machine of this server" in text
