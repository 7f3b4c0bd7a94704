"""Removal of a checkpoint's folder: all of it, and nothing that it only leads to."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.train.checkpoint.remove import remove_folder


def test_files_links_and_folders_go_and_what_links_lead_to_stays(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "step-00000005.old"
    (outside / "deep").mkdir(parents=True)
    (outside / "kept").write_text("theirs")
    (folder / "below" / "deeper").mkdir(parents=True)
    for name in ("a", "b", "below/c", "below/deeper/d"):
        (folder / name).write_text("ours")
    (folder / "to a file").symlink_to(outside / "kept")
    (folder / "to a folder").symlink_to(outside)
    (folder / "to nothing").symlink_to(tmp_path / "nothing")
    remove_folder(folder)
    assert not folder.exists() and (outside / "kept").read_text() == "theirs" and (outside / "deep").is_dir()


def test_what_cannot_be_removed_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "step-00000005.old"
    folder.mkdir()
    (folder / "held").write_text("x")

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.unlink", refuse)
    with pytest.raises(PermissionError, match="held"):
        remove_folder(folder)
