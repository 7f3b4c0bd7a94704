"""Transfers in units over real OpenSSH servers: trees as they are, resume after a cut, refusals with their types."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sshd import Lab, lab, needs_sshd
from targets.ssh.conftest import host_of
from trainmaster.core.errors import DiskFull, PathMissing, TargetError
from trainmaster.remote.transfer import UNIT_BYTES, Changed, DamagedUnit, Entry, Incoming, Manifest, read_unit, scan
from trainmaster.remote.transfer import sha256 as digest_of
from trainmaster.targets.ssh.session import session
from trainmaster.targets.ssh.transfer import download, upload

pytestmark = [pytest.mark.spawns, needs_sshd]


def make_tree(folder: Path) -> Path:
    for number in range(300):
        place = folder / f"part-{number % 7}" / f"{number}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(os.urandom(number))  # one of them is empty
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("run.sh")
    (folder / os.fsdecode(b"odd-\xff\n name")).write_bytes(b"odd")
    (folder / "large").write_bytes(os.urandom(2 * UNIT_BYTES + 17))
    return folder


def contents(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        else:
            found[name] = (path.stat().st_mode & 0o777, path.read_bytes() if path.is_file() else None)
    return found


def test_a_tree_arrives_as_it_is_and_comes_back(box: Any, run: Any, tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")

    async def go() -> None:
        await upload(box(), source, f"{tmp_path}/there")
        await download(box(), f"{tmp_path}/there", tmp_path / "back")
        (tmp_path / "there" / "more").write_text("stays")
        (source / "run.sh").write_text("#!/bin/sh\ntrue\n")
        await upload(box(), source, f"{tmp_path}/there")  # into a folder that exists: replaced, nothing removed

    first = contents(source)
    run(go())
    assert contents(tmp_path / "back") == first
    assert contents(tmp_path / "there") == contents(source) | {"more": (0o644, b"stays")}


@pytest.mark.proof
def test_a_transfer_that_is_cut_resumes_and_agrees(run: Any, tmp_path: Path) -> None:
    size = 200 << 20
    with (tmp_path / "big").open("wb") as out:
        for _ in range(size >> 20):
            out.write(os.urandom(1 << 20))
    (tmp_path / "lab").mkdir()
    with lab(tmp_path / "lab") as own:
        host = own.start("solo")
        own.wait()
        cuts: list[int] = []

        def cut_once(done: int, total: int) -> None:
            if done > total // 2 and not cuts:
                cuts.append(done)
                host.cut(also_server=False)

        async def go() -> None:
            node = session(host_of(own, host), own.known_hosts.read_bytes())
            await upload(node, tmp_path / "big", f"{tmp_path}/there", progress=cut_once)
            assert cuts and (tmp_path / "there").stat().st_size == size
            cuts.clear()
            await download(node, f"{tmp_path}/there", tmp_path / "back", progress=cut_once)
            assert cuts

        run(go())
    for name in ("there", "back"):
        subprocess.run(["cmp", str(tmp_path / "big"), str(tmp_path / name)], check=True)
    assert not list(tmp_path.glob(".trainmaster-*"))


def test_a_later_call_goes_on_with_what_has_arrived(box: Any, run: Any, tmp_path: Path) -> None:
    """As after a crash of this side: two of three units are there, one of them was damaged on the disk."""
    (tmp_path / "big").write_bytes(os.urandom(3 * UNIT_BYTES))
    manifest = scan(tmp_path / "big", name="there")
    incoming = Incoming(tmp_path, manifest.draft("n1"))
    assert incoming.begin(manifest) == set()
    units = scan(tmp_path / "big").units
    for number in (0, 1):
        data = read_unit(tmp_path, units[number])
        incoming.write(number, digest_of(data), data)
    draft = next(tmp_path.glob(".trainmaster-*"))
    with (draft / "files" / "there").open("r+b") as file:
        file.seek(UNIT_BYTES + 5)
        file.write(b"power lost")

    async def go() -> None:
        receipt = await upload(box(), tmp_path / "big", f"{tmp_path}/there")
        assert receipt.resumed_bytes == UNIT_BYTES

    run(go())
    assert (tmp_path / "there").read_bytes() == (tmp_path / "big").read_bytes()
    assert not draft.exists()


@pytest.mark.proof
def test_polls_are_answered_during_a_transfer(box: Any, run: Any, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(130 << 20))

    async def go() -> None:
        node, answered = box(), 0
        moving = asyncio.ensure_future(upload(node, tmp_path / "big", f"{tmp_path}/there"))
        while not moving.done():
            await node.request("exists", path="/")
            answered += 1
            await asyncio.sleep(0.01)
        await moving
        assert answered > 3

    run(go())


def test_refusals_have_their_types_and_leave_nothing(box: Any, run: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")

    async def go() -> None:
        node = box()
        with pytest.raises(PathMissing):
            await upload(node, tmp_path / "none", "~/x")
        with pytest.raises(PathMissing):
            await download(node, f"{tmp_path}/none", tmp_path / "x")
        with pytest.raises(TargetError, match="no absolute path"):
            await upload(node, tmp_path / "a", "relative/a")

    run(go())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system: needs root")
def test_a_full_disk_is_typed_and_leaves_nothing(box: Any, run: Any, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(3 << 20))
    (tmp_path / "bigger").write_bytes(os.urandom(5 << 20))
    (tmp_path / "small").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path / "small")]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("no file system can be mounted here")

    def fill(done: int, total: int) -> None:
        if done == 0:
            (tmp_path / "small" / "filler").write_bytes(bytes(min(total, 2 << 20)))

    async def go() -> None:
        with pytest.raises(DiskFull, match="bytes free"):
            await upload(box(), tmp_path / "bigger", f"{tmp_path}/small/big")
        with pytest.raises(DiskFull, match="No space left"):  # filled while it is written
            await upload(box(), tmp_path / "big", f"{tmp_path}/small/big", progress=fill)

    try:
        run(go())
        assert [path.name for path in (tmp_path / "small").iterdir()] == ["filler"]
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)


def test_a_file_that_changes_while_it_is_copied_is_refused(box: Any, run: Any, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(os.urandom(3 * UNIT_BYTES))

    def shorten(done: int, total: int) -> None:
        if done:
            os.truncate(tmp_path / "log", 10)

    async def go() -> None:
        with pytest.raises((Changed, TargetError), match="while it was copied"):
            await download(box(), f"{tmp_path}/log", tmp_path / "copy", progress=shorten)

    run(go())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]


def test_bytes_that_are_not_those_sent_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"right")
    manifest = scan(tmp_path / "a")
    incoming = Incoming(tmp_path / "into", manifest.digest)
    incoming.begin(manifest)
    with pytest.raises(DamagedUnit):
        incoming.write(0, digest_of(b"right"), b"wrong")
    with pytest.raises(TargetError, match=r"1 of 1 units .* did not arrive"):
        incoming.finish()
    assert not (tmp_path / "into").exists()


@pytest.mark.parametrize("path", ["../out", "/etc/x", "a/../../b", "", ".", "a\0b"])
def test_a_manifest_that_leads_out_is_refused(path: str) -> None:
    packed = Manifest(entries=(Entry(kind="file", path=path),)).pack()
    with pytest.raises(TargetError, match="leads out of the destination"):
        Manifest.unpack(packed)


def test_a_link_in_the_destination_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "source" / "inner").mkdir(parents=True)
    (tmp_path / "source" / "inner" / "a").write_text("a")
    for name in ("into", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "into" / "inner").symlink_to(tmp_path / "outside")
    manifest = scan(tmp_path / "source")
    incoming = Incoming(tmp_path / "into", manifest.digest)
    incoming.begin(manifest)
    data = read_unit(tmp_path / "source", manifest.units[0])
    incoming.write(0, digest_of(data), data)
    with pytest.raises(TargetError, match="through a link"):
        incoming.finish()
    assert list((tmp_path / "outside").iterdir()) == []


def test_drafts_that_were_given_up_are_removed(tmp_path: Path) -> None:
    old = tmp_path / ".trainmaster-old"
    old.mkdir()
    (old / "manifest").write_text("")
    os.utime(old / "manifest", (0, 0))
    (tmp_path / "a").write_text("a")
    manifest = scan(tmp_path / "a", name="b")
    Incoming(tmp_path, manifest.digest).begin(manifest)
    assert not old.exists()
    shutil.rmtree(tmp_path)


@pytest.mark.proof
def test_every_machine_of_the_lab_is_reached_at_once(machines: Lab, run: Any, tmp_path: Path) -> None:
    source = make_tree(tmp_path / "source")

    async def go() -> None:
        nodes = [session(host_of(machines, one), machines.known_hosts.read_bytes()) for one in machines.hosts]
        await asyncio.gather(*(upload(node, source, f"{tmp_path}/{node.host.name}") for node in nodes))

    run(go())
    assert all(contents(tmp_path / one.name) == contents(source) for one in machines.hosts)
