"""A sample of the hostile suite; `make hostile` runs the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from .misbehaviours import draw
from .run import run


@pytest.mark.matrix(one_in=12, of="servers and owners killed, held up and searched")
@pytest.mark.spawns
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_sample_of_misbehaviours_holds_nothing_up(database_url: str, tmp_path: Path) -> None:
    wanted = draw(300, seed=0)[:17]  # one of every kind
    verdict = run(tmp_path / "home", database_url, wanted, at_once=4)
    assert verdict.clean, verdict
    assert len(verdict.ended) == len(wanted)


def test_a_seed_gives_the_same_list_and_every_kind() -> None:
    one, two = draw(300, seed=3), draw(300, seed=3)
    assert one == two and one != draw(300, seed=4)
    assert len({item.kind for item in one}) == 17 and len({item.script for item in one}) >= 140
