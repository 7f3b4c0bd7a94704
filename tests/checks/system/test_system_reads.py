"""What the system checks read: mounts as the kernel writes them, names as launchers give them, limits of both kinds."""

from __future__ import annotations

import shlex

import pytest
from nodes import HEALTHY, MOUNTS, bare_metal, container_v1, put

from machines import Machine
from trainmaster import checks
from trainmaster.checks import system_files
from trainmaster.checks.profiles import resolve
from trainmaster.checks.system import cpu_load
from trainmaster.checks.system.mounts import parse
from trainmaster.core.errors import HostError
from trainmaster.core.expect import Expect
from trainmaster.node.host import Host

RATES = [
    f'{{"mib": 256, "intact": true, "write_mib_s": {rate}, "read_mib_s": 900.0}}'
    for rate in ("NaN", "Infinity", "-5", "0", "true", '"fast"')
]


def test_the_mount_on_top_counts_and_blanks_are_read() -> None:
    text = MOUNTS + "50 22 0:60 / /home rw - autofs systemd-1 rw\n51 22 0:61 / /my\\040data rw - nfs4 srv:/d rw\n"
    found = {mount.path: mount.kind for mount in parse(text)}
    assert found["/home"] == "autofs"
    assert found["/my data"] == "nfs4"


@pytest.mark.parametrize("text", ["", "rubbish\n", MOUNTS + "half a li"])
def test_a_damaged_mountinfo_is_an_error(text: str) -> None:
    with pytest.raises(HostError, match="mountinfo"):
        parse(text)


def test_mounts_beyond_those_that_are_asked_are_no_pass(machine: Machine) -> None:
    lines = "".join(f"{60 + n} 22 0:{60 + n} / /nfs{n} rw - nfs4 srv:/{n} rw\n" for n in range(17))
    put(machine, files={"/proc/self/mountinfo": MOUNTS[: MOUNTS.index("40 22")] + lines})
    for number in range(16):
        machine.command(f"stat -f -c %T /nfs{number}", "nfs\n")
    verdicts = machine.verdicts("mounts")
    assert verdicts["/nfs15"] == "pass"
    assert verdicts["/nfs16"] == "error"


def test_lists_are_written_with_commas() -> None:
    expect = resolve(["mounts=/fsx:lustre,/home", "kernel_modules=efa", "gdr=true", "ib_link_layer=InfiniBand"]).expect
    assert expect.mounts == ("/fsx:lustre", "/home")
    assert expect.kernel_modules == ("efa",)
    assert expect.gdr is True


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("0\n", {0}), ("\n", set()), ("5,7-7", {5, 7})]
)
def test_lists_of_the_kernel(text: str, numbers: set[int]) -> None:
    assert system_files.parse_numbers(text) == numbers


@pytest.mark.parametrize("text", ["a", "0-", "-3", "0--1", "0;1"])
def test_what_is_no_list_is_an_error(text: str) -> None:
    with pytest.raises(HostError):
        system_files.parse_numbers(text)


def test_the_tightest_limit_of_processes_counts(machine: Machine) -> None:
    bare_metal(machine)
    assert machine.judge("processes")[0].values["left"] == 42000 - 180
    container_v1(machine)
    assert machine.judge("processes")[0].values["left"] == 2045
    assert machine.verdicts("processes", processes=4096) == {None: "fail"}


def test_killed_at_a_containers_limit_is_no_fault_of_the_machine(machine: Machine) -> None:
    bare_metal(machine)
    put(machine, files={"/proc/vmstat": "oom_kill 2\n"})
    line = "Memory cgroup out of memory: Killed process 4751 (python) total-vm:102088kB, anon-rss:87808kB, UID:0\n"
    machine.command("dmesg", f"[ 1.0] {line}[ 2.0] {line}")
    assert machine.verdicts("oom_kills") == {None: "pass"}
    machine.command("dmesg", f"[ 2.0] {line}")  # the log has lost the first one
    assert machine.verdicts("oom_kills") == {None: "warn"}


def test_without_a_gpu_load_is_judged_only_against_a_stated_limit(machine: Machine) -> None:
    HEALTHY["plain VM"](machine)
    assert machine.verdicts("cpu_load") == {None: "skip"}
    assert machine.verdicts("cpu_load", load_per_cpu=1.0) == {None: "fail"}


def test_psi_switched_off_is_a_skip_and_unreadable_an_error(machine: Machine) -> None:
    path = "/proc/pressure/memory"
    machine.answer(
        "read", path, {"error": "FileUnreadable", "message": f"{path} cannot be read: Operation not supported"}
    )
    assert machine.verdicts("memory_pressure") == {None: "skip"}
    assert machine.verdicts("memory_pressure", memory_pressure=5.0) == {None: "error"}
    machine.answer("read", path, {"error": "FileUnreadable", "message": "Permission denied"})
    with pytest.raises(HostError, match="Permission"):
        machine.judge("memory_pressure")


def test_an_address_needs_no_resolver(machine: Machine) -> None:
    machine.answer("env", "MASTER_ADDR", "10.0.0.9")
    machine.answer("env", "TRAINMASTER_PEERS", "fd00::7, h200")
    assert machine.verdicts("hostname") == {None: "pass", "10.0.0.9": "pass", "fd00::7": "pass"}


def test_a_resolver_that_hangs_knows_nobody(machine: Machine) -> None:
    machine.answer("env", "MASTER_ADDR", "node-0")
    machine.refuses("getent ahosts node-0", "CommandTimedOut", "gave no answer in 15 s")
    assert machine.verdicts("hostname")["node-0"] == "fail"


@pytest.mark.parametrize("stdout", ["", "{", "[]", '{"mib": 1}', '{"mib": "x", "intact": true}', "null", *RATES])
def test_a_damaged_probe_is_an_error(machine: Machine, stdout: str) -> None:
    machine.command("python -m trainmaster.node.probe_disk .", stdout)
    (result,) = checks.run(machine.host, Expect(), level=2, only=["disk_io"])
    assert str(result.verdict) == "error"


def test_the_use_of_the_cpus_is_told_and_no_answer_is_made_up(machine: Machine) -> None:
    (found,) = machine.judge("cpu_load")
    assert found.values["usage_percent"] == 3.0  # 12 of 400 ticks
    line = shlex.join(cpu_load.USAGE)
    machine.refuses(line, "CommandMissing", "sh is not on this machine")
    (found,) = machine.judge("cpu_load")
    assert (found.verdict, found.values["usage_percent"]) == ("pass", None)
    for text in ("", "cpu  1 2 3", "cpu  812345 120 93412 98123456 4120 0 2210 0 0 0\n", "N/A\nN/A\n"):
        machine.command(line, text)
        with pytest.raises(HostError, match="CPU times"):
            machine.judge("cpu_load")


@pytest.mark.spawns
def test_the_use_of_this_machine_is_a_share() -> None:
    usage = cpu_load.read(Host()).usage_percent
    assert usage is not None and 0.0 <= usage <= 100.0


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        ("ram", "/sys/fs/cgroup/user.slice/memory.max", "-5\n"),
        ("ram", "/sys/fs/cgroup/user.slice/memory.max", "7\n"),
        ("processes", "/sys/fs/cgroup/user.slice/user-1000.slice/pids.max", "-1\n"),
        ("cpu", "/sys/devices/system/cpu/online", "7-3\n"),
        ("numa", "/sys/bus/pci/devices/0000:00:06.0/numa_node", "99\n"),
        ("huge_pages", "/sys/kernel/mm/transparent_hugepage/enabled", "[sometimes]\n"),
    ],
)
def test_a_number_that_cannot_be_is_no_answer(machine: Machine, check: str, path: str, text: str) -> None:
    bare_metal(machine)
    assert "error" not in machine.verdicts(check).values()
    machine.file(path, text)
    (result,) = checks.run(machine.host, Expect(), level=1, only=[check])
    assert [str(finding.verdict) for finding in result.findings] == ["error"]
