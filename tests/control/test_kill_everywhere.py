"""SIGKILL at every commit and every side effect: afterwards the rows are those of a run that nobody disturbed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from .drill.story import Case, Told, number
from .drill.warm import Warm


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    process = Warm()
    yield process
    process.close()


def fresh(request: pytest.FixtureRequest, kind: str, home: Path) -> str:
    return str(home / "trainmaster.db") if kind == "sqlite" else request.getfixturevalue("postgres").create()


@pytest.fixture(scope="module")
def undisturbed(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Told:
    home = tmp_path_factory.mktemp("undisturbed")
    return Case(warm, home, str(home / "trainmaster.db")).undisturbed()


def test_a_run_comes_by_every_commit_and_every_effect(undisturbed: Told) -> None:
    places = Counter(undisturbed.places)
    assert len(undisturbed.places) >= 60
    assert {place.partition(":")[0] for place in places} >= {
        "commit lease", "commit intent", "commit placed", "commit submitted", "commit running", "commit lines",
        "commit over", "commit collected", "commit released", "commit completed", "call submit", "call release", "put",
        "commit spread",
    }  # fmt: skip


@pytest.mark.matrix(one_in=12, of="servers and owners killed, held up and searched")
@pytest.mark.timeout(600)  # half a minute on a quiet machine; 84 deaths and new lives
@pytest.mark.parametrize(("kind", "planes"), [("sqlite", 1), ("postgresql", 2)])
def test_control_planes_killed_everywhere_tell_the_same_as_undisturbed(
    request: pytest.FixtureRequest, warm: Warm, tmp_path: Path, undisturbed: Told, kind: str, planes: int
) -> None:
    told = Case(warm, tmp_path, fresh(request, kind, tmp_path), planes=planes).killed_everywhere()
    assert told.ledger == undisturbed.ledger
    assert told.deaths == len(told.places) >= 60


@pytest.mark.matrix(one_in=2)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_killed_once_at_a_place_drawn_by_lot(
    request: pytest.FixtureRequest, warm: Warm, tmp_path: Path, undisturbed: Told, kind: str
) -> None:
    """`make chaos-control` does this for every place, on both databases.

    How many transactions the lines of a job take is chance: a place that was not reached is no kill, and another is
    drawn. What such a run tells is compared as well.
    """
    places = number(undisturbed.places)
    for place in random.Random(f"5 {kind}").sample(places, 4):
        (home := tmp_path / str(places.index(place))).mkdir()
        told = Case(warm, home, fresh(request, kind, home)).killed_at(place)
        assert told.ledger == undisturbed.ledger, place
        if told.deaths == 1:
            return
        assert told.deaths == 0 and place.startswith("commit lines"), place
    pytest.fail("none of four places was reached")
