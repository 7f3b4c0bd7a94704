"""What the machine shows: files, folders, disks, CPUs, the clock. Absent and unreadable are two things."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainmaster.core.errors import FileMissing, FileUnreadable, HostError
from trainmaster.node import host as host_module
from trainmaster.node.host import Host, Snapshot


def test_a_file_that_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match="nothing"):
        Host().read(str(tmp_path / "nothing"))
    with pytest.raises(FileMissing):
        Host().list(str(tmp_path / "nothing"))
    with pytest.raises(FileMissing):
        Host().disk(str(tmp_path / "nothing"))


def test_a_file_that_cannot_be_read_is_not_called_missing(tmp_path: Path) -> None:
    with pytest.raises(FileUnreadable) as caught:
        Host().read(str(tmp_path))  # a folder
    assert not isinstance(caught.value, FileMissing)


def test_a_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "MAX_FILE_BYTES", 1 << 20)
    (tmp_path / "big").write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(FileUnreadable, match="larger than 1 MiB"):
        Host().read(str(tmp_path / "big"))


def test_the_machine_is_read() -> None:
    host = Host()
    assert host.hostname() == os.uname().nodename
    assert host.cpus() == len(os.sched_getaffinity(0))
    assert host.disk("/").total_bytes > host.disk("/").free_bytes > 0
    assert host.kernel_clock().max_error_s >= 0


def test_cpus_that_are_not_online_do_not_count() -> None:
    class Machine(Host):
        def read(self, path: str) -> str:
            return {"/proc/self/status": "Cpus_allowed_list:\t0-127\n", "/sys/devices/system/cpu/online": "0-2,5\n"}[
                path
            ]

    assert Machine().cpus() == 4


@pytest.mark.parametrize("text", ["", "x\n", "0-\n", "1,,2\n"])
def test_a_damaged_cpu_list_is_never_a_number_of_cpus(text: str) -> None:
    class Machine(Host):
        def read(self, path: str) -> str:
            return "Cpus_allowed_list:\t0-3\n" if "status" in path else text

    with pytest.raises(HostError):
        Machine().cpus()


def test_a_snapshot_asks_once_and_repeats_errors_too() -> None:
    asked: list[str] = []

    class Machine(Host):
        def read(self, path: str) -> str:
            asked.append(path)
            if path == "/bad":
                raise FileMissing("/bad is not there")
            return str(len(asked))

    host = Snapshot(Machine())
    assert (host.read("/good"), host.read("/good")) == ("1", "1")
    for _ in range(2):
        with pytest.raises(FileMissing):
            host.read("/bad")
    assert asked == ["/good", "/bad"]


@pytest.mark.spawns
def test_variables_of_the_work_to_come_are_seen_and_passed_on() -> None:
    host = Host(env={"TRAINMASTER_CHECKPOINTS": "/data"})
    assert host.env("TRAINMASTER_CHECKPOINTS") == "/data"
    assert host.env("PATH") == os.environ["PATH"]
    assert host.run("sh", "-c", "echo $TRAINMASTER_CHECKPOINTS").stdout == "/data\n"
