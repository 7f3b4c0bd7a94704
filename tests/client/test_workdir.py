"""A folder becomes a snapshot: what is left out, what is refused, and that only missing chunks are sent."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainmaster.client.workdir import TooLarge, describe_left_out, scan, upload
from trainmaster.core.errors import UsageError
from trainmaster.core.workdir import CHUNK_BYTES, digest_of, parse_manifest


class Memory:
    """A receiver that keeps chunks in memory."""

    def __init__(self) -> None:
        self.chunks: dict[str, bytes] = {}
        self.sent: list[str] = []
        self.workdirs: list[str] = []

    def find_missing(self, digests: Sequence[str]) -> Sequence[str]:
        return [digest for digest in digests if digest not in self.chunks]

    def put_chunk(self, sha256: str, data: bytes) -> None:
        assert digest_of(data) == sha256
        self.chunks[sha256] = data
        self.sent.append(sha256)

    def put_workdir(self, sha256: str, chunks: Sequence[str]) -> Sequence[str]:
        manifest = parse_manifest(b"".join(self.chunks[chunk] for chunk in chunks))
        missing = self.find_missing(list(manifest.chunks()))
        if not missing:
            self.workdirs.append(sha256)
        return missing


def paths(folder: Path) -> list[str]:
    return [file.path for file in scan(folder).manifest.files]


def test_an_unchanged_folder_sends_nothing_again_and_a_changed_file_only_its_chunks(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "big").write_bytes(os.urandom(2 * CHUNK_BYTES + 5))
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "empty").touch()
    receiver = Memory()
    first = upload(scan(tmp_path), receiver)
    assert len(receiver.sent) == 5, "three chunks, one file, one manifest"
    receiver.sent.clear()
    assert upload(scan(tmp_path), receiver) == first and receiver.sent == []
    with (tmp_path / "data" / "big").open("r+b") as file:
        file.write(b"changed")
    assert upload(scan(tmp_path), receiver) != first
    assert len(receiver.sent) == 2, "one chunk and the manifest"


def test_progress_counts_the_bytes_to_send(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(os.urandom(CHUNK_BYTES + 7))
    seen: list[tuple[int, int]] = []
    upload(scan(tmp_path), Memory(), on_progress=lambda sent, total: seen.append((sent, total)))
    assert seen == [(CHUNK_BYTES, CHUNK_BYTES + 7), (CHUNK_BYTES + 7, CHUNK_BYTES + 7)]


def test_caches_credentials_and_what_the_ignore_file_names_stay_here(tmp_path: Path) -> None:
    for name in ("train.py", ".env", "id_rsa", "x.log", "keep.log", "global.json"):
        (tmp_path / name).write_text(name)
    for name in (".git", "__pycache__", ".venv", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "inside").write_text(name)
    (tmp_path / ".gitignore").write_text("data/\n")
    assert paths(tmp_path) == [".gitignore", "keep.log", "train.py", "x.log"]
    (tmp_path / ".trainmasterignore").write_text("*.log\n!keep.log\n!.env\n")
    assert paths(tmp_path) == [".env", ".gitignore", ".trainmasterignore", "data/inside", "keep.log", "train.py"]


def test_a_link_stays_a_link_and_one_that_leads_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "f").write_text("f")
    (tmp_path / "sub" / "link").symlink_to("../sub/f")
    (link,) = scan(tmp_path).manifest.links
    assert (link.path, link.target) == ("sub/link", "../sub/f")
    for target in ("/etc/passwd", "../../outside"):
        (tmp_path / "sub" / "out").symlink_to(target)
        with pytest.raises(UsageError, match="outside of the folder"):
            scan(tmp_path)
        (tmp_path / "sub" / "out").unlink()


def test_pipes_sockets_and_odd_names_are_left_out_and_listed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "f").write_text("f")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        (tmp_path / os.fsdecode(b"a\xff")).write_text("x")
        snapshot = scan(tmp_path)
    assert [file.path for file in snapshot.manifest.files] == ["f"]
    text = describe_left_out(snapshot)
    assert "pipe" in text and "socket" in text and "not UTF-8" in text


def test_a_folder_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(TooLarge, match=r"\.trainmasterignore"):
        scan(tmp_path)
    (tmp_path / "huge").unlink()
    for number in range(4):
        (tmp_path / str(number)).touch()
    with pytest.raises(TooLarge):
        scan(tmp_path, most_files=3)


def test_a_file_that_changes_between_reading_and_sending_is_named(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("before")
    snapshot = scan(tmp_path)
    (tmp_path / "f").write_text("behind")
    receiver = Memory()
    with pytest.raises(UsageError, match="f changed while it was read"):
        upload(snapshot, receiver)
    assert receiver.workdirs == []


def test_an_unreadable_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        scan(tmp_path / "nowhere")


def test_the_home_folder_inside_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "trainmaster.db").write_text("x")
    (tmp_path / "job.yaml").write_text("x")
    assert [file.path for file in scan(tmp_path, apart=[tmp_path / "home"]).manifest.files] == ["job.yaml"]


def test_the_file_of_the_token_is_left_out(tmp_path: Path) -> None:
    for name in ("token", "job.yaml", "inner/token"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    paths = [file.path for file in scan(tmp_path, apart=[tmp_path / "inner" / ".." / "token"]).manifest.files]
    assert paths == ["inner/token", "job.yaml"]


def test_another_home_is_left_out_with_its_token(tmp_path: Path) -> None:
    for name in ("job.yaml", "old/home-id", "old/local.token", "plain/local.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = scan(tmp_path)
    assert [file.path for file in found.manifest.files] == ["job.yaml", "plain/local.txt"]
    assert found.left_out == ("old: a home folder of Trainmaster, with its keys",)


TOKEN = "tm_" + "aB3_-" * 8 + "xyz"
KEY = "-----BEGIN {}PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"


def test_keys_and_tokens_are_left_out_and_named_in_one_line(tmp_path: Path) -> None:
    files = {
        "me.txt": f"{TOKEN}\n", "notes/env": f"TRAINMASTER_TOKEN='{TOKEN}'\n", "ssh/id": KEY.format("OPENSSH "),
        "hk1": "Bag Attributes\n" + KEY.format(""), "id_rsa": "x", "data.key": "x", ".env": "A=1", "mine.pem": "x",
        "secrets/a": KEY.format("RSA "), ".gitignore": "mine.pem\nsecrets/\n",
    }  # fmt: skip
    plain = {
        "commit.txt": "0123456789abcdef0123456789abcdef01234567\n", "sha256": "ab" * 32, "short": "tm_abc",
        "long": TOKEN + "x", "id.pub": "ssh-ed25519 AAAA me", "cert": "-----BEGIN CERTIFICATE-----\n",
        "train.py": "if '-----BEGIN PRIVATE KEY-----' in text: pass\n", "log": TOKEN + " " * (64 << 10),
    }  # fmt: skip
    for name, text in (files | plain).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = scan(tmp_path)
    assert {file.path for file in found.manifest.files} == {*plain, ".gitignore"}
    assert set(found.secrets) == {
        "me.txt (a Trainmaster token)", "notes/env (a Trainmaster token)", "ssh/id (a private key)",
        "hk1 (a private key)", "id_rsa (the name of a key)", "data.key (the name of a key)", ".env (the name of a key)",
    }  # fmt: skip
    text = describe_left_out(found)
    assert "\n" not in text and "and 2 more" in text and text.endswith("as !.env into .gitignore")
    (tmp_path / ".trainmasterignore").write_text("!me.txt\n!.env\n!id_rsa\n")
    names = {file.path for file in scan(tmp_path).manifest.files}
    assert {"me.txt", ".env", "id_rsa"} <= names and not names & {"notes/env", "ssh/id", "hk1", "mine.pem"}
