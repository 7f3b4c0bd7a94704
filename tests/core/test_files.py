"""A file written whole: old or new content, never a part, and no draft left behind."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from trainmaster.core.files import DRAFT_PREFIX, is_hole, list_tree, open_whole, write_whole


@pytest.mark.parametrize("durable", [True, False])
def test_the_new_content_replaces_the_old(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a"
    path.write_text("old and longer")
    assert write_whole(path, "né", durable=durable) == path
    assert path.read_bytes() == "né".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_keeps_the_old_content_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), open_whole(path, durable=True) as file:
        file.write(b"half")
        assert path.read_bytes() == b"old"
        (draft,) = (entry for entry in tmp_path.iterdir() if entry != path)
        assert draft.name.startswith(DRAFT_PREFIX)
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_without_replace_the_first_writer_wins(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_whole(path, b"first", durable=True, mode=0o600, replace=False)
    with pytest.raises(FileExistsError):
        write_whole(path, b"second", durable=True, mode=0o600, replace=False)
    assert path.read_bytes() == b"first"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    path = tmp_path / ("n" * os.pathconf(tmp_path, "PC_NAME_MAX"))
    write_whole(path, b"x", durable=False)
    assert path.read_bytes() == b"x"


def test_the_mode_is_reduced_by_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", b"x", durable=False)
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_every_file_of_a_tree_is_listed_or_named_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "inner"
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(b"123")
    (folder / "link").symlink_to("file")
    (folder / "far").symlink_to("/etc")
    os.mkfifo(tmp_path / "out" / "pipe")
    os.mknod(tmp_path / "out" / "socket", stat.S_IFSOCK | 0o600)
    found = sorted((file.name, file.size_bytes, file.fault) for file in list_tree(tmp_path, "out"))
    assert found == [
        ("out/inner/far", 0, "symbolic link, not a plain file"),
        ("out/inner/file", 3, ""),
        ("out/inner/link", 0, "symbolic link, not a plain file"),
        ("out/pipe", 0, "named pipe, not a plain file"),
        ("out/socket", 0, "socket, not a plain file"),
    ]
    assert [file.fault for file in list_tree(Path("/dev"), "null")] == ["device, not a plain file"]
    assert [file.fault for file in list_tree(folder, "file")] == ["not a folder"]
    assert list(list_tree(tmp_path, "absent")) == []


def test_a_hole_is_a_part_without_any_data(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w+b") as file:
        file.truncate(8 << 20)
        file.seek(3 << 20)
        file.write(b"x")
        file.flush()
        fd = file.fileno()
        assert is_hole(fd, 0, 1 << 20) and is_hole(fd, 4 << 20, 4 << 20)
        assert not is_hole(fd, 2 << 20, 2 << 20) and not is_hole(fd, 3 << 20, 1)
        assert not is_hole(fd, 4 << 20, (4 << 20) + 1), "it ends before"
        assert not is_hole(fd, 0, 0)
