"""A seeded sample of the crash matrix: one kill with each kind of damage. `make chaos` lives through all of them."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import trainmaster.train
from trainmaster.train.drill import failpoints

from . import damage, oracle
from .__main__ import draw
from .cases import Case
from .oracle import Broken, Matrix, NotReached
from .warm import Warm

SEED = 20
KILLS = [case for case in draw(SEED) if case.damage is None]


def pick(kind: str) -> Case:
    """One of the kills with this damage; on one rank where several would only cost time."""
    fits = [case for case in draw(SEED) if case.damage == kind and not case.every_one]
    few = [case for case in fits if case.ranks == 1] if kind not in damage.FILES else fits
    return random.Random(f"{SEED} {kind}").choice(few)


SAMPLE = [pick(kind) for kind in damage.KINDS if damage.why_not(kind) is None]
SAMPLE += [case for case in draw(SEED) if case.every_one][1:2]  # and one where nothing good is left


@pytest.fixture(scope="module")
def matrix(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    made = Matrix(tmp_path_factory.mktemp("matrix"), warm)
    yield made
    made.close()


@pytest.mark.matrix(one_in=8)
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_a_killed_and_damaged_run_keeps_its_promises(matrix: Matrix, case: object) -> None:
    matrix.live(case)


@pytest.mark.parametrize("kind", damage.KINDS)
def test_this_machine_can_be_damaged_in_every_way(kind: str) -> None:
    if why := damage.why_not(kind):
        pytest.skip(why)


def test_the_matrix_has_25_places_to_be_killed_at_and_8_kinds_of_damage() -> None:
    assert len({case.name for case in KILLS}) >= 25
    assert {case.place for case in KILLS} == set(failpoints.FAILPOINTS)
    assert len(damage.KINDS) == 8


def test_every_place_is_in_the_code_and_every_place_in_the_code_is_listed() -> None:
    sources = [path.read_text() for path in Path(trainmaster.train.__file__).parent.rglob("*.py")]
    reached = {place for text in sources for place in re.findall(r'reach\(\s*"([a-z]+:[a-z]+)"', text)}
    assert reached == set(failpoints.FAILPOINTS)


def test_the_oracle_sees_a_kill_that_did_not_happen(matrix: Matrix) -> None:
    with pytest.raises(NotReached):
        matrix.live(replace(KILLS[0], place="step:start", when="1000", ranks=1, rank=0))


def test_the_oracle_sees_a_run_that_starts_over(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints that vanish between two attempts are the silent restart that must never pass."""
    kill = oracle._kill

    def kill_and_forget(life: oracle.Life, case: object) -> None:
        kill(life, case)
        shutil.rmtree(life.checkpoints)

    monkeypatch.setattr(oracle, "_kill", kill_and_forget)
    case = next(case for case in KILLS if case.place == "step:start")
    with pytest.raises(Broken, match="started at step 0 although step 6 was saved"):
        matrix.live(replace(case, when="@8", ranks=1, rank=0))
