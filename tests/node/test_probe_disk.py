"""The disk probe on a real disk: it measures, compares, says what is wrong, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainmaster.node import probe_disk
from trainmaster.node.host import Host


def test_it_measures_and_leaves_nothing(tmp_path: Path) -> None:
    found = probe_disk.probe(tmp_path, most_mib=16)
    assert found["intact"] is True
    assert found["mib"] == 16
    assert found["write_mib_s"] > 0
    assert found["read_mib_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_made_yet_is_measured_on_its_parents_disk(tmp_path: Path) -> None:
    assert probe_disk.probe(tmp_path / "run" / "checkpoints", most_mib=4)["intact"] is True
    assert list(tmp_path.iterdir()) == []


def test_damaged_data_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that writes other bytes than it was given."""
    honest = probe_disk._write_all

    def flip(file: object, data: bytearray) -> None:
        wrong = bytearray(data)
        wrong[12345] ^= 1
        honest(file, wrong)  # type: ignore[arg-type]

    monkeypatch.setattr(probe_disk, "_write_all", flip)
    assert probe_disk.probe(tmp_path, most_mib=4)["intact"] is False


@pytest.mark.spawns
def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    ran = Host().run("python", "-m", "trainmaster.node.probe_disk", "/proc/self")
    assert ran.exit_code == 1
    assert json.loads(ran.stdout)["error"]
    (tmp_path / "file").write_text("")
    assert Host().run("python", "-m", "trainmaster.node.probe_disk", str(tmp_path / "file")).exit_code == 1


@pytest.mark.spawns
def test_it_takes_one_folder() -> None:
    assert Host().run("python", "-m", "trainmaster.node.probe_disk").exit_code == 2
