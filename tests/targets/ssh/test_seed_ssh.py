"""Seed 004, phase 2.2: the SSH connection, on a real OpenSSH server. One test per checkbox, named after it."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sshd import Lab, free_port, lab, needs_sshd
from targets.ssh.conftest import host_of
from trainmaster import targets
from trainmaster.core.errors import Unreachable
from trainmaster.targets.ssh.connect import LoginRefused, NoAnswer, connect
from trainmaster.targets.ssh.session import session

pytestmark = [pytest.mark.spawns, needs_sshd]


def test_can_establish_ssh_connection_to_gpu_instance(box: Any, run: Any, machines: Lab) -> None:
    async def go() -> int:
        await box().request("exists", path="/")
        return len(machines.hosts[0].connections())

    assert run(go()) >= 1


def test_retry_logic_works_on_connection_failures(run: Any, tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    with lab(tmp_path / "lab") as own:
        host = own.start("late")
        own.wait()

        async def go() -> list[str]:
            host.cut(also_server=True)
            node, failures = session(host_of(own, host), own.known_hosts.read_bytes()), []
            with pytest.raises(Unreachable, match="nothing listens") as refused:
                await node.request("exists", path="/")
            failures.append(str(refused.value))
            with pytest.raises(Unreachable):  # left alone for a moment, and answered from memory
                await node.request("exists", path="/")
            again = own.start("again")
            own.wait(again)
            other = session(replace(host_of(own, again), name="late"), own.known_hosts.read_bytes())
            async with asyncio.timeout(60):
                while True:
                    try:
                        await other.request("exists", path="/")
                        return failures
                    except Unreachable as error:
                        failures.append(str(error))
                        await asyncio.sleep(0.1)

        assert run(go())[0].startswith("late: nothing listens")


def test_can_execute_simple_commands(box: Any, run: Any) -> None:
    async def go() -> None:
        said = await box().request("run", words=["echo", "hello world; $(id)"], timeout_s=30)
        assert (said.result["code"], said.body) == (0, b"hello world; $(id)\n")  # no shell in between
        assert (await box().request("run", words=["pwd"], timeout_s=30)).body.startswith(b"/")
        failed = await box().request("run", words=["sh", "-c", "echo no >&2; exit 3"], timeout_s=30)
        assert (failed.result["code"], failed.result["error"]) == (3, "no\n")

    run(go())


def test_can_check_gpu_availability(run: Any, tmp_path: Path) -> None:
    """As on a machine with two GPUs: `nvidia-smi` is a program of the machine."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA A10'\necho 'NVIDIA A10'\n")
    program.chmod(0o755)
    (tmp_path / "lab").mkdir()
    with lab(tmp_path / "lab") as own:
        host = own.start("gpu", environment={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"})
        own.wait()

        async def go() -> bytes:
            node = session(host_of(own, host), own.known_hosts.read_bytes())
            words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
            return bytes((await node.request("run", words=words, timeout_s=30)).body)

        assert run(go()).splitlines() == [b"NVIDIA A10"] * 2


def test_can_create_directories(box: Any, run: Any, tmp_path: Path) -> None:
    async def go() -> None:
        for _ in range(2):  # again is no error
            await box().request("make_folder", path=f"{tmp_path}/a/b/c")

    run(go())
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_can_check_file_existence(box: Any, run: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("four")

    async def go() -> list[Any]:
        return [
            (await box().request("exists", path=str(path))).result
            for path in (tmp_path / "a", tmp_path, tmp_path / "b")
        ]

    file, folder, nothing = run(go())
    assert file == {"kind": "file", "size_bytes": 4}
    assert folder["kind"] == "folder" and nothing == {"kind": None, "size_bytes": 0}


def test_connection_timeout_handling_works(run: Any, machines: Lab) -> None:
    with socket.socket() as silent:  # accepts and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        host = replace(host_of(machines, machines.hosts[0]), port=silent.getsockname()[1])

        async def go() -> None:
            with pytest.raises(NoAnswer, match=r"no SSH server answered at 127\.0\.0\.1 port \d+ in 0\.5 s"):
                async with connect(host, machines.known_hosts.read_bytes(), timeout_s=0.5):
                    pass

        run(go())


def test_can_disconnect_cleanly(box: Any, run: Any, machines: Lab) -> None:
    async def go() -> None:
        before = len(machines.hosts[0].connections())
        await box().request("exists", path="/")
        assert len(machines.hosts[0].connections()) == before + 1
        await targets.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}  # nothing of it is left here
        async with asyncio.timeout(30):
            while len(machines.hosts[0].connections()) > before:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    run(go())


def test_handles_wrong_credentials_gracefully(run: Any, machines: Lab, tmp_path: Path) -> None:
    async def go() -> None:
        host = replace(host_of(machines, machines.hosts[0]), user="nobody-here")
        with pytest.raises(LoginRefused, match=r"refuses user nobody-here with the key of .*authorized_keys"):
            await session(host, machines.known_hosts.read_bytes()).request("exists", path="/")
        unreadable = replace(host_of(machines, machines.hosts[0]), key=str(tmp_path / "none"))
        with pytest.raises(Unreachable, match="cannot be used"):
            await session(unreadable, machines.known_hosts.read_bytes()).request("exists", path="/")
        gone = replace(host_of(machines, machines.hosts[0]), port=free_port())
        with pytest.raises(Unreachable, match="nothing listens"):
            await session(gone, machines.known_hosts.read_bytes()).request("exists", path="/")

    run(go())
