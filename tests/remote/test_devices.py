"""GPUs of a machine for the queue, from what nvidia-smi prints."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from trainmaster.remote import devices, node_server

_MIG = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaaaaaa-0000)
  MIG 3g.40gb     Device  0: (UUID: MIG-11111111-0000)
  MIG 3g.40gb     Device  1: (UUID: MIG-22222222-0000)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbbbbbb-0000)
"""
_IDLE = "GPU-aaaaaaaa-0000, [N/A]\nGPU-bbbbbbbb-0000, 4\n"
_SLICED = "GPU-aaaaaaaa-0000, 30\n"
_OURS = {41: "job.1", 42: "job.1"}


def _users(apps: str, memory: str) -> dict[str, list[str]]:
    gpus = devices.add_users(devices.parse_list(_MIG), apps, memory, lambda pid: _OURS.get(pid, ""))
    return {gpu.uuid: [attempt or text for attempt, text in gpu.users] for gpu in gpus if gpu.users}


def test_a_gpu_with_slices_is_given_out_by_slices() -> None:
    gpus = devices.parse_list(_MIG)
    assert [(gpu.uuid, gpu.model, gpu.parent) for gpu in gpus] == [
        ("MIG-11111111-0000", "3g.40gb", "GPU-aaaaaaaa-0000"),
        ("MIG-22222222-0000", "3g.40gb", "GPU-aaaaaaaa-0000"),
        ("GPU-bbbbbbbb-0000", "NVIDIA H100 80GB HBM3", "GPU-bbbbbbbb-0000"),
    ]


@pytest.mark.parametrize(
    ("apps", "memory", "users"),
    [
        ("", "GPU-aaaaaaaa-0000, 30\nGPU-bbbbbbbb-0000, 4\n", {}),
        ("GPU-bbbbbbbb-0000, 41, 900\n", _IDLE, {"GPU-bbbbbbbb-0000": ["job.1"]}),
        ("GPU-bbbbbbbb-0000, 99, 900\n", _IDLE, {"GPU-bbbbbbbb-0000": ["process 99 holds 900 MiB"]}),
        ("MIG-22222222-0000, 42, 7\n", _IDLE, {"MIG-22222222-0000": ["job.1"]}),
        # A driver that names only the whole GPU: every slice of it may be the one.
        ("GPU-aaaaaaaa-0000, 99, 7\n", _IDLE, {
            "MIG-11111111-0000": ["process 99 holds 7 MiB"], "MIG-22222222-0000": ["process 99 holds 7 MiB"],
        }),
        # A process of another container cannot be seen, its memory can.
        ("", _SLICED + "GPU-bbbbbbbb-0000, 700\n", {
            "GPU-bbbbbbbb-0000": ["700 MiB are in use by no process that can be seen"],
        }),
        # A product without memory of its own has no such value; a value that cannot be read is not a free GPU.
        ("WARNING: infoROM is corrupted at gpu 0000:18:00.0\n", _SLICED + "GPU-bbbbbbbb-0000, [N/A]\n", {}),
        ("", _SLICED + "GPU-bbbbbbbb-0000, ERR!\n", {"GPU-bbbbbbbb-0000": ["its memory cannot be read: ERR!"]}),
        ("GPU-bbbbbbbb-0000, 41, 9\n", _SLICED + "GPU-bbbbbbbb-0000, [Unknown Error]\n", {
            "GPU-bbbbbbbb-0000": ["job.1", "its memory cannot be read: [Unknown Error]"],
        }),
        ("", "GPU-aaaaaaaa-0000, 30\n", {"GPU-bbbbbbbb-0000": ["its memory cannot be read: no answer"]}),
        # Slices of a GPU that cannot be read are not free; that of a healthy one is told to root alone.
        ("MIG-22222222-0000, 42, 7\n", "GPU-aaaaaaaa-0000, [GPU is lost]\nGPU-bbbbbbbb-0000, 4\n", {
            "MIG-11111111-0000": ["its memory cannot be read: [GPU is lost]"],
            "MIG-22222222-0000": ["job.1", "its memory cannot be read: [GPU is lost]"],
        }),
        ("", "GPU-aaaaaaaa-0000, [Insufficient Permissions]\nGPU-bbbbbbbb-0000, 4\n", {}),
    ],
)  # fmt: skip
def test_processes_are_found_on_their_gpu(apps: str, memory: str, users: dict[str, list[str]]) -> None:
    assert _users(apps, memory) == users


@pytest.mark.parametrize("apps", ["[Not Supported]", "GPU-bbbbbbbb-0000, 41", "[N/A], 99, 900", "Unknown Error"])
def test_processes_that_cannot_be_understood_leave_no_gpu_free(apps: str) -> None:
    with pytest.raises(devices.DevicesUnknown, match="cannot be understood"):
        _users(apps, _IDLE)


@pytest.mark.spawns
def test_an_nvidia_smi_that_fails_is_not_a_machine_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert devices.read_gpus() == []
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver'\nexit 9\n"
    )
    program.chmod(0o755)
    bus = tmp_path / "pci"
    monkeypatch.setattr(devices, "_PCI", bus)
    monkeypatch.setattr(devices, "_DEV", tmp_path)
    for files, proof in (
        ([], False),  # no bus that can be read proves nothing
        (["pci/0/vendor 0x8086"], True),  # an image with the driver on a machine without a GPU
        (["pci/0/vendor 0x8086", "dxg x"], False),
        (["pci/0/vendor 0x8086", "pci/1/vendor 0x10de"], False),
    ):
        for path, text in (line.split() for line in files):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(f"{text}\n")
        if proof:
            assert devices.read_gpus() == []
        else:
            with pytest.raises(devices.DevicesUnknown, match="ended with 9: NVIDIA-SMI has failed"):
                devices.read_gpus()
        assert devices.has_none() is proof
        (tmp_path / "dxg").unlink(missing_ok=True)


def test_a_driver_that_hangs_holds_one_thread_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(devices, "_ANSWER_S", 0.01)
    monkeypatch.setattr(devices, "read_gpus", lambda: goes_on.wait() and [])

    async def ask_often() -> int:
        for _ in range(5):
            with pytest.raises(devices.DevicesUnknown, match="does not answer"):
                await devices.ask_gpus()
        return sum(thread.name.startswith(("asyncio", devices._THREAD)) for thread in threading.enumerate())

    before = {thread for thread in threading.enumerate() if thread.name == devices._THREAD}
    try:
        assert asyncio.run(ask_often()) == len(before) + 1
    finally:
        goes_on.set()
        for thread in {thread for thread in threading.enumerate() if thread.name == devices._THREAD} - before:
            thread.join()
    monkeypatch.setattr(devices, "_ANSWER_S", 60.0)
    assert asyncio.run(devices.ask_gpus()) == []


@pytest.mark.spawns
def test_an_nvidia_smi_that_cannot_be_killed_is_left_and_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(devices, "_PCI", tmp_path / "no bus")  # nothing proves that there is no GPU
    monkeypatch.setattr(devices, "_TIMEOUT_S", 0.01)
    monkeypatch.setattr(devices, "_KILL_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda _: None)  # as one that waits in the kernel
        with pytest.raises(devices.DevicesUnknown, match="did not answer within"):
            devices.read_gpus()
    [stuck] = devices._stuck
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", None)  # nothing is started
        with pytest.raises(devices.DevicesUnknown, match=f"process {stuck.pid}. was killed and does not end"):
            devices.read_gpus()
    os.kill(stuck.pid, signal.SIGKILL)
    stuck.wait()
    begun: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen
    with monkeypatch.context() as patch:
        patch.setattr(devices, "_KILL_S", 60.0)
        patch.setattr(subprocess, "Popen", lambda *words, **how: begun.append(popen(*words, **how)) or begun[-1])
        node = node_server.Node(tmp_path / "home", "n1")
        assert asyncio.run(node.identify()) == ({"gpus": []}, b"")
    assert [process.poll() for process in begun] == [-signal.SIGKILL]
    program.write_text("#!/bin/sh\n")
    monkeypatch.setattr(devices, "_TIMEOUT_S", 60.0)
    assert devices.read_gpus() == []
