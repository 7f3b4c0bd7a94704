"""CPUs, memory, disks and limits, on bare machines and inside containers of both kinds."""

from __future__ import annotations

import pytest

from machines import Machine
from trainmaster.core.errors import HostError

GIB = 1 << 30
CG = "/sys/fs/cgroup"
V1_MOUNTS = (
    "30 20 0:30 {root} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
    "31 20 0:31 {root} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
)


def cgroup_v1(machine: Machine, *, group: str, root: str) -> None:
    machine.file("/proc/self/cgroup", f"4:memory:{group}\n2:cpu,cpuacct:{group}\n1:name=systemd:{group}\n0::/\n")
    machine.file("/proc/self/mountinfo", V1_MOUNTS.format(root=root))


def v1_limits(
    machine: Machine, below: str, *, cpus: float | None, memory: int | None, used: int = 0, cache: int = 0
) -> None:
    machine.file(f"{CG}/cpu,cpuacct{below}/cpu.cfs_quota_us", f"{-1 if cpus is None else int(cpus * 100_000)}\n")
    machine.file(f"{CG}/cpu,cpuacct{below}/cpu.cfs_period_us", "100000\n")
    machine.file(f"{CG}/memory{below}/memory.limit_in_bytes", f"{9223372036854771712 if memory is None else memory}\n")
    machine.file(f"{CG}/memory{below}/memory.usage_in_bytes", f"{used}\n")
    machine.file(f"{CG}/memory{below}/memory.stat", f"inactive_file 1\ntotal_inactive_file {cache}\n")


def values(machine: Machine, check: str) -> dict[str, object]:
    return dict(machine.judge(check)[0].values)


def test_v2_quota_counts_not_the_cores(machine: Machine) -> None:
    machine.file(f"{CG}/cpu.max", "250000 100000\n")
    assert values(machine, "cpu") == {"usable": 2.5, "schedulable": 16, "quota": 2.5}
    assert machine.verdicts("cpu", cpus=2) == {None: "pass"}
    assert machine.verdicts("cpu", cpus=3) == {None: "fail"}


@pytest.mark.parametrize("text", ["max 100000\n", None])
def test_no_quota_leaves_the_cores(machine: Machine, text: str | None) -> None:
    machine.file(f"{CG}/cpu.max", text)
    assert values(machine, "cpu")["usable"] == 16


def test_the_tightest_group_on_the_way_up_counts(machine: Machine) -> None:
    machine.file("/proc/self/cgroup", "0::/kubepods/pod1/box\n")
    for group, cpu, memory in (("/kubepods/pod1/box", "max", "max"), ("/kubepods/pod1", "400000", f"{8 * GIB}"),
                               ("/kubepods", "800000", f"{64 * GIB}"), ("", None, None)):  # fmt: skip
        machine.file(f"{CG}{group}/cpu.max", None if cpu is None else f"{cpu} 100000\n")
        machine.file(f"{CG}{group}/memory.max", None if memory is None else f"{memory}\n")
        machine.file(f"{CG}{group}/memory.current", f"{2 * GIB}\n")
        machine.file(f"{CG}{group}/memory.stat", "inactive_file 0\n")
    assert values(machine, "cpu")["usable"] == 4
    assert values(machine, "ram") == {"total_gib": 8.0, "free_gib": 6.0, "limited": True}


def test_v1_in_a_container_that_sees_the_hosts_paths(machine: Machine) -> None:
    """Docker without a cgroup namespace: the group is /docker/x, and so is the root of the mount."""
    cgroup_v1(machine, group="/docker/x", root="/docker/x")
    v1_limits(machine, "", cpus=4, memory=16 * GIB, used=10 * GIB, cache=6 * GIB)
    assert values(machine, "cpu")["usable"] == 4
    assert values(machine, "ram") == {"total_gib": 16.0, "free_gib": 12.0, "limited": True}


def test_v1_on_the_host_walks_up_from_its_own_group(machine: Machine) -> None:
    cgroup_v1(machine, group="/slurm/job_1", root="/")
    v1_limits(machine, "/slurm/job_1", cpus=None, memory=32 * GIB)
    v1_limits(machine, "/slurm", cpus=8, memory=None)
    v1_limits(machine, "", cpus=None, memory=None)
    assert values(machine, "cpu")["usable"] == 8
    assert values(machine, "ram")["total_gib"] == 32.0


def test_a_group_outside_the_mount_falls_back_to_the_mount(machine: Machine) -> None:
    cgroup_v1(machine, group="/elsewhere", root="/docker/x")
    v1_limits(machine, "", cpus=2, memory=None)
    assert values(machine, "cpu")["usable"] == 2
    machine.file("/proc/self/cgroup", "0::/../..\n")
    machine.file("/proc/self/mountinfo", "1 2 0:3 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n")
    machine.file(f"{CG}/cpu.max", "300000 100000\n")
    assert values(machine, "cpu")["usable"] == 3


def test_a_limit_that_cannot_be_read_is_not_no_limit(machine: Machine) -> None:
    machine.answer("read", f"{CG}/memory.max", {"error": "FileUnreadable", "message": "Permission denied"})
    with pytest.raises(HostError, match="Permission denied"):
        machine.judge("ram")


def test_affinity_counts(machine: Machine) -> None:
    machine.file("/proc/self/status", "Cpus_allowed_list:\t0,2-3\n")
    assert machine.verdicts("cpu", cpus=4) == {None: "fail"}
    machine.file("/proc/self/status", "Cpus_allowed_list:\t20-23\n")
    assert machine.verdicts("cpu") == {None: "fail"}  # none of them is online


def test_less_than_one_cpu_is_a_warning(machine: Machine) -> None:
    machine.file(f"{CG}/cpu.max", "50000 100000\n")
    assert machine.verdicts("cpu") == {None: "warn"}


@pytest.mark.parametrize(
    ("free_kib", "expect", "verdict"),
    [
        (100 << 20, {}, "pass"),
        (512 << 10, {}, "warn"),
        (100 << 10, {}, "fail"),
        (512 << 10, {"ram_free_gib": 0.25}, "pass"),
        (8 << 20, {"ram_free_gib": 9.0}, "fail"),
        (100 << 20, {"ram_gib": 125.0}, "pass"),
        (100 << 20, {"ram_gib": 126.0}, "fail"),
    ],
)
def test_memory_of_the_machine(machine: Machine, free_kib: int, expect: dict[str, float], verdict: str) -> None:
    machine.file("/proc/meminfo", f"MemTotal:       131891200 kB\nMemAvailable:   {free_kib} kB\n")
    assert machine.verdicts("ram", **expect) == {None: verdict}


@pytest.mark.parametrize("text", ["", "MemTotal: 5 kB\n", "MemTotal: x kB\nMemAvailable: 4 kB\n"])
def test_a_damaged_meminfo_is_an_error(machine: Machine, text: str) -> None:
    machine.file("/proc/meminfo", text)
    with pytest.raises(HostError, match="meminfo"):
        machine.judge("ram")


def disk(free_gib: float, total_gib: float, files: int | None = 1000) -> dict[str, object]:
    return {"free_bytes": int(free_gib * GIB), "total_bytes": int(total_gib * GIB), "free_files": files}


@pytest.mark.parametrize(
    ("answer", "expect", "verdict"),
    [
        (disk(61, 64), {}, "pass"),
        (disk(9, 64), {}, "warn"),
        (disk(20, 1000), {}, "warn"),  # 2 %
        (disk(400, 100_000), {}, "pass"),  # 0.4 % of a very large one
        (disk(0.5, 64), {}, "fail"),
        (disk(61, 64, files=0), {}, "fail"),
        (disk(61, 64, files=None), {}, "pass"),
        (disk(9, 64), {"disk_free_gib": 5.0}, "pass"),
        (disk(61, 64), {"disk_free_gib": 500.0}, "fail"),
    ],
)
def test_disk_space(machine: Machine, answer: dict[str, object], expect: dict[str, float], verdict: str) -> None:
    machine.answer("disk", ".", answer)
    assert machine.verdicts("disk_space", **expect) == {None: verdict}


def test_the_disk_of_the_checkpoints_is_the_one_that_counts(machine: Machine) -> None:
    machine.answer("env", "TRAINMASTER_CHECKPOINTS", "/data/job/checkpoints")
    for path in ("/data/job/checkpoints", "/data/job"):  # not made yet
        machine.answer("disk", path, {"error": "FileMissing", "message": f"{path} is not there"})
    machine.answer("disk", "/data", disk(0.1, 64))
    (finding,) = machine.judge("disk_space")
    assert finding.verdict == "fail"
    assert "/data/job/checkpoints" in finding.reason


def test_a_disk_that_cannot_be_asked_is_an_error(machine: Machine) -> None:
    machine.answer("disk", ".", {"error": "FileUnreadable", "message": "Stale file handle"})
    with pytest.raises(HostError, match="Stale"):
        machine.judge("disk_space")


@pytest.mark.parametrize(
    ("answer", "expect", "verdict"),
    [
        (disk(64, 64), {}, "pass"),
        (disk(0.0625, 0.0625), {}, "warn"),  # Docker's 64 MiB
        (disk(0.5, 64), {}, "warn"),  # full of what others left
        (disk(64, 64), {"shm_gib": 65.0}, "fail"),
        (disk(64, 64), {"shm_gib": 64.0}, "pass"),
        ({"error": "FileMissing", "message": "/dev/shm is not there"}, {}, "fail"),
    ],
)
def test_shared_memory(machine: Machine, answer: dict[str, object], expect: dict[str, float], verdict: str) -> None:
    machine.answer("disk", "/dev/shm", answer)
    assert machine.verdicts("shm", **expect) == {None: verdict}


@pytest.mark.parametrize(
    ("limit", "rdma", "expect", "verdict"),
    [
        ("unlimited", ["mlx5_0"], {"memlock_gib": 1000.0}, "pass"),
        ("8388608", None, {}, "pass"),
        ("8388608", [], {}, "pass"),
        ("8388608", ["mlx5_0"], {}, "warn"),
        ("8388608", None, {"memlock_gib": 1.0}, "fail"),
        ("68719476736", ["mlx5_0"], {"memlock_gib": 1.0}, "pass"),
    ],
)
def test_locked_memory(
    machine: Machine, limit: str, rdma: list[str] | None, expect: dict[str, float], verdict: str
) -> None:
    machine.file(
        "/proc/self/limits", f"Limit  Soft Limit  Hard Limit  Units\nMax locked memory   {limit}   unlimited   bytes\n"
    )
    if rdma is not None:
        machine.answer("list", "/sys/class/infiniband", rdma)
    assert machine.verdicts("memlock", **expect) == {None: verdict}


def test_a_limits_file_without_the_line_is_an_error(machine: Machine) -> None:
    machine.file("/proc/self/limits", "Limit  Soft Limit\n")
    with pytest.raises(HostError, match="locked memory"):
        machine.judge("memlock")
