"""What a machine answers is not trusted: framing, size, names and texts are checked before anything is written."""

from __future__ import annotations

import gzip
import json
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from trainmaster.cluster.health.gather import Answer, CheckRequest, accept, read_answer, write_files
from trainmaster.core.errors import NodeUnavailable
from trainmaster.core.health import NodeHealth, Silent
from trainmaster.remote.bootstrap import tree_digest
from trainmaster.remote.package import pack
from trainmaster.targets._answers import clean, parse_results


def unwrap(*, health: object = "", files: object = None, **answer: object) -> Answer:
    run = {"code": 0, "state": None, "out": health, "err": "", "files": files}
    (result,) = parse_results(json.dumps(answer or {"runs": [run]}).encode(), 1)
    return read_answer(result)


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../x", "files/../../x", "files//x", "files/./x", "", "x", "files/a\x00b", "files/a\x1b[2J",
     "answers.json/x", "health.json", "files/" + "a" * 300, "commands/..", "files/" + "a/" * 80 + "b"],
)  # fmt: skip
def test_a_file_name_that_could_leave_its_folder_is_refused(name: str) -> None:
    with pytest.raises(NodeUnavailable, match="malformed answer"):
        unwrap(health="{}", files={name: "x"})


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{", b"3", b"[" * 100_000,
        b'{"runs": 3}', b'{"runs": []}', b'{"runs": [3]}', b'{"runs": [{}]}', b'{"runs": [{}, {}]}',
        b'{"runs": [{"code": 0, "state": null, "out": 3, "err": "", "files": {}}]}',
        b'{"runs": [{"code": 0, "state": null, "out": "x", "err": 3, "files": {}}]}',
        b'{"runs": [{"code": "0", "state": null, "out": "x", "err": "", "files": {}}]}',
        b'{"runs": [{"code": 0, "state": null, "out": "x", "err": "", "files": [3]}]}',
        b'{"runs": [{"code": 0, "state": null, "out": "x", "err": "", "files": {"files/a": 3}}]}',
    ],
)  # fmt: skip
def test_damaged_answers_are_refused(data: bytes) -> None:
    with pytest.raises(NodeUnavailable, match="malformed answer"):
        parse_results(data, 1)


def test_a_file_where_a_folder_must_be_is_refused_and_stays_inside(tmp_path: Path) -> None:
    answer = unwrap(health="{}", files={"files/a": "x", "files/a/b": "y", "answers.json": "{}"})
    with pytest.raises(OSError, match=r"."):
        write_files(tmp_path / "node", answer.files)
    assert answer.health == "{}"
    assert {path.name for path in tmp_path.iterdir()} == {"node"}


def test_words_of_a_machine_move_no_cursor() -> None:
    with pytest.raises(NodeUnavailable) as caught:
        unwrap(wrong="bad\x1b[2Jthing\x07")
    assert "\x1b" not in str(caught.value)
    assert "\x07" not in str(caught.value)
    assert clean("a\u202eb\x9bc") == "a\ufffdb\ufffdc"


PLANNED = ["cpu"]
GOOD = {
    "node": "liar", "level": 1, "planned": PLANNED, "version": "1",
    "results": [{"check": "cpu", "took_s": 0.1, "findings": [{"verdict": "pass", "reason": "fine\x1b[2J"}]}],
}  # fmt: skip


def believe(tmp_path: Path, **changed: object) -> NodeHealth | Silent:
    answer = Answer(health=json.dumps({**GOOD, **changed}), files={})
    order = CheckRequest(level=1, expect={"cpus": 4}, planned=PLANNED, version="1", timeout_s=1)
    return accept("n1", answer, order, tmp_path)


def test_a_node_is_called_as_it_was_asked_and_its_words_are_clean(tmp_path: Path) -> None:
    health = believe(tmp_path, expect={"cpus": 4, "gpus": 8})
    assert isinstance(health, NodeHealth)
    assert (health.node, health.results[0].findings[0].reason) == ("n1", "fine\ufffd[2J")


@pytest.mark.parametrize(
    "changed",
    [
        {"planned": []}, {"planned": ["ram"]}, {"level": 2}, {"version": "2"}, {"expect": {}}, {"expect": {"cpus": 3}},
        {"results": [{"check": "cpu", "took_s": 0, "findings": [{"verdict": "splendid", "reason": "x"}]}]},
        {"results": 3}, {"results": [3]}, {"results": GOOD["results"] * 2}, {"extra": 1},
        {"results": [{"check": "cpu", "took_s": float("nan"), "findings": []}]},
    ],
)  # fmt: skip
def test_a_node_does_not_decide_what_was_asked_of_it(tmp_path: Path, changed: dict[str, object]) -> None:
    assert isinstance(believe(tmp_path, **{"expect": {"cpus": 4}, **changed}), Silent)


def test_the_package_is_the_node_half_and_nothing_else() -> None:
    package = pack()
    with zipfile.ZipFile(BytesIO(gzip.decompress(package.data))) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert tree_digest(files) == package.digest
    assert {"trainmaster/__init__.py", "trainmaster/checks/__main__.py", "trainmaster/core/health.py"} <= set(files)
    assert {"trainmaster/agent/__main__.py", "trainmaster/remote/node_server.py"} <= set(files)
    assert not [
        name for name in files if "__pycache__" in name or name.split("/")[1] in ("cli", "web", "control", "store")
    ]
    assert pack() == package
