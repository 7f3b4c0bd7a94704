"""What every target promises by its traits, as functions of its name, for test_traits.py and test_toy_target.py."""

from __future__ import annotations

import contextlib
import uuid
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner, Result

from trainmaster import targets
from trainmaster.cli.main import build
from trainmaster.core.errors import UsageError
from trainmaster.core.roles import Role
from trainmaster.core.spec import parse_spec
from trainmaster.store import jobs
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from web.furnished import issue

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
VERBS = ("check", "accept", "bandwidth", "isolate", "remedy")
MARK = "words-of-a-file-of-the-server"
# Every route that starts a job; test_traits.py holds the list to the code.
ROUTES = (
    "/v1/training/jobs",
    "/v1/training/jobs/{job}/resume",
    "/v1/training/jobs/{job}/rerun",
    "/jobs/{job}/resume",
    "/jobs/{job}/rerun",
)


def run(*words: str, **env: str) -> Result:
    return CliRunner(env={"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb", **env}).invoke(build(), list(words))


def hold_statement(name: str) -> None:
    """The traits agree with each other and with the target's module."""
    traits = targets.traits(name)
    assert traits.title and (traits.option == "none") == (traits.example == "")
    assert not (traits.required and traits.option == "none")
    assert all(traits.has(verb) or traits.alternative(verb) for verb in VERBS)
    assert set(traits.instead) | traits.one_job <= set(VERBS)
    assert not traits.names_file(name) and not traits.names_file(f"{name}:")
    if traits.required:
        with pytest.raises(UsageError, match=f"{name}:"):
            targets.load(name)
    if traits.option == "none":
        with pytest.raises(UsageError, match="takes no options"):
            targets.load(f"{name}:anything")
    if traits.drains:
        scheduler = targets.load_scheduler(name)
        assert all("n1" in " ".join(command) for command in scheduler.drain("n1", "trainmaster: a"))


def open_api(db: Database, folder: Path) -> TestClient:
    app = create_app(db, folder, reconcile=False, require_token=True)
    return TestClient(app, base_url="http://127.0.0.1:8470", follow_redirects=False)


def hold_api(name: str, db: Database, client: TestClient, folder: Path) -> None:
    """Nobody but an admin of the server names a file of the server, or uses a target without a grant; and nobody at
    all reads a word of a refused file. A target that does not say which account its jobs have is granted to nobody."""
    file = folder / "settings.yaml"
    file.write_text(f"{MARK}: [")
    spec = {"name": "a", "project": "lab", "command": ["true"]}
    callers = {"user": (Role.USER, None), "admin-of-lab": (Role.ADMIN, "lab")}
    tokens = {who: issue(db, f"{who}-{name}", role, project) for who, (role, project) in callers.items()}
    admin, stated = issue(db, f"admin-{name}", Role.ADMIN), targets.traits(name)
    for option in (file, "~/settings.yaml", "./lab", "lab", ""):
        word, job_id = f"{name}:{option}".rstrip(":"), str(uuid.uuid4())
        code = "file_of_server" if stated.names_file(word) else "not_granted"
        with db.write() as conn:
            jobs.insert_job(conn, job_id, parse_spec({**spec, "target": word}), at=AT)
        for route in ROUTES:
            place = route.format(job=job_id)
            body: Any = {} if "{job}" in route else {"json": {**spec, "target": word}}
            for who, token in tokens.items():
                answer = client.post(place, headers=token, **body)
                assert answer.status_code == 403, (who, word, place, answer.text)
                assert MARK not in answer.text, (who, word, place)
                if route.startswith("/v1/"):
                    assert answer.json()["error"]["code"] == code, (who, word, place, answer.text)
            answer = client.post(place, headers=admin, **body)
            assert answer.status_code != 403 and MARK not in answer.text, (word, place, answer.text)
    if targets.find_traits(name) is not None and not stated.required:
        account = None
        with contextlib.suppress(UsageError):  # of no file: its own, which is the server's, or none
            account = targets.runs_as(name)
        assert account is None or account.server or account.alone, account


def hold_server(name: str, url: str, token: str, folder: Path) -> None:
    """The same on the command line against a server."""
    (folder / "job.yaml").write_text("name: a\nproject: lab\ncommand: ['true']\n")
    words = ("submit", str(folder / "job.yaml"), "--workdir", "none", "--server", url)
    refused = run(*words, "--on", f"{name}:/etc/settings.yaml", TRAINMASTER_TOKEN=token)
    stated = targets.traits(name).option == "none"
    expected = "may not use the target" if stated else "only an admin of the server may name a file"
    assert refused.exit_code != 0 and expected in str(refused.exception), refused.output


def hold_absolute(name: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A relative file is meant from here with `--on`, in a spec from the folder of the spec."""
    loaded: list[str] = []

    def load(word: str) -> Any:
        loaded.append(word)
        return SimpleNamespace(plan=lambda _: SimpleNamespace(render=lambda: "", handle={}))

    patch.setattr(targets, "load", load)
    patch.setenv("HOME", str(folder / "me"))
    (folder / "here").mkdir(exist_ok=True)
    patch.chdir(folder / "here")
    spec = folder / "job.yaml"
    for option in ("settings.yaml", "deep/settings.yaml", "~/settings.yaml", "/etc/settings.yaml"):
        word = f"{name}:{option}"
        if targets.traits(name).option == "none":
            expected = [word, word]
        elif option.startswith(("~", "/")):
            expected = [f"{name}:{option.replace('~', str(folder / 'me'))}"] * 2
        else:
            expected = [f"{name}:{folder / 'here' / option}", f"{name}:{folder / option}"]
        spec.write_text("name: a\ncommand: ['true']\n")
        assert run("submit", str(spec), "--on", word, "--dry-run").exit_code == 0
        spec.write_text(f"name: a\ncommand: ['true']\ntarget: {word}\n")
        assert run("submit", str(spec), "--dry-run").exit_code == 0
        assert list(dict.fromkeys(loaded)) == list(dict.fromkeys(expected))
        loaded.clear()


def hold_refusals(name: str) -> None:
    """A verb that it does not have is refused in one line with what to do instead."""
    from trainmaster.cli._documents.hosts_file import load_nodes
    from trainmaster.cluster.remedy import schedulers

    traits = targets.traits(name)
    for verb in (verb for verb in VERBS if not traits.has(verb)):
        with pytest.raises(UsageError) as refused:
            schedulers.load(name) if verb == "remedy" else load_nodes(f"{name}:x", verb=verb)
        assert traits.alternative(verb) in str(refused.value) and "\n" not in str(refused.value)
        assert all(word in str(refused.value) for word in targets.spell_all(verb))
