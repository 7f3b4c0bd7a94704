"""A manifest of a working folder: paths that lead elsewhere, and sizes that do not fit, are refused."""

from __future__ import annotations

import json

import pytest

from trainmaster.core.errors import SpecError
from trainmaster.core.workdir import CHUNK_BYTES, Manifest, WorkdirFile, find_digest, is_inside, parse_manifest

ONE = "a" * 64


def test_the_order_of_entries_does_not_change_the_bytes() -> None:
    files = [WorkdirFile(path=path, size_bytes=1, chunks=(ONE,)) for path in ("b", "a/c")]
    one, two = Manifest(files=tuple(files)), Manifest(files=tuple(reversed(files)))
    assert one.to_bytes() == two.to_bytes()
    assert parse_manifest(one.to_bytes()).to_bytes() == one.to_bytes()


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../b", "a//b", "./a", "a\nb", "\ud800", "x" * 300])
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    raw = json.dumps({"v": 1, "files": [{"path": path, "size_bytes": 1, "chunks": [ONE]}]}).encode()
    with pytest.raises(SpecError):
        parse_manifest(raw)


@pytest.mark.parametrize(
    "entries",
    [
        {"files": [{"path": "a", "size_bytes": CHUNK_BYTES + 1, "chunks": [ONE]}]},
        {"files": [{"path": "a", "size_bytes": 1, "chunks": ["zz"]}]},
        {"files": [{"path": "a", "size_bytes": -1, "chunks": []}]},
        {"files": [{"path": "a", "size_bytes": 0}, {"path": "a", "size_bytes": 0}]},
        {"files": [{"path": "l/f", "size_bytes": 0}], "links": [{"path": "l", "target": "x"}]},
        {"links": [{"path": "l", "target": "/etc"}]},
        {"links": [{"path": "d/l", "target": "../../x"}]},
        {"v": 2},
        {"unknown": 1},
        {"files": [{"path": "a", "size_bytes": 2**62, "chunks": []}]},
    ],
    ids=str,
)
def test_entries_that_do_not_fit_are_refused(entries: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        parse_manifest(json.dumps(entries).encode())


def test_nested_rubbish_is_no_manifest() -> None:
    for raw in (b"", b"[" * 100_000, b"\xff", b"null"):
        with pytest.raises(SpecError):
            parse_manifest(raw)


def test_a_link_may_point_up_inside_the_folder() -> None:
    assert is_inside("a/b/link", "../c") and is_inside("link", "a/../b")
    assert not is_inside("link", "..") and not is_inside("a/link", "../../c") and not is_inside("link", "")


def test_only_a_snapshot_has_a_digest() -> None:
    assert find_digest(f"sha256:{ONE}") == ONE
    assert find_digest("/somewhere") is None and find_digest(None) is None
