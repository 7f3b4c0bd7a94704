"""A word of a command is resolved by a server as by the home folder, also where it finds many jobs of a person."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import update

from client.served import serve
from pages import samples
from trainmaster.api.jobs import JobsPage
from trainmaster.cli._jobs.server import ServerJobs
from trainmaster.client import BadRequest, Client
from trainmaster.core.errors import UsageError
from trainmaster.store import tables
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database

pytestmark = pytest.mark.spawns
_MANY = 201  # jobs of ada: more than one answer has


class OldClient(Client):
    """Asks a server that knows neither `by` nor `name`."""

    def jobs(self, **asked: Any) -> JobsPage:
        if {"by", "name"} & asked.keys():
            raise BadRequest(400, "unknown_parameter", "no such parameter: name")
        return super().jobs(**asked)


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    db = open_database(tmp_path_factory.mktemp("home") / "trainmaster.db")
    yield db
    db.close()


@pytest.fixture(scope="module")
def named(db: Database) -> str:
    """The job called ada; every job after it was submitted by ada."""
    story = samples.pending(db, name="ada")
    for number in range(_MANY):
        samples.pending(db, name=f"other-{number}")
    with db.write() as conn:
        conn.execute(update(tables.jobs).where(tables.jobs.c.id != story.id).values(submitted_by="ada"))
    return story.id


@pytest.fixture(scope="module")
def url(db: Database, named: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(db, tmp_path_factory.mktemp("server")) as address:
        yield address


@pytest.mark.parametrize("client", [Client, OldClient])
def test_a_name_is_found_behind_the_jobs_of_a_person(client: type[Client], named: str, url: str) -> None:
    with client(url) as asked:
        jobs = ServerJobs(asked)
        assert jobs.find("ada") == named
        assert jobs.find(named[:13]) == named
        with pytest.raises(UsageError, match="no job 'nobody'"):
            jobs.find("nobody")


@pytest.mark.parametrize("client", [Client, OldClient])
def test_a_name_of_a_set_and_of_a_job_behind_many_is_ambiguous(client: type[Client], named: str, url: str) -> None:
    with client(url) as asked:
        jobs = ServerJobs(asked)
        if not asked.sets(find="ada"):
            matrix = {"name": "ada", "target": "local", "command": ["true"], "matrix": {"env.X": ["1", "2"]}}
            asked.submit_set(matrix)
        with pytest.raises(UsageError, match=f"name of set .* and of job {named}"):
            jobs.find_set("ada")


def test_a_name_takes_one_question(named: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(url) as asked:
        questions: list[dict[str, Any]] = []
        real = asked.jobs
        monkeypatch.setattr(asked, "jobs", lambda **words: questions.append(words) or real(**words))
        assert ServerJobs(asked).find("ada") == named and len(questions) == 1


def test_the_jobs_of_one_person_are_listed(url: str) -> None:
    with Client(url) as asked:
        listed = {"status": None, "project": None, "find": None, "limit": 1, "offset": 0}
        assert ServerJobs(asked).list(**listed, by="ada").total >= _MANY  # type: ignore[arg-type]
        assert ServerJobs(asked).list(**listed, by="ad").total == 0  # type: ignore[arg-type]
        assert asked.jobs(find="a_d@x y").total == 0, "a person's name may have any of these characters"
