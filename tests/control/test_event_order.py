"""The records of a run are the same for every order of its lines, and every way of reading them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainmaster.core.events import Event, Line
from trainmaster.core.plan import EVENTS_FILE, node_file
from trainmaster.store import attempts, events, nodes
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database

from .lines import ingest_bytes, line, new_job, records

pytestmark = pytest.mark.both_databases

numbers = st.integers(1, 3)
seconds = st.one_of(st.none(), st.floats(0, 100, allow_nan=False), st.just("soon"))
configs = st.one_of(st.just({}), st.builds(lambda value: {"config": {"k": value}}, st.integers(0, 3)))
PARTS = ["TRAJECTORY", "TRAINING", "EVAL_TRAINING", "ITERATION"]
Piece = tuple[str, str, dict[str, Any]]  # phase, event, the fields beside them


def _end(taken: object) -> dict[str, Any]:
    return {"data": {} if taken is None else {"duration": taken}}


pieces: st.SearchStrategy[Piece] = st.one_of(
    st.builds(lambda data: ("PROJECT", "start", {"data": data}), configs),
    st.builds(lambda taken: ("PROJECT", "end", _end(taken)), seconds),
    st.builds(lambda data: ("GROUP_ITERATION", "start", {"data": data}), configs),
    st.builds(lambda p, n, c: (p, "start", {"iteration": n, "data": c}), st.sampled_from(PARTS), numbers, configs),
    st.builds(lambda p, n, t: (p, "end", {"iteration": n, **_end(t)}), st.sampled_from(PARTS), numbers, seconds),
    st.builds(lambda p, data: (p, "start", {"data": data}), st.sampled_from(PARTS), configs),  # no iteration
    st.builds(
        lambda n, e, loss: ("TRAINING", "epoch_complete", {"iteration": n, "epoch": e, "data": {"avg_loss": loss}}),
        numbers, numbers, st.floats(0, 9),
    ),
    st.builds(lambda n, f1: ("EVAL_MODEL", "metrics", {"iteration": n, "data": {"model_id": "m", "f1": f1}}), numbers,
              st.floats(0, 1)),
    st.builds(lambda name, verdict: ("PREFLIGHT", "check", {"data": {"check": name, "verdict": verdict}}),
              st.sampled_from(["disk", "clock"]), st.sampled_from(["pass", "fail", "odd"])),
    st.just(("STEP", "metrics", {"data": {"loss": 1.0}})),
)  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    database = open_database(tmp_path_factory.mktemp("order") / "trainmaster.db")
    yield database
    database.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(run=st.lists(pieces, max_size=14), seed=st.integers(0, 2**32), looks=st.lists(st.integers(0, 1500), max_size=4))
def test_any_order_of_lines_reads_and_restarts_gives_the_same_records(
    shared: Database, run: list[Piece], seed: int, looks: list[int]
) -> None:
    """Every line of a run has a time of its own; starts, ends, epochs and checks may be told several times."""
    lines = [line(at, phase, event, **more) for at, (phase, event, more) in enumerate(run)]
    job_id, attempt = new_job(shared)
    ingest_bytes(shared, attempt, b"".join(lines))
    shuffled = list(lines)
    random.Random(seed).shuffle(shuffled)
    other, attempt = new_job(shared)
    content = b"not an event\n" + b"".join(shuffled)
    for size in sorted(looks):  # each is a restart, at a file that has grown; half a line waits
        ingest_bytes(shared, attempt, content[:size], chunk=97)
    ingest_bytes(shared, attempt, content, last=True)
    assert records(shared, other) == records(shared, job_id)


def test_lines_of_one_moment_differ_only_in_which_epoch_stands(shared: Database) -> None:
    """What may depend on the order, as store/projection.py says: two tellings of one epoch at the same time."""
    one = line(0, "TRAINING", "epoch_complete", epoch=1, data={"avg_loss": 1.0})
    two = line(0, "TRAINING", "epoch_complete", epoch=1, data={"avg_loss": 2.0})
    starts = [line(0, "TRAINING", "start", data={"config": {"k": k}}) for k in (1, 2)]
    outcomes = []
    for order in ((one, two, *starts), (two, one, *reversed(starts))):
        job_id, attempt = new_job(shared)
        ingest_bytes(shared, attempt, b"".join(order))
        outcomes.append(records(shared, job_id))
    assert [record["epochs"][0]["avg_loss"] for record in outcomes] == [2.0, 1.0]
    assert outcomes[0]["steps"] == outcomes[1]["steps"]


def test_a_duration_that_is_none_holds_nothing_up(shared: Database) -> None:
    job_id, attempt = new_job(shared)
    ends = [
        line(at, "TRAINING", "end", data={"duration": taken}) for at, taken in enumerate((1e308, 1e308, -1.0, True))
    ]
    ingest_bytes(shared, attempt, line(0, "TRAINING", "start") + b"".join(ends))
    assert records(shared, job_id)["steps"][0]["step_time"] == 3.0


@pytest.mark.parametrize("streams", [(0, 1), (1, 0)])
def test_nodes_with_one_host_name_keep_their_checks_apart_in_any_order(db: Database, streams: tuple[int, ...]) -> None:
    """A later node may be read before the first one; machines of one image may share a host name."""
    job_id, attempt = new_job(db)
    with db.write() as conn:
        attempts.set_handle(conn, attempt, {"nodes": ["left", "right"]})
    for node in streams:
        told = [Event(phase="PROJECT", event="start", data={"host": "ubuntu"})]
        told += [Event(phase="PREFLIGHT", event="check", data={"check": "cpu", "verdict": ("pass", "fail")[node]})]
        lines = [Line(offset=10 * number, length=10, event=event) for number, event in enumerate(told)]
        with db.write() as conn:
            assert events.append_events(conn, attempt, node_file(EVENTS_FILE, node), seen_offset=0, lines=lines)
    verdicts = [(row.node, str(row.verdict)) for row in nodes.list_checks(db, job_id)]
    assert verdicts == [("left", "pass"), ("right", "fail")]
