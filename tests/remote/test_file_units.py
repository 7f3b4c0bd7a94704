"""Units of a file: hashed and sent without being held, received in pieces, journaled only when they are right."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from trainmaster.remote import pull as pulling
from trainmaster.remote.transfer import (
    PIECE_BYTES,
    UNIT_BYTES,
    Changed,
    DamagedUnit,
    FileUnit,
    Incoming,
    Manifest,
    Slice,
    scan,
    sha256,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "here" / "model.bin"
    path.parent.mkdir()
    path.write_bytes(os.urandom(2 * PIECE_BYTES + 17))
    return path


@pytest.fixture
def manifest(source: Path) -> Manifest:
    return scan(source)


def unit_of(source: Path, *, start: int = 0, length: int | None = None) -> FileUnit:
    size = source.stat().st_size if length is None else length
    return FileUnit(source.parent, Slice(path=source.name, start=start, length=size))


def test_a_part_of_a_file_is_hashed_and_sent_as_it_is(source: Path, tmp_path: Path) -> None:
    unit = unit_of(source, start=5, length=PIECE_BYTES + 3)
    wanted = source.read_bytes()[5 : PIECE_BYTES + 8]
    assert len(unit) == len(wanted) and unit.sha256() == hashlib.sha256(wanted).hexdigest() and unit.read() == wanted
    with (tmp_path / "sent").open("wb") as out:
        unit.send(out.fileno())
    assert (tmp_path / "sent").read_bytes() == wanted


def test_a_file_that_became_shorter_or_went_away_is_named(source: Path, tmp_path: Path) -> None:
    unit = unit_of(source)
    os.truncate(source, 10)
    with pytest.raises(Changed, match="became shorter"):
        unit.sha256()
    with pytest.raises(Changed, match="became shorter"), (tmp_path / "sent").open("wb") as out:
        unit.send(out.fileno())
    source.unlink()
    with pytest.raises(Changed, match="was removed"):
        unit.sha256()


def test_a_damaged_unit_is_not_in_the_journal_and_is_sent_again(
    source: Path, manifest: Manifest, tmp_path: Path
) -> None:
    data, incoming = source.read_bytes(), Incoming(tmp_path / "there", manifest.digest)
    assert incoming.begin(manifest) == set()
    with pytest.raises(DamagedUnit, match="damaged on the way"):
        incoming.write(0, sha256(data), b"x" + data[1:])
    with pytest.raises(DamagedUnit, match="bytes"):
        incoming.write(0, sha256(data), data[:-1])
    assert Incoming(tmp_path / "there", manifest.digest).begin(manifest) == set(), "written, and not taken for right"
    incoming.write(0, sha256(data), data)
    incoming.finish(durable=True)
    assert (tmp_path / "there" / source.name).read_bytes() == data and len(data) < UNIT_BYTES
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_two_machines_that_share_a_folder_receive_one_tree_at_once(
    source: Path, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, there = source.read_bytes(), tmp_path / "there"
    machines = [Incoming(there, name) for name in ("one", "other")]
    for incoming in machines:
        assert incoming.begin(manifest) == set()
        incoming.write(0, sha256(data), data)
    machines[0].finish()
    # The second looked before the first was done, as a client of NFS with cached answers does.
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path != there and exists(path))
    machines[1].finish(durable=True)
    assert (there / source.name).read_bytes() == data
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_machines_that_share_a_folder_pull_one_object_into_drafts_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts: list[Path] = []
    monkeypatch.setattr(pulling, "_fetch", lambda _, part: (drafts.append(part), part.write_bytes(b"abc")))
    for machine in ("one", "other", "one"):
        pulling.pull(
            pulling.Object(
                name="a",
                url="",
                place=f"{tmp_path}/{len(drafts)}/a",
                size_bytes=3,
                version="1",
                md5=None,
                sha256=None,
                mode=0o644,
                machine=machine,
            )
        )
    names = [draft.name for draft in drafts]
    assert names[0] == names[2] != names[1]  # its own is found again after a cut
