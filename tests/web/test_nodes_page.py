"""The page of nodes: the map, the history of a GPU by its serial number, drain and readmit by the rules of `remedy`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pages import samples
from pages.samples import encode
from report.test_hostile import HOSTILE
from trainmaster import targets
from trainmaster.cluster.health import journal
from trainmaster.core.events import Event, split
from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.plan import EVENTS_FILE, node_file
from trainmaster.core.results import CheckResult, fail
from trainmaster.core.roles import Role
from trainmaster.core.states import Stage, Status
from trainmaster.pages import node_history, node_map
from trainmaster.store import attempts, audit, jobs
from trainmaster.store.capacity import machines
from trainmaster.store.database import Database
from trainmaster.store.events import append_events
from trainmaster.targets.slurm.drain import SlurmScheduler
from trainmaster.web.app import create_app
from trainmaster.web.kept import Kept
from web.conftest import BASE, LOCAL
from web.furnished import issue, read_page


def checks(serials: Sequence[str], *, bad: str = "", reason: str = "2 uncorrectable ECC errors") -> Iterator[Event]:
    """A pre-flight of a node with these GPUs; the one with the serial number `bad` fails."""
    model = [
        {"verdict": "pass", "reason": "H100", "device": f"gpu{n}", "values": {"serial": serial, "model": "H100"}}
        for n, serial in enumerate(serials)
    ]
    ecc = [
        {"verdict": "fail" if serial == bad else "pass", "reason": reason if serial == bad else "none",
         "action": "replace it", "device": f"gpu{n}", "values": {}}
        for n, serial in enumerate(serials)
    ]  # fmt: skip
    yield Event(phase="PREFLIGHT", event="start", data={"planned": ["gpu_model", "gpu_ecc"]})
    for name, findings in (("gpu_model", model), ("gpu_ecc", ecc)):
        verdict = "fail" if any(each["verdict"] == "fail" for each in findings) else "pass"
        data = {"check": name, "verdict": verdict, "took_s": 0.1, "findings": findings}
        yield Event(phase="PREFLIGHT", event="check", data=data)


def run(
    db: Database, node: str, events: Iterable[Event], *, over: bool = True, at: datetime = samples.T0, **changes: Any
) -> samples.Story:
    """A job of one node with this pre-flight."""
    story = samples.Story(db, samples.spec(**{"target": "slurm", **changes}), at=at).start()
    start = Event(phase="PROJECT", event="start", data={"attempt": story.attempt, "host": node, "version": "0"})
    story.tell([start, *events])
    return story.end_attempt().finish(Status.COMPLETED) if over else story.move(Stage.RUNNING)


def cluster(db: Database, nodes: int = 3) -> samples.Story:
    """Nodes of one Slurm cluster; the second GPU of node-00 has failed. The job that found it."""
    for number in range(1, nodes):
        run(db, f"node-{number:02}", checks([f"16520000{number:02}01", f"16520000{number:02}02"]))
    return run(db, "node-00", checks(["1652000000001", "1652000000002"], bad="1652000000002"))


class Scontrol:
    """An scontrol that knows the nodes of a cluster by name."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.commands: list[str] = []

    async def __call__(self, command: Sequence[str]) -> str:
        self.commands.append(" ".join(command))
        if command[1] == "update":
            node, state = command[2].partition("=")[2], command[3].partition("=")[2]
            if state == "drain":
                self.reasons[node] = command[4].partition("=")[2]
            else:
                self.reasons.pop(node, None)
            return ""
        names = [command[3]] if command[3] != "--oneliner" else sorted(self.reasons)
        return "\n".join(map(self._line, names))

    def _line(self, node: str) -> str:
        reason = self.reasons.get(node)
        state = f"IDLE+DRAIN Reason={reason}" if reason else "IDLE ThreadsPerCore=1"
        return f"NodeName={node} Arch=x86_64 State={state}"


@pytest.fixture
def scontrol(monkeypatch: pytest.MonkeyPatch) -> Scontrol:
    scheduler, scontrol = SlurmScheduler(), Scontrol()
    scheduler.run = scontrol
    monkeypatch.setattr(targets, "load_scheduler", lambda _word: scheduler)
    return scontrol


def test_the_map_has_every_machine_the_worst_first(client: TestClient, db: Database) -> None:
    assert "No nodes yet" in client.get("/nodes").text
    client.app.state.kept = Kept()  # type: ignore[attr-defined]  # what it keeps for some seconds
    cluster(db)
    assert node_map.read(db).counts == {"all": 3, "bad": 1, "used": 0, "free": 2, "out": 0}, "a failed node is not free"
    held = run(db, "node-01", checks(["165200000101"]), over=False, name="holds-it")
    text = client.get("/nodes").text
    assert re.findall(r'class="node-name"[^>]*>([^<]+)<', text) == ["node-00", "node-01", "node-02"]
    assert "gpu1 · gpu_ecc: 2 uncorrectable ECC errors" in text
    assert f'used by <a href="/jobs/{held.id}">holds-it</a>' in text
    assert 'href="/nodes/one?gpu=serial%3A1652000000002"' in text
    assert re.findall(r'class="node-name"[^>]*>([^<]+)<', client.get("/nodes?state=bad").text) == ["node-00"]
    assert re.findall(r'class="node-name"[^>]*>([^<]+)<', client.get("/nodes?find=-02").text) == ["node-02"]
    assert "1–2 of 3" in client.get("/nodes?limit=2").text
    assert "<html" not in client.get("/nodes?part=1").text


def test_a_machine_without_a_check_is_not_a_pass(db: Database) -> None:
    story = samples.Story(db)
    with db.write() as conn:
        jobs_attempt = samples.attempts.insert_attempt(conn, story.id, 1, handle={"nodes": ["gpu-07"]}, at=samples.T0)
    assert jobs_attempt
    (node,) = node_map.read(db).nodes
    assert (node.node, node.verdict, [use.job_id for use in node.used_by]) == ("gpu-07", None, [story.id])


def test_a_gpu_is_followed_by_its_serial_number(client: TestClient, db: Database) -> None:
    cluster(db, nodes=2)
    run(db, "node-01", checks(["1652000000002"]), at=samples.T0 + timedelta(days=1))  # put into another node
    page = node_history.read(db, gpu="1652000000002")
    assert [(line.node, line.verdict.value) for line in page.lines] == [("node-01", "pass"), ("node-00", "fail")]
    assert (page.runs, page.failed) == (2, 1)
    text = client.get("/nodes/one?gpu=serial:1652000000002").text
    assert "Failed in 1 of 2 runs" in text and "node-00, node-01" in text.replace(
        "node-01, node-00", "node-00, node-01"
    )
    assert "Failed in 1 of 1 run" in client.get("/nodes/one?node=node-00").text
    assert client.get("/nodes/one?gpu=165200000000").status_code == 404, "a part of a serial number is no GPU"
    assert client.get("/nodes/one").headers["location"] == "/nodes"


def test_the_operators_own_checks_are_on_the_map_of_the_server_only(
    client: TestClient, db: Database, tmp_path: Path
) -> None:
    finding = fail("down", action="reseat", device="gpu0", serial="9990001112223")
    node = NodeHealth(
        node="bare-1", level=1, planned=("gpu_nvlink",),
        results=(CheckResult(check="gpu_nvlink", findings=(finding,), took_s=0.1),),
    )  # fmt: skip
    health = ClusterHealth(asked=("bare-1",), nodes=(node,), started_at="2026-03-02T10:00:00+00:00")
    journal.record(tmp_path, health)
    assert "bare-1" in client.get("/nodes").text
    assert "down" in client.get("/nodes/one?gpu=serial:9990001112223").text
    of_lab = issue(db, "lab-user", Role.ADMIN, "lab")
    assert "bare-1" not in client.get("/nodes", headers=of_lab).text
    assert client.get("/nodes/one?node=bare-1", headers=of_lab).status_code == 404


def test_drain_asks_first_and_acts_by_the_rules_of_remedy(
    client: TestClient, db: Database, scontrol: Scontrol, tmp_path: Path
) -> None:
    cluster(db)
    asked = client.get("/nodes/drain?node=node-00").text
    assert "scontrol update nodename=node-00 state=drain" in asked and scontrol.commands == []
    assert client.post("/nodes/drain", data={"node": "node-00"}).headers["location"] == "/nodes/one?node=node-00"
    assert scontrol.reasons == {"node-00": "trainmaster: gpu_ecc gpu1: 2 uncorrectable ECC errors"}
    assert [row["did"] for row in journal.read(tmp_path / journal.REMEDIES)] == ["drain"]
    (entry,) = audit.list_audit(db, subject="node:node-00")
    assert (entry.action, entry.detail and entry.detail["fault"]) == ("node.drain", None)
    assert "drained" in client.get("/nodes?state=out").text
    again = client.post("/nodes/drain", data={"node": "node-00"})
    assert again.status_code == 409 and "already drained" in again.text
    fine = client.post("/nodes/drain", data={"node": "node-01"})
    assert fine.status_code == 409 and "found no fault" in fine.text
    unknown = client.get("/nodes/drain?node=node-99").text
    assert "no evidence" in unknown and "trainmaster check --on" in unknown


def test_drain_keeps_the_limit(client: TestClient, db: Database, scontrol: Scontrol) -> None:
    for number in range(12):
        run(db, f"node-{number:02}", checks([f"16520000{number:02}01"], bad=f"16520000{number:02}01"))
    refused = client.post("/nodes/drain", data={"node": "node-03"})
    assert refused.status_code == 409 and "the limit is 1" in refused.text and 'name="most"' in refused.text
    assert scontrol.commands == []
    assert client.post("/nodes/drain", data={"node": "node-03", "most": "12"}).status_code == 303
    assert list(scontrol.reasons) == ["node-03"], "the one that was asked for, and no other"
    assert client.post("/nodes/drain", data={"node": "node-03", "most": "-1"}).status_code == 422


def test_a_node_comes_back_only_by_a_newer_check_that_measured_again(
    client: TestClient, db: Database, scontrol: Scontrol, tmp_path: Path
) -> None:
    cluster(db)
    client.post("/nodes/drain", data={"node": "node-00"})
    stays = client.get("/nodes/readmit?node=node-00").text
    assert "before the drain" in stays and "trainmaster readmit" in stays
    assert client.post("/nodes/readmit", data={"node": "node-00"}).status_code == 409
    since = journal.read(tmp_path / journal.REMEDIES)[0]["at"]
    later = datetime.fromisoformat(since) + timedelta(hours=1)
    half = [event for event in checks(["1652000000001"]) if event.data.get("check") != "gpu_ecc"]
    run(db, "node-00", half, at=later)
    assert "not measured: gpu_ecc" in client.get("/nodes/readmit?node=node-00").text
    run(db, "node-00", checks(["1652000000001", "1652000000009"]), at=later)
    assert "scontrol update nodename=node-00 state=resume" in client.get("/nodes/readmit?node=node-00").text
    assert client.post("/nodes/readmit", data={"node": "node-00"}).status_code == 303
    assert scontrol.reasons == {}
    assert [entry.action for entry in audit.list_audit(db, subject="node:node-00")] == ["node.readmit", "node.drain"]
    assert "not drained by Trainmaster" in client.get("/nodes/readmit?node=node-00").text


def test_a_target_that_cannot_drain_says_what_to_do(client: TestClient, db: Database) -> None:
    run(db, "box-1", checks(["1652000000001"], bad="1652000000001"), target="ssh:hosts.yaml")
    text = client.get("/nodes/drain?node=box-1").text
    assert targets.traits("ssh").alternative("remedy") in text.replace("&#39;", "'").replace("&#34;", '"')
    assert 'method="post" action="/nodes/drain"' not in text


def test_the_page_drains_a_machine_of_ssh(client: TestClient, db: Database, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("known_hosts: known_hosts\nhosts: [{name: gpu-01, host: 192.0.2.1}]\n")
    (tmp_path / "known_hosts").write_text("x ssh-ed25519 AAAA\n")
    run(db, "gpu-01", checks(["1652000000001"]), target=f"ssh:{hosts}", project="lab")
    assert 'name="reason"' in client.get("/nodes/drain?node=gpu-01").text
    assert client.post("/nodes/drain", data={"node": "gpu-01", "reason": "a fan"}).status_code == 303
    (drained,) = machines.list_machines(db, place=f"ssh:{hosts}")
    assert (drained.machine, drained.drained) == ("gpu-01", "a fan")
    text = client.get("/nodes/one?node=gpu-01").text
    assert '<section class="card verdict warn">' in text and "Node: drained" in text
    assert drained.drained_at is not None and f"{drained.drained_at:%Y-%m-%d %H:%M}" in text
    assert str(drained.drained_at) not in text and drained.drained_at.isoformat() not in text
    (tile,) = node_map.read(db, project="lab").nodes
    page = node_history.read(db, node="gpu-01", project="lab")
    for seen in (tile, page):  # by a user of the project
        assert seen.target == "ssh"  # the path of the hosts file is the server's
        assert (seen.out_since, seen.out_reason) == (drained.drained_at.isoformat(), None)
    assert node_map.read(db, project="other").counts["out"] == 0
    assert node_history.read(db, node="gpu-01", project="other").out_since is None
    assert client.post("/nodes/readmit", data={"node": "gpu-01"}).status_code == 303
    assert machines.list_machines(db) == []


def test_a_drain_is_of_one_target_and_not_of_a_namesake_elsewhere(db: Database, tmp_path: Path) -> None:
    with db.write() as conn:
        machines.drain(conn, "ssh:/etc/a.yaml", "gpu1", reason="customer X", by="eve", at=samples.T0)
    run(db, "gpu1", checks(["1652000000001"]), target="kubernetes", project="b")
    page = node_map.read(db, project="b")
    assert ([(node.node, node.out_since) for node in page.nodes], page.counts["out"]) == ([("gpu1", None)], 0)
    assert node_map.read(db, project="b", state="out").nodes == ()
    assert node_history.read(db, node="gpu1", project="b").out_since is None
    (tile,) = node_map.read(db, home=tmp_path).nodes
    for seen in (tile, node_history.read(db, node="gpu1", home=tmp_path)):  # by the operator
        assert (seen.out_since, seen.out_reason) == (samples.T0.isoformat(), "on ssh:/etc/a.yaml: customer X")
    run(db, "gpu1", checks(["1652000000002"]), target="ssh:/etc/a.yaml", project="a")
    assert node_map.read(db, project="a").counts["out"] == 1
    assert node_history.read(db, node="gpu1", project="a").out_since == samples.T0.isoformat()


def test_only_an_admin_of_the_server_drains(db: Database, tmp_path: Path, scontrol: Scontrol) -> None:
    cluster(db)
    app = create_app(db, tmp_path, reconcile=False, require_token=True)
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        for role, project in ((Role.VIEWER, None), (Role.USER, None), (Role.ADMIN, "research")):
            token = issue(db, f"t-{role}-{project}", role, project)
            assert "node-00" in client.get("/nodes", headers=token).text
            assert 'id="drain"' not in client.get("/nodes/one?node=node-00", headers=token).text
            for path in ("/nodes/drain", "/nodes/readmit"):
                assert client.get(f"{path}?node=node-00", headers=token).status_code == 403
                assert client.post(path, headers=token, data={"node": "node-00"}).status_code == 403
        other = issue(db, "other", Role.ADMIN, "other")
        assert "No nodes yet" in client.get("/nodes", headers=other).text
        assert client.get("/nodes/one?gpu=1652000000002", headers=other).status_code == 404
        admin = issue(db, "operator", Role.ADMIN)
        cross = client.post(
            "/nodes/drain", headers={**admin, "origin": "https://evil.example"}, data={"node": "node-00"}
        )
        assert cross.status_code == 403 and scontrol.commands == []


def test_hostile_names_are_text(client: TestClient, db: Database) -> None:
    run(db, HOSTILE, checks(["1652000000001"], bad="1652000000001", reason=HOSTILE), name="x")
    for path in ("/nodes", "/nodes/one", "/nodes/drain"):
        text = client.get(path, params={"node": HOSTILE}).text
        assert "<script>alert" not in text and "<img" not in text, path
    assert jobs.list_jobs(db)


def test_what_is_known_of_a_machine_stands_where_it_is_given_back(
    client: TestClient, db: Database, tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("known_hosts: known_hosts\nhosts: [{name: gpu-03, host: 192.0.2.1}]\n")
    (tmp_path / "known_hosts").write_text("x ssh-ed25519 AAAA\n")
    word = f"ssh:{hosts}"
    run(db, "gpu-03", checks(["1652000000001"], bad="1652000000001"), target=word)
    held = run(db, "gpu-03", checks(["1652000000001"], bad="1652000000001"), over=False, name="holds-it", target=word)
    page = client.get("/nodes/drain", params={"node": "gpu-03"}).text
    assert "2 uncorrectable ECC errors" in page and f'<a href="/jobs/{held.id}">holds-it</a>' in page
    went = client.post("/nodes/drain", data={"node": "gpu-03", "reason": "row 7"})
    assert went.headers["location"] == "/nodes/one?node=gpu-03"  # where the drain can be seen
    assert "drained since" in client.get(went.headers["location"]).text
    page = client.get("/nodes/readmit", params={"node": "gpu-03"}).text
    assert "it was not checked since then" in page and "2 uncorrectable ECC errors" in page and "row 7" in page
    run(db, "gpu-03", checks(["1652000000001"], bad="1652000000001"), target=word, at=datetime.now(UTC) + timedelta(1))
    page = client.get("/nodes/readmit", params={"node": "gpu-03"}).text
    assert "its checks still fail" in page and "not checked since" not in page
    went = client.post("/nodes/readmit", data={"node": "gpu-03"})
    assert went.headers["location"] == "/nodes/one?node=gpu-03"
    text = client.get(went.headers["location"]).text
    assert "drained since" not in text and f"trainmaster check --on {word}" in text


def test_a_machine_that_others_use_is_not_free(client: TestClient, db: Database) -> None:
    run(db, "shared", checks(["1652000000001"]), project="lab")
    run(db, "idle", checks(["1652000000002"]), project="lab")
    run(db, "shared", checks(["1652000000001"]), over=False, project="other", name="secret-name")
    tiles = {tile.node: tile for tile in node_map.read(db, project="lab").nodes}
    assert (tiles["shared"].used_by, tiles["shared"].used_by_others) == ((), 1)
    assert [tile.node for tile in node_map.read(db, project="lab", state="free").nodes] == ["idle"]
    assert [tile.node for tile in node_map.read(db, project="lab", state="used").nodes] == ["shared"]
    assert node_map.read(db).counts["free"] == 1
    of_lab = issue(db, "lab", Role.VIEWER, "lab")
    for path in ("/nodes", "/nodes/one?node=shared"):
        text = client.get(path, headers=of_lab).text
        assert "1 job of other projects" in text and "secret-name" not in text and "no open job" not in text


def test_search_finds_a_gpu_of_the_operators_checks_by_its_serial_number(
    client: TestClient, db: Database, tmp_path: Path
) -> None:
    gpu = CheckResult(
        check="gpu_model",
        findings=(fail("no answer", action="look", device="gpu0", serial="1651502434383"),),
        took_s=0.1,
    )
    health = ClusterHealth(
        asked=("gpu-03",),
        nodes=(NodeHealth(node="gpu-03", level=1, planned=("gpu_model",), results=(gpu,)),),
        started_at=samples.T0.isoformat(),
    )
    journal.record(tmp_path, health)
    text = client.get("/search", params={"q": "51502434"}).text
    assert "gpu-03" in text and "/nodes/one?gpu=serial%3A1651502434383" in text and "checked by the operator" in text
    (hit,) = client.get("/v1/search", params={"q": "1651502434383"}).json()["hits"]
    assert (hit["kind"], hit["title"], hit["job_id"], hit["gpu"]) == ("gpu", "gpu-03", None, "serial:1651502434383")
    assert [hit["kind"] for hit in client.get("/v1/search", params={"q": "gpu-0"}).json()["hits"]] == ["node"]
    of_lab = issue(db, "lab", Role.VIEWER, "lab")
    assert client.get("/v1/search", params={"q": "1651502434383"}, headers=of_lab).json()["hits"] == []


def test_each_machine_of_a_job_has_its_own_preflight(client: TestClient, db: Database) -> None:
    """Of four machines the page showed the first one's checks, without its name, and links of the others led there."""
    story = samples.Story(db, samples.spec(target="slurm")).start()
    with db.write() as conn:
        attempts.set_handle(conn, story.attempt, {"nodes": ["gpu-01", "gpu-02", "gpu-03"]})
    start = Event(phase="PROJECT", event="start", data={"attempt": story.attempt, "host": "gpu-01", "version": "0"})
    story.tell([start, *checks(["1652000000001"])])
    raw = encode(checks(["1652000000002"], bad="1652000000002"))
    lines = split(raw, offset=0, zone=UTC, last=True)
    with db.write() as conn:
        assert append_events(conn, story.attempt, node_file(EVENTS_FILE, 1), seen_offset=0, lines=lines)
    story.end_attempt().finish(Status.COMPLETED)

    text = read_page(client.get(f"/jobs/{story.id}/preflight"))
    blocks = re.findall(r'<h2 id="preflight-([^"]+)">.*?</section>', text, re.DOTALL)
    assert blocks == ["gpu-02", "gpu-03", "gpu-01"], "the one with bad news first"
    parts = {name: text.partition(f'<h2 id="preflight-{name}">')[2].partition("</section>")[0] for name in blocks}
    assert "1652000000002" in parts["gpu-02"] and ">FAIL<" in parts["gpu-02"]
    assert "1652000000001" in parts["gpu-01"] and ">PASS<" in parts["gpu-01"] and "1652000000002" not in parts["gpu-01"]
    assert parts["gpu-03"].count("planned, but it never reported") == 2 and ">INCOMPLETE<" in parts["gpu-03"]
    assert (
        f'href="/jobs/{story.id}/preflight?node=gpu-02#preflight-gpu-02"' in client.get("/nodes/one?node=gpu-02").text
    )


def test_a_machine_that_still_checks_is_not_accused(client: TestClient, db: Database) -> None:
    """The first one was ready before it: what it had not reported yet was called missing."""
    story = samples.Story(db, samples.spec(target="slurm")).start()
    with db.write() as conn:
        attempts.set_handle(conn, story.attempt, {"nodes": ["gpu-01", "gpu-02"]})
    listed = list(checks(["1652000000001"]))
    end = Event(phase="PREFLIGHT", event="end", data={"overall": "PASS"})
    story.tell([*listed, end])
    offset = 0

    def add(events: Iterable[Event]) -> tuple[str, ...]:
        """What the second one reports, and what the page says of each then."""
        nonlocal offset
        raw = encode(events)
        with db.write() as conn:
            lines, stream = split(raw, offset=offset, zone=UTC, last=True), node_file(EVENTS_FILE, 1)
            assert append_events(conn, story.attempt, stream, seen_offset=offset, lines=lines)
        offset += len(raw)
        text = read_page(client.get(f"/jobs/{story.id}/preflight"))
        return tuple(re.findall(r'<h2 id="preflight-([^"]+)">.*?<span class="pill \w+">(\w+)<', text, re.DOTALL))

    assert add(listed[:2]) == (("gpu-01", "PASS"), ("gpu-02", "checking"))
    assert add([end]) == (("gpu-02", "INCOMPLETE"), ("gpu-01", "PASS")), "it ended without one of them"
    assert add(listed[2:]) == (("gpu-01", "PASS"), ("gpu-02", "PASS"))


def test_of_many_machines_twenty_are_shown_whole_and_the_others_by_a_link(client: TestClient, db: Database) -> None:
    """A page of 512 machines was 4 MB, and three seconds of the server's processor."""
    story = samples.Story(db, samples.spec(target="slurm")).start()
    names = [f"gpu-{number:03}" for number in range(150)]
    with db.write() as conn:
        attempts.set_handle(conn, story.attempt, {"nodes": names})
    story.tell(checks(["1652000000001"]))
    story.end_attempt().finish(Status.COMPLETED)
    text = read_page(client.get(f"/jobs/{story.id}/preflight"))
    assert "Pre-flight of 150 machines" in text and ">130 more<" in text
    assert text.count('<section class="card" aria-labelledby="preflight-') == 20
    assert sorted(re.findall(r'id="preflight-(gpu-\d+)"', text)) == names, "a link to any of them leads there"
    assert re.findall(r'<td><a href="\?node=(gpu-\d+)">', text)[-1] == "gpu-000", "good news last"
    whole = read_page(client.get(f"/jobs/{story.id}/preflight", params={"node": "gpu-000"}))
    assert re.findall(r'<h2 id="preflight-([^"]+)"', whole)[0] == "gpu-000" and "1652000000001" in whole


def test_a_serial_number_is_found_as_the_pages_write_it_and_leads_to_its_gpu(client: TestClient, db: Database) -> None:
    cluster(db, nodes=2)
    for words in ("1652000000002", "serial:1652000000002", "Serial: 1652000000002"):
        text = read_page(client.get("/search", params={"q": words}))
        assert 'href="/nodes/one?gpu=serial%3A1652000000002"' in text, words
    found = client.get("/nodes/one?gpu=serial%3A1652000000002")
    assert found.status_code == 200 and "1652000000002" in found.text


def test_a_gpu_that_its_serial_number_does_not_identify_leads_to_its_node(client: TestClient, db: Database) -> None:
    """A virtual machine gives each of its GPUs the same one: there is no page of it."""
    run(db, "vm-00", checks(["0000000000000"], bad="0000000000000"))
    text = read_page(client.get("/search", params={"q": "0000000000000"}))
    assert 'href="/nodes/one?node=vm-00"' in text and "gpu=serial" not in text
