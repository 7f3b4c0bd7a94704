"""Targets that an admin of the server made known: who may add, grant and use them, and as which account jobs run."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.testclient import TestClient

import trainmaster
from accounts import accounts, needs_accounts
from client.served import serve
from sshd import lab, needs_sshd
from trainmaster import targets
from trainmaster.control import known_targets
from trainmaster.core.errors import AccessRefused, UsageError
from trainmaster.core.roles import Role
from trainmaster.core.spec import parse_spec
from trainmaster.store import jobs, tables
from trainmaster.store.database import Database
from trainmaster.targets import Placement
from trainmaster.web.app import create_app
from traits_contract import run
from web.conftest import BASE, LOCAL
from web.furnished import JOBS, answer_as_spelled, issue

SPEC = {"name": "a", "project": "lab", "command": ["true"], "target": "gpus"}
SECRET = "root:$6$words-of-a-file-of-the-server:19000"
ATTEMPT = "6f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a11.1"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts jobs as another user")


@pytest.fixture(autouse=True)
def _no_machines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real" not in request.fixturenames:
        monkeypatch.setattr(targets, "identify", answer_as_spelled)


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines are asked. Our Python is one that other accounts may execute."""
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    monkeypatch.setenv("PYTHONPATH", str(Path(trainmaster.__file__).parents[1]))


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    file = tmp_path / "etc" / "hosts.yaml"
    file.parent.mkdir()
    file.write_text("hosts: [{host: gpu-01, user: tm-all}]\n")
    return file


@pytest.fixture
def closed(db: Database, tmp_path: Path) -> TestClient:
    (tmp_path / "home").mkdir()
    app = create_app(db, tmp_path / "home", reconcile=False, require_token=True)
    return TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False)


def test_an_admin_makes_a_target_known_and_a_user_names_it(closed: TestClient, db: Database, hosts: Path) -> None:
    root, user = issue(db, "root", Role.ADMIN), issue(db, "alice", Role.USER, "lab")
    wish = {"name": "gpus", "word": f"ssh:{hosts}"}
    assert closed.post("/v1/targets", json=wish, headers=root).status_code == 201
    refused = closed.post(JOBS, json=SPEC, headers=user)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_granted")
    assert "trainmaster target grant gpus --project lab" in refused.text and str(hosts.parent) not in refused.text
    granted = closed.put("/v1/targets/gpus/projects/lab", json={"user": "tm-lab"}, headers=root)
    assert granted.json()["granted"] == [
        {"project": "lab", "user": "tm-lab", "account": "tm-lab", "fault": "", "note": ""}
    ]
    made = closed.post(JOBS, json=SPEC, headers=user)
    assert made.status_code == 201, made.text
    row = jobs.find_job(db, made.json()["id"])
    assert row is not None and (row.target, row.spec.target) == (f"tm-lab@ssh:{hosts}", "gpus")
    for path in (JOBS, f"{JOBS}/{row.id}", f"/jobs/{row.id}", "/"):
        page = closed.get(path, headers=user)
        assert page.status_code == 200 and str(hosts.parent) not in page.text and "gpus" in page.text, path
    assert closed.delete("/v1/targets/gpus", headers=root).status_code == 409, "a job runs there"
    assert closed.delete("/v1/targets/gpus/projects/lab", headers=root).status_code == 204
    assert closed.post(f"{JOBS}/{row.id}/rerun", headers=user).status_code == 403
    listed = closed.get("/v1/targets", headers=root)
    assert listed.json()["targets"] == [{"name": "gpus", "word": f"ssh:{hosts}", "granted": []}]
    assert "tm-all" not in listed.text, "what the file holds is not shown"


@pytest.mark.parametrize(("role", "project"), [(Role.USER, "lab"), (Role.USER, None), (Role.ADMIN, "lab")])
def test_nobody_else_changes_them(
    closed: TestClient, db: Database, hosts: Path, role: Role, project: str | None
) -> None:
    who = issue(db, "x", role, project)
    asked = [
        ("GET", "/v1/targets", None), ("GET", "/v1/targets/gpus", None), ("DELETE", "/v1/targets/gpus", None),
        ("POST", "/v1/targets", {"name": "mine", "word": f"ssh:{hosts}"}),
        ("PUT", "/v1/targets/lambda/projects/lab", {}), ("DELETE", "/v1/targets/lambda/projects/lab", None),
    ]  # fmt: skip
    got = [closed.request(method, path, json=body, headers=who).status_code for method, path, body in asked]
    assert got == [403] * len(asked) and known_targets.show(db) == []


@pytest.mark.parametrize("kind", ["ssh", "slurm", "kubernetes", "hyperpod", "sagemaker", "pool"])
def test_no_answer_repeats_a_refused_file(closed: TestClient, db: Database, tmp_path: Path, kind: str) -> None:
    """Seen on 1ad0ab1: the answer to `sagemaker:/etc/shadow` had its first line."""
    root = issue(db, "root", Role.ADMIN)
    for text in (SECRET, f"{SECRET}\n{SECRET}: [", f"hosts: {SECRET!r}", f"[{SECRET!r}]", f"? {SECRET}\n: - {SECRET}"):
        (tmp_path / "shadow").write_text(text)
        word = f"{kind}:{tmp_path / 'shadow'}"
        answers = [
            closed.post(JOBS, json={**SPEC, "target": word}, headers=root),
            closed.post("/v1/targets", json={"name": "gpus", "word": word}, headers=root),
        ]
        for answer in answers:
            assert answer.status_code == 422 and "words-of-a-file" not in answer.text, answer.text
            assert "its settings cannot be used" in answer.text


@pytest.mark.parametrize("place", ["jobs/x/attempts/1/outputs/s.yaml", "storage/jobs/x/outputs/s.yaml", "link.yaml"])
def test_what_a_job_left_is_never_a_setting(closed: TestClient, db: Database, tmp_path: Path, place: str) -> None:
    """Seen on 1ad0ab1: a kubeconfig with `exec` among the outputs of a job ran a command as root."""
    left = tmp_path / "home" / ("jobs/x/s.yaml" if place == "link.yaml" else place)
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_text("{}")
    file = tmp_path / "home" / place
    if place == "link.yaml":
        file.symlink_to(left)
    root = issue(db, "root", Role.ADMIN)
    for answer in (
        closed.post(JOBS, json={**SPEC, "target": f"kubernetes:{file}"}, headers=root),
        closed.post("/v1/targets", json={"name": "gpus", "word": f"kubernetes:{file}"}, headers=root),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "file_of_job"), answer.text
    home = tmp_path / "home"
    with pytest.raises(AccessRefused, match="never a setting"):
        known_targets.refuse_job_file(f"kubernetes:{file}", home)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "s.yaml").write_text("{}")
    with pytest.raises(AccessRefused, match="never a setting"):
        known_targets.refuse_job_file(f"pool:{tmp_path}/elsewhere/s.yaml", home, str(tmp_path / "elsewhere"))
    known_targets.refuse_job_file(f"pool:{tmp_path}/elsewhere/s.yaml", home)


@as_root
def test_every_project_has_an_account_of_its_own(db: Database, hosts: Path, tmp_path: Path) -> None:
    known_targets.add(db, "gpus", f"ssh:{hosts}", home=tmp_path, by="local")
    known_targets.grant(db, "gpus", "lab", user="tm-lab", by="local")
    known_targets.grant(db, "gpus", "lab", user="tm-lab", by="local")  # a second time changes nothing
    known_targets.grant(db, "local", "lab", user="nobody", by="local")
    refusals = {
        ("gpus", "tm-lab"): "is the account of project lab on gpus",
        ("gpus", "root"): "never have the server's own rights. Name another account",
        ("gpus", "x;y"): "not the name of an account",
        ("local", None): "run as the user of the server",
        ("local", "nobody"): "is the account of project lab on local",
        ("local", "root"): "is root",
        ("local", "no-such-user"): "useradd",
        ("slurm", None): "sbatch runs here, as the user of the server",
        ("slurm", "tm-infra"): "login",
        ("kubernetes", None): "the server's own kubeconfig",
        ("kubernetes", "Not_A_Namespace"): "NAMESPACE",
        ("lambda", "tm-infra"): "has no accounts",
        ("sagemaker", None): "trainmaster target add NAME --as sagemaker:account.yaml",
        (f"ssh:{hosts}", "tm-infra"): "make its file known first",
        ("nowhere", None): "no target 'nowhere'",
    }
    for (name, user), expected in refusals.items():
        with pytest.raises(UsageError) as refused:
            known_targets.grant(db, name, "infra", user=user, by="local")
        assert expected in str(refused.value), (name, user)
    known_targets.add(db, "same", f"ssh:{hosts}", home=tmp_path, by="local")
    with pytest.raises(UsageError, match="account of project lab on gpus"):
        known_targets.grant(db, "same", "infra", user="tm-lab", by="local")
    for name, user in (("gpus", "tm-infra"), ("local", "daemon"), ("kubernetes", "infra/trainer"), ("lambda", None)):
        known_targets.grant(db, name, "infra", user=user, by="local")
    known_targets.grant(db, "lambda", "lab", user=None, by="local")  # a machine of its own for each attempt
    with pytest.raises(AccessRefused, match="file_systems are of the whole account"):
        known_targets.admit(db, parse_spec({**SPEC, "target": "lambda", "rent": {"file_systems": ["x"]}}))
    known_targets.admit(db, parse_spec({**SPEC, "target": "lambda"}))


def test_a_target_that_does_not_say_its_account_is_refused(
    db: Database, hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_targets.add(db, "gpus", f"ssh:{hosts}", home=tmp_path, by="local")
    known_targets.grant(db, "gpus", "lab", user="tm-lab", by="local")
    known_targets.admit(db, parse_spec(SPEC))
    with monkeypatch.context() as patch, pytest.raises(AccessRefused, match="does not say which account"):
        patch.delattr(targets.ssh, "runs_as")
        known_targets.admit(db, parse_spec(SPEC))
    hosts.write_text("hosts: [gpu-01]\n")
    known_targets.grant(db, "gpus", "lab", user="tm-lab", by="local")
    hosts.write_text(SECRET)
    with pytest.raises(UsageError, match="its settings cannot be used"):
        known_targets.admit(db, parse_spec(SPEC))


SLURM = "folder: /shared/tm\nlogin: {host: login-1, user: alice}\n"
KUBERNETES = "image: i\nnamespace: default\nservice_account: everything\n"
# Every pod has one user number: a folder of the node is parted, or one project reads the checkpoints of another.
DISKS = "volumes: [{mount: /whole, host_path: /data, read_only: true}, {mount: /part, host_path: /nvme}]\n"


@pytest.mark.parametrize(
    ("kind", "text", "user", "expected"),
    [
        ("ssh", "defaults: {user: alice}\nhosts: [gpu-01]\n", "tm-lab", ["~/.trainmaster/jobs/"]),
        ("ssh", "defaults: {user: a, folder: /shared}\nhosts: [gpu-01]\n", "tm-lab", ["/shared/tm-lab/jobs/"]),
        ("slurm", SLURM, "tm-lab", ["/shared/tm/tm-lab/jobs/"]),
        ("kubernetes", KUBERNETES, "lab-jobs", ["namespace: lab-jobs", "automountServiceAccountToken: false"]),
        ("kubernetes", KUBERNETES, "lab-jobs/t", ["namespace: lab-jobs", "serviceAccountName: t"]),
        ("kubernetes", KUBERNETES + DISKS, "lab-jobs", ["mountPath: /part", "subPath: lab-jobs"]),
        ("hyperpod", KUBERNETES, "lab-jobs", ["namespace: lab-jobs", "automountServiceAccountToken: false"]),
    ],
)
def test_a_job_is_planned_as_the_account_of_its_project(
    tmp_path: Path, kind: str, text: str, user: str, expected: list[str]
) -> None:
    (tmp_path / "s.yaml").write_text(text)
    word = targets.spell(f"{kind}:{tmp_path / 's.yaml'}", user)
    account = targets.runs_as(word)
    assert account is not None and account.name == user.partition("/")[0] and not account.server
    job = parse_spec({**SPEC, "resources": {"processes_per_node": 1}})
    planned = targets.load(word).plan(Placement(attempt=ATTEMPT, spec=job, job_folder=tmp_path / "JOB"))
    for part in expected:
        assert part in planned.render(), planned.render()
    assert "whole" not in text or planned.render().count("subPath: lab-jobs") == 1, "the read-only one is for all"
    assert "everything" not in planned.render()


def test_a_spec_cannot_state_an_account(closed: TestClient, db: Database) -> None:
    root = issue(db, "root", Role.ADMIN)
    for word in ("daemon@local", "x@ssh:/etc/hosts.yaml", "@local", "local@", "lo cal"):
        answer = closed.post(JOBS, json={**SPEC, "target": word}, headers=root)
        assert answer.status_code == 422 and answer.json()["error"]["faults"][0]["path"] == "target", word
    assert targets.split("ssh:/x@local") == (None, "ssh", "/x@local"), "an option is no account"
    assert targets.split("a@corp@ssh:lab") == ("a@corp", "ssh", "lab")


def test_the_verb_says_the_same_on_the_home_and_on_a_server(db: Database, tmp_path: Path, hosts: Path) -> None:
    home = tmp_path / "home"
    token = issue(db, "root", Role.ADMIN)["Authorization"].removeprefix("Bearer ")
    with serve(db, tmp_path / "server", require_token=True) as url:
        said = []
        for where, env in ((["--home", str(home)], {}), (["--server", url], {"TRAINMASTER_TOKEN": token})):
            words = [
                ("add", "gpus", "--as", f"ssh:{hosts}", "--project", "lab", "--user", "tm-lab"),
                ("list",), ("show", "gpus", "--json"), ("grant", "lambda", "--project", "lab"),
                ("revoke", "lambda", "--project", "lab"), ("remove", "gpus"), ("list", "--json"),
            ]  # fmt: skip
            done = [run("target", *line, *where, **env) for line in words]
            assert [each.exit_code for each in done] == [0] * len(words), [each.output for each in done]
            said.append([each.output for each in done])
        assert said[0] == said[1] and "tm-lab" in said[0][1]
        assert run("target", "show", "gpus", "--server", url, TRAINMASTER_TOKEN=token).exit_code == 1
    (tmp_path / "job.yaml").write_text("name: a\nproject: lab\ncommand: ['true']\n")
    assert run("target", "add", "gpus", "--as", f"ssh:{hosts}", "--home", str(home)).exit_code == 0
    planned = run("submit", str(tmp_path / "job.yaml"), "--on", "gpus", "--dry-run", "--home", str(home))
    assert planned.exit_code == 0 and "ssh NODE-0" in planned.output
    assert "is not one of" in str(run("submit", str(tmp_path / "job.yaml"), "--on", "gpu", "--dry-run").exception)


@pytest.fixture
def machine(real: None, tmp_path: Path) -> Iterator[tuple[list[pwd.struct_passwd], Callable[..., str]]]:
    """Two Unix accounts behind one real OpenSSH server that has several names; the word of a hosts file with one."""
    with accounts("a", "b") as (users, folder), lab(folder) as made:
        (folder / "client.pub").chmod(0o644)
        first, second = made.start("first", own_homes=True), made.start("second", own_homes=True)
        made.wait()
        public = " ".join(Path(f"{folder}/host.pub").read_text().split()[:2])
        names = [f"[{name}]:{one.port}" for name in ("localhost", "127.0.0.1") for one in (first, second)]
        made.known_hosts.write_text("".join(f"{name} {public}\n" for name in names))
        ports = {"first": first.port, "second": second.port}

        def write(host: str, server: str = "first") -> str:
            path = tmp_path / f"{host}-{server}.yaml"
            entry = {"host": host, "port": ports[server], "key": str(made.key), "python": "/usr/bin/python3"}
            path.write_text(yaml.safe_dump({"known_hosts": str(made.known_hosts), "hosts": [entry]}))
            return f"ssh:{path}"

        yield users, write


@needs_accounts
@needs_sshd
@pytest.mark.spawns
def test_one_account_is_known_under_every_name(db: Database, tmp_path: Path, machine: Any) -> None:
    """Seen before: a project for each spelling (127.0.0.1, localhost, another port, `local`) of one account."""
    (mine, other), write = machine
    words = {"plain": write("127.0.0.1"), "named": write("localhost"), "port": write("127.0.0.1", "second")}
    for name, word in words.items():
        known_targets.add(db, name, word, home=tmp_path, by="local")
    known_targets.grant(db, "plain", "lab", user=mine.pw_name, by="local")
    known_targets.grant(db, "named", "lab", user=mine.pw_name, by="local")  # one project may have several names
    for name in ("named", "port", "local"):
        with pytest.raises(UsageError, match="is the account of project lab on"):
            known_targets.grant(db, name, "infra", user=mine.pw_name, by="local")
        known_targets.grant(db, name, "infra", user=other.pw_name, by="local")
    known_targets.revoke(db, "local", "infra", by="local")
    with pytest.raises(UsageError, match="is the account of project infra on"):
        known_targets.grant(db, "local", "third", user=other.pw_name, by="local")
    known_targets.admit(db, parse_spec({**SPEC, "target": "plain"}))
    # The file names another machine by now: nobody asked that one.
    Path(words["plain"].partition(":")[2]).write_text(Path(words["port"].partition(":")[2]).read_text())
    with pytest.raises(AccessRefused, match="was not there when it was granted"):
        known_targets.admit(db, parse_spec({**SPEC, "target": "plain"}))
    assert "was not there when it was granted" in known_targets.show(db, "plain")[0].granted[0].fault


@needs_accounts
@needs_sshd
@pytest.mark.spawns
@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"shell": "/usr/sbin/nologin"}, "cannot run /usr/bin/python3 there: This account is currently not available"),
        ({"home": False}, "has no home folder there that it may write to"),
    ],
)
def test_an_account_that_can_run_no_job_is_refused_at_once(
    db: Database, tmp_path: Path, machine: Any, made: dict[str, Any], said: str
) -> None:
    known_targets.add(db, "gpus", machine[1]("127.0.0.1"), home=tmp_path, by="local")
    with accounts("c", **made) as ((user,), _), pytest.raises(UsageError, match=said):
        known_targets.grant(db, "gpus", "lab", user=user.pw_name, by="local")
    with pytest.raises(UsageError, match="it refuses user tmt-nobody-knows"):
        known_targets.grant(db, "gpus", "lab", user="tmt-nobody-knows", by="local")


@as_root
@pytest.mark.spawns
@pytest.mark.usefixtures("real")
def test_a_local_account_runs_python_or_is_refused(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    known_targets.grant(db, "local", "lab", user="nobody", by="local")
    with pytest.raises(UsageError, match="is the account of project lab on local"):
        known_targets.grant(db, "local", "infra", user="nobody", by="local")
    monkeypatch.setenv("TRAINMASTER_JOB_USER", "daemon")
    with pytest.raises(UsageError, match="is the user of --job-user"):
        known_targets.grant(db, "local", "infra", user="daemon", by="local")
    monkeypatch.setattr(sys, "executable", "/root/nowhere/python")
    with pytest.raises(UsageError, match=r"^local: games cannot run /root/nowhere/python") as refused:
        known_targets.grant(db, "local", "infra", user="games", by="local")
    assert "install it where every account can" in str(refused.value) and "--trust-jobs" in str(refused.value)


def test_a_refusal_names_its_target_once(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_word: str) -> dict[str, str]:
        raise UsageError("local: nobody cannot run /x/python3: [Errno 13] Permission denied")

    monkeypatch.setattr(targets, "identify", refuse)
    with pytest.raises(UsageError, match=r"^local: nobody cannot run /x/python3: \[Errno 13\] .*; use an account"):
        known_targets._identify("nobody@local", "local")
    with pytest.raises(UsageError, match=r"^mine: local: nobody cannot run"):
        known_targets._identify("nobody@local", "mine")


def test_a_grant_of_an_earlier_version_was_never_asked(db: Database, hosts: Path, tmp_path: Path) -> None:
    known_targets.add(db, "gpus", f"ssh:{hosts}", home=tmp_path, by="local")
    with db.write() as conn:
        at = datetime(2026, 3, 1, tzinfo=UTC)
        conn.execute(tables.target_grants.insert().values(target="gpus", project="lab", user="tm-lab", created_at=at))
    with pytest.raises(AccessRefused, match="never asked whose account this is; grant it again"):
        known_targets.admit(db, parse_spec(SPEC))
