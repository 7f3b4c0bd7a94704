"""`benchmarks/scale.py` runs, and shows for every kind of cost what it was and what it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
@pytest.mark.spawns
def test_every_cost_is_shown_before_and_after(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    words = ["--ranks", "4", "8", "--layers", "1", "--json", str(out)]
    command = [sys.executable, str(ROOT / "benchmarks" / "scale.py"), *words]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True)
    rows = json.loads(out.read_text())
    for ranks in (4, 8):
        shown = {row["what"] for row in rows if row["ranks"] == ranks}
        assert {"save plan", "load plan", "groups", "pruning", "hang"} <= shown
    assert all(row["before"] and row["after"] for row in rows)
