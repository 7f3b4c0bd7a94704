"""The wheel that users install: type information and examples are in it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_wheel_brings_types_and_examples(tmp_path: Path) -> None:
    """Built from the checkout, unpacked, and asked for an example as an installed package would be."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    assert (tmp_path / "installed/trainmaster/py.typed").exists()
    shipped = {path.name for path in (tmp_path / "installed/trainmaster/examples").iterdir()}
    assert shipped == {path.name for path in (ROOT / "examples/jobs").iterdir()}
    script = "from trainmaster.cli.main import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", script, "examples", "train.yaml"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "installed")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == (ROOT / "examples/jobs/train.yaml").read_text()
