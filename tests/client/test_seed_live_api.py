"""Seed 004, phases 6.2 and 6.3: jobs through the API of a running server, alone and several at once.

The workload writes the seed's events one part at a time and waits for a file before each, so that "in real time" is
asserted and not hoped for.
"""

from __future__ import annotations

import asyncio
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

import trainmaster
from client.served import serve
from trainmaster.client import Client, Details, Epoch, Evaluation, JobPage, JobsPage, NotFound, Submitted
from trainmaster.store.migrate import open_database
from trainmaster.targets.local import Local

T = TypeVar("T")
SCRIPT = """
import json, os, pathlib, sys, time
go = pathlib.Path(sys.argv[1])
def part(name, *events):
    while not (go / name).exists():
        time.sleep(0.02)
    with open(os.environ["TRAINMASTER_EVENTS"], "a") as file:
        for phase, event, numbers, data in events:
            file.write(json.dumps({"phase": phase, "event": event, "data": data, **numbers}) + "\\n")
for n in (1, 2):
    i = {"iteration": n}
    part(f"iteration-{n}", ("ITERATION", "start", i, {"step_config": {"n": n}}))
    for e in (1, 2, 3):
        part(f"epoch-{n}-{e}", ("TRAINING", "epoch_complete", {**i, "epoch": e}, {"avg_loss": 1 / (n + e)}))
    part(f"eval-{n}", ("EVAL_MODEL", "metrics", i, {"model_id": f"m{n}", "accuracy": 0.5 + n / 10}),
         ("ITERATION", "end", i, {"duration": 1.5}))
part("end")
"""


class Server:
    """A server that drives its jobs, and the gates of their workloads."""

    def __init__(self, client: Client, url: str, folder: Path) -> None:
        self.client, self.url, self._folder = client, url, folder

    def submit(self, name: str, *, project: str = "live") -> Submitted:
        (self._folder / name).mkdir()
        command = [sys.executable, "-c", SCRIPT, str(self._folder / name)]
        spec = {"name": name, "project": project, "preflight": {"level": 0}, "command": command}
        return self.client.submit({**spec, "limits": {"grace_s": 1}})

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            text: str = answer.read().decode()
        return text

    def let(self, name: str, *parts: str) -> None:
        for part in parts:
            (self._folder / name / part).touch()

    def let_all(self, name: str) -> None:
        for n in (1, 2):
            self.let(name, f"iteration-{n}", *(f"epoch-{n}-{e}" for e in (1, 2, 3)), f"eval-{n}")
        self.let(name, "end")


def until(read: Callable[[], T], fits: Callable[[T], object]) -> T:
    """The first answer that fits; the limit only ends a test that has failed."""
    end = time.monotonic() + 90
    while not fits(value := read()):
        assert time.monotonic() < end, value
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("live")
    db = open_database(home / "trainmaster.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(trainmaster.__file__).parents[1]))
        with serve(db, home, reconcile=True) as url, Client(url) as client:
            yield Server(client, url, tmp_path_factory.mktemp("gates"))
    db.close()


@dataclass
class Seen:
    """What was seen of one job while it ran, and of another that was cancelled."""

    submitted: Submitted
    statuses: list[str] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)  # how many, after each was let begin
    epochs: list[int] = field(default_factory=list)  # how many of iteration 1, after each was let end
    others: dict[str, Any] = field(default_factory=dict)


def epochs(client: Client, job_id: str, n: int) -> tuple[Epoch, ...]:
    try:
        return client.epochs(job_id, n)
    except NotFound:
        return ()


@pytest.fixture(scope="module")
def seen(server: Server) -> Seen:
    client, seen = server.client, Seen(submitted=server.submit("alone"))
    job_id = seen.submitted.id
    seen.statuses.append(seen.submitted.status)
    seen.statuses.append(until(lambda: client.job(job_id), lambda job: job.status != "pending").status)
    for n in (1, 2):
        before = len(client.details(job_id).iterations)
        assert before == n - 1, "an iteration was there before it began"
        server.let("alone", f"iteration-{n}")
        seen.iterations.append(
            len(until(lambda: client.details(job_id).iterations, lambda found, n=n: len(found) == n))  # type: ignore[misc]
        )
        for e in (1, 2, 3):
            server.let("alone", f"epoch-{n}-{e}")
            told = until(lambda n=n: epochs(client, job_id, n), lambda found, e=e: len(found) >= e)  # type: ignore[misc]
            seen.epochs.append(len(told))
        server.let("alone", f"eval-{n}")
    seen.others["while it ran"] = client.job(job_id)
    server.let("alone", "end")
    seen.others["ended"] = until(lambda: client.job(job_id), lambda job: job.final)
    stopped = server.submit("stopped")
    until(lambda: client.job(stopped.id), lambda job: job.stage == "running" and job.attempts)
    seen.others["asked"] = client.cancel(stopped.id)
    seen.others["stopped"] = until(lambda: client.job(stopped.id), lambda job: job.final)
    return seen


def test_start_job_via_api(seen: Seen) -> None:
    assert seen.submitted.new and seen.submitted.status == "pending" and seen.submitted.name == "alone"


def test_poll_status_while_running(seen: Seen) -> None:
    assert seen.statuses == ["pending", "running"]
    assert seen.others["while it ran"].status == "running" and seen.others["ended"].status == "completed"


def test_check_iterations_appear_in_real_time(seen: Seen) -> None:
    assert seen.iterations == [1, 2]


def test_check_epochs_appear_as_training_progresses(seen: Seen) -> None:
    assert seen.epochs == [1, 2, 3] * 2


def test_get_detailed_job_info(seen: Seen, server: Server) -> None:
    details: Details = server.client.details(seen.submitted.id)
    assert [(item.number, item.epochs, item.time_taken) for item in details.iterations] == [(1, 3, 1.5), (2, 3, 1.5)]
    assert details.job.status == "completed" and details.job.spec["project"] == "live"


def test_cancel_a_running_job(seen: Seen) -> None:
    asked: Submitted = seen.others["asked"]
    stopped: JobPage = seen.others["stopped"]
    assert asked.cancel_requested and stopped.status == "cancelled" and stopped.reason == "user_cancelled"


def test_verify_cleanup_happens_after_cancel(seen: Seen) -> None:
    job_id = seen.others["stopped"].id
    living = [owned.attempt for owned in asyncio.run(Local().list_owned())]
    assert f"{job_id}.1" not in living, "its processes are still there"


def test_list_jobs_with_various_filters(seen: Seen, server: Server) -> None:
    jobs = server.client.jobs
    assert {line.name for line in jobs(status="completed", project="live").jobs} == {"alone"}
    assert {line.name for line in jobs(status="cancelled").jobs} == {"stopped"}
    assert jobs(project="nobody").total == 0
    assert [line.name for line in jobs(project="live", limit=1, offset=1).jobs] == ["alone"]


def test_get_evaluation_results(seen: Seen, server: Server) -> None:
    evaluations: tuple[Evaluation, ...] = server.client.evaluations(job=seen.submitted.id)
    assert {item.model_id: (item.metrics or {})["accuracy"] for item in evaluations} == {"m1": 0.6, "m2": 0.7}
    assert [item.iteration for item in server.client.evaluations(model="m2")] == [2]


@dataclass
class Together:
    """Three jobs at once, and a fourth beside them that is cancelled."""

    started: list[Submitted]
    at_once: JobsPage
    held: str  # /metrics while all four run
    after_one: dict[str, str]
    after_cancel: dict[str, str]
    ended: dict[str, JobPage]


@pytest.fixture(scope="module")
def together(seen: Seen, server: Server) -> Together:  # after `seen`, whose counts would otherwise meet these jobs
    client = server.client
    started = [server.submit(name, project="many") for name in ("one", "two", "three", "four")]

    def statuses() -> dict[str, str]:
        return {line.name: line.status for line in client.jobs(project="many").jobs}

    at_once = until(lambda: client.jobs(status="running", project="many"), lambda found: len(found.jobs) == 4)
    held = server.metrics()
    server.let_all("one")
    after_one = until(statuses, lambda found: found["one"] == "completed")
    client.cancel(started[3].id)
    after_cancel = until(statuses, lambda found: found["four"] == "cancelled")
    server.let_all("two")
    server.let_all("three")
    ended = {job.name: client.wait(job.id, every_s=0.1) for job in started}
    return Together(started, at_once, held, after_one, after_cancel, ended)


@pytest.mark.proof
def test_start_3_jobs_simultaneously(together: Together) -> None:
    assert len({job.id for job in together.started[:3]}) == 3 and all(job.new for job in together.started)


def test_all_jobs_tracked_in_active_orchestrators(together: Together) -> None:
    assert {line.name for line in together.at_once.jobs} == {"one", "two", "three", "four"}
    assert "trainmaster_active_orchestrators 4.0" in together.held, "each is held by the reconciler"
    assert {line.stage for line in together.at_once.jobs} <= {"placing", "connecting", "staging", "checking", "running"}


def test_all_jobs_run_independently(together: Together) -> None:
    assert together.after_one == {"one": "completed", "two": "running", "three": "running", "four": "running"}


def test_database_updates_do_not_conflict(together: Together, server: Server) -> None:
    for job in together.started[:3]:
        epochs_stored = [(epoch.number, epoch.avg_loss) for epoch in server.client.epochs(job.id, 2)]
        assert epochs_stored == [(e, pytest.approx(1 / (2 + e))) for e in (1, 2, 3)]
        assert len(server.client.evaluations(job=job.id)) == 2


def test_can_query_status_of_all_jobs(together: Together, server: Server) -> None:
    listed = {line.name: line.status for line in server.client.jobs(project="many").jobs}
    assert listed == {"one": "completed", "two": "completed", "three": "completed", "four": "cancelled"}


def test_can_cancel_individual_jobs(together: Together) -> None:
    assert together.after_cancel["four"] == "cancelled"
    assert {together.after_cancel[name] for name in ("two", "three")} == {"running"}


def test_all_jobs_complete_successfully(together: Together) -> None:
    assert [together.ended[name].status for name in ("one", "two", "three")] == ["completed"] * 3
