"""A seeded sample of `make api-fuzz`: as an admin and as nobody, each operation rightly and wrongly asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from web.api_fuzz import fire


@pytest.mark.matrix(one_in=13, of="every route by hostile callers")
def test_the_api_keeps_to_its_document(tmp_path: Path) -> None:
    tally = fire(tmp_path / "trainmaster.db", cases=140, seed=1, callers=("admin", "nobody"))
    assert tally.failures == []
    assert tally.cases >= 120
    assert len(tally.operations) > 30
    assert {200, 401, 404, 422} <= set(tally.statuses)
    assert not any(status >= 500 for status in tally.statuses)
