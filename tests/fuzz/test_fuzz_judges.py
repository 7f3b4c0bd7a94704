"""A sample of the judge layer of `make fuzz`: no damaged answer is judged PASS."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fuzz import judges

pytestmark = pytest.mark.slow
CASES = 600


def test_seeded_damage_is_never_judged_pass(tmp_path: Path) -> None:
    field = judges.open_field(tmp_path, faults=12)
    kinds = Counter(judges.run(field, seed) for seed in range(CASES))
    assert kinds["refused"] > CASES / 2, kinds
