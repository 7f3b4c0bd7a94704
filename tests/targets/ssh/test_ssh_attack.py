"""The ssh target under attack: requests given up halfway, long staging, hostile lists of files and hosts files."""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sshd import Lab, needs_sshd
from targets.ssh.conftest import host_of
from trainmaster import targets
from trainmaster.core.errors import TargetError, UsageError
from trainmaster.remote.transfer import Manifest
from trainmaster.targets.ssh.session import session
from trainmaster.targets.ssh.target import Ssh

pytestmark = [pytest.mark.spawns, needs_sshd]


def test_a_request_that_is_given_up_while_it_is_sent_spoils_no_other(box: Any, run: Any, tmp_path: Path) -> None:
    async def go() -> None:
        node = box()
        await node.request("exists", path="/")
        for pause_s in (0.0, 0.002, 0.01, 0.03):
            body = os.urandom(8 << 20)
            sent = asyncio.create_task(node.request("files_put", into="/x", draft="a", unit=0, sha256="", body=body))
            await asyncio.sleep(pause_s)
            sent.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sent
            async with asyncio.timeout(10):
                assert (await node.request("exists", path="/")).result["kind"] == "folder"

    run(go())


HOSTILE = {
    "empty": b"",
    "cut": b"hosts:\n  - {host: gpu-01, na",
    "doubled": b"hosts: [a]\nhosts: [b]\n",
    "latin-1": b"hosts: [gpu-\xe9]\n",
    "utf-16": "hosts: [gpu-01]\n".encode("utf-16"),
    "nul": b"hosts: [gpu-01\x00]\n",
    "escape": b'hosts: ["gpu\\u001b[31m-01"]\n',
    "right-to-left": "hosts: [gpu-\u202e01]\n".encode(),
    "surrogate": b'hosts: ["gpu-\\ud800"]\n',
    "markup": b'hosts: ["[/INST]:x:<script>"]\n',
    "long": b"hosts: [" + b"a" * 10_000 + b"]\n",
    "deep": b"hosts: " + b"[" * 900 + b"]" * 900 + b"\n",
    "deeper": b"hosts: " + b"{a: " * 5000 + b"1" + b"}" * 5000 + b"\n",
    "digits": b"hosts: [{host: a, port: " + b"1" * 4200 + b"}]\n",
    "more-digits": b"hosts: [{host: a, port: " + b"1" * 9000 + b"}]\n",
    "date": b"hosts: [{host: a, name: 2026-13-45}]\n",
    "time": b"hosts: [{host: a, name: 2026-01-01T25:61:61Z}]\n",
    "seconds": b"hosts: [{host: a, lost_after_s: 1.0e+400}]\n",
    "negative": b"hosts: [{host: a, slots: -1}]\n",
    "nan": b"hosts: [{host: a, price_per_hour: .nan}]\n",
    "n/a": b"hosts: [{host: a, slots: N/A}]\n",
    "python": b"hosts: !!python/object/apply:os.system [id]\n",
    "binary": b"hosts: [!!binary 'a']\n",
    "merge": b"hosts: [{<<: 3, host: a}]\n",
    "key": b"hosts: [{[a]: 1}]\n",
    "set": b"hosts: !!set {a, b}\n",
    "two": b"hosts: [a]\n---\nhosts: [b]\n",
    "loop": b"hosts: &a [*a]\n",
    "own-default": b"hosts: [a]\ndefaults: &d {rack: *d}\n",
    "laughs": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(9))
    + b"hosts: *j\n",
    "jump": b"hosts: [{host: a, jump: b:99999}]\n",
    "key-nul": b'hosts: [{host: a, key: "a\\0b"}]\n',
    "known": b'known_hosts: "a\\0b"\nhosts: [a]\n',
    "user": b'hosts: [{host: a, user: "-oProxyCommand=x"}]\n',
    "home": b"hosts: [{host: a, key: ~nobody-there/x}]\n",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_hosts_file_is_refused_with_a_short_sentence(kind: str, tmp_path: Path, run: Any) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_bytes(HOSTILE[kind])
    with pytest.raises(UsageError) as caught:
        run(Ssh(path).list_owned())
    text = str(caught.value)
    assert len(text) < 2000 and "\x1b" not in text and "\u202e" not in text, text[:300]
    text.encode()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "rows",
    [
        [["file", "a", 10**18, 0o644, 0, ""]],
        [["file", f"f{n}", 10**13, 0o644, 0, ""] for n in range(1000)],
        [["file", "a", 1e400, 0o644, 0, ""]],
        [["file", "a", 1, 0o644, 10**40, ""]],
        [["file", "a", 1, 0o644, 1, ""], ["file", "a", 1, 0o644, 1, ""]],
        [["link", "a", 0, 0, 0, "/etc"], ["file", "a/passwd", 1, 0o644, 1, ""]],
        [["file", "a\ud800b", 1, 0o644, 1, ""]],
    ],
)
def test_a_hostile_list_of_files_is_refused(rows: Any) -> None:
    with pytest.raises(TargetError):
        Manifest.unpack(zlib.compress(json.dumps(rows).encode()))


def test_a_list_of_files_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainmaster.remote.transfer._MAX_RAW_BYTES", 1 << 20)
    with pytest.raises(TargetError, match="too long"):
        Manifest.unpack(zlib.compress(b"[" + b" " * (2 << 20) + b"]"))


@pytest.mark.proof
def test_a_slot_is_kept_while_staging_takes_long(hosts_file: Path, place: Any, run: Any, machines: Lab) -> None:
    target = targets.load(f"ssh:{hosts_file}")
    assert isinstance(target, Ssh)
    submission = target.plan(replace(place("true"), attempt=f"{uuid.uuid4()}.1"))

    async def go() -> None:
        handle = await target.place(submission)
        (name,), attempt = handle["nodes"], handle["attempt"]
        (home,) = [one.home for one in machines.hosts if one.name == name]
        claim = home / ".trainmaster" / "claims" / name / f"{attempt}.json"
        os.utime(claim, (time.time() - 800,) * 2)
        (node,) = [one for one in target._sessions() if one.host.name == name]
        await node.request("claim", attempt=attempt, slots=4)  # as every try of `submit` does
        assert time.time() - claim.stat().st_mtime < 400, "or another job gets the slot 100 s later"
        await target.release(handle)

    run(go())


@pytest.mark.proof
def test_connections_that_nobody_uses_are_closed(
    machines: Lab, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmaster.targets.ssh.session._IDLE_S", 0.5)
    one = machines.hosts[0]

    async def go() -> None:
        for number in range(4):  # a line more in known_hosts is another key of the session
            known = machines.known_hosts.read_bytes() + b"# line %d\n" % number
            node = session(host_of(machines, one), known)
            assert (await node.request("run", words=["sleep", "1.2"], timeout_s=9)).result["code"] == 0, "in use"
        async with asyncio.timeout(10):
            while one.connections():  # noqa: ASYNC110 (of another process)
                await asyncio.sleep(0.05)
        assert (await node.request("exists", path="/")).result["kind"] == "folder"

    run(go())
