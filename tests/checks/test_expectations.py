"""Every expectation implies that its thing exists: stated alone against a machine that lacks it, none passes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from nodes import plain_vm

from machines import Machine
from trainmaster import checks
from trainmaster.checks import document, facts
from trainmaster.checks.expectations import COLLECTIVES, unmeasured
from trainmaster.checks.profiles import resolve
from trainmaster.core.expect import OF_COLLECTIVES, Expect
from trainmaster.core.results import Overall, Verdict

# A value of every field that a small virtual machine without GPU, RDMA, NUMA, swap limits or mounts does not meet.
LACKING: dict[str, Any] = {
    "gpus": 8, "gpu_model": "H200", "gpu_memory_gib": 80.0, "gpu_temperature_c": 60.0, "driver": "580",
    "vbios": "96.00.A5.00.1A", "gpu_power_w": 700.0, "gpu_clock_mhz": 1980.0, "pcie_gen": 5, "pcie_width": 16,
    "nvlinks": 18, "fabric": True, "ecc": True, "mig": True, "persistence": True, "dcgm": True, "gemm_tflops": 600.0,
    "hbm_gbps": 4000.0, "h2d_gbps": 50.0, "d2h_gbps": 50.0, "p2p_gbps": 300.0, "cpus": 4096, "ram_gib": 1e6,
    "ram_free_gib": 1e6, "disk_free_gib": 1e9, "shm_gib": 1e6, "memlock_gib": 1e6, "clock_offset_s": 1e-12,
    "load_per_cpu": 1e-6, "governor": "performance", "numa_nodes": 64, "memory_pressure": 1e-9, "disk_write_mib_s": 1e9,
    "disk_read_mib_s": 1e9, "mounts": ("/fsx",), "open_files": 10**9, "processes": 10**9, "huge_pages": 10**6,
    "kernel_modules": ("no_such_module",), "ib_ports": 8, "ib_rate_gbps": 400.0, "ib_link_layer": "InfiniBand",
    "efa_devices": 32, "gdr": True, "collectives": True, "busbw_gbps": 100.0, "transport": "IB",
}  # fmt: skip
# A severity of codes, and upper bounds that a machine which has none of the thing meets.
STATES_NO_THING = {"xids", "swap_used_gib", "oom_kills"}
MEASURED_BY = {**facts.read().measured_by, **dict.fromkeys(OF_COLLECTIVES, COLLECTIVES)}


def overall(machine: Machine, *, level: int = 2, **expect: Any) -> Overall:
    return document.measure(machine.host, Expect(**expect), level=level, alone=True).overall


@pytest.fixture
def bare(machine: Machine) -> Machine:
    """A machine that passes while nothing is stated, and lacks every special thing."""
    plain_vm(machine)
    limits = ("Max open files   65536   65536   files", "Max locked memory   8388608   8388608   bytes")
    machine.file("/proc/self/limits", "\n".join([*limits, "Max processes   62000   62000   processes\n"]))
    machine.file(
        "/proc/pressure/memory",
        "some avg10=0.00 avg60=0.01 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    )
    return machine


def test_every_field_is_tried() -> None:
    assert set(LACKING) | STATES_NO_THING == {field.name for field in dataclasses.fields(Expect)}


def test_the_machine_passes_while_nothing_is_stated(bare: Machine) -> None:
    assert overall(bare) in (Overall.PASS, Overall.WARN)


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("name", LACKING)
def test_stated_alone_it_does_not_pass(bare: Machine, name: str) -> None:
    assert overall(bare, **{name: LACKING[name]}) in (Overall.FAIL, Overall.INCOMPLETE)


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("name", LACKING)
def test_stated_alone_it_does_not_pass_at_level_1(bare: Machine, name: str) -> None:
    assert overall(bare, level=1, **{name: LACKING[name]}) in (Overall.FAIL, Overall.INCOMPLETE)


def test_every_field_names_the_check_that_measures_it() -> None:
    assert set(MEASURED_BY) == {field.name for field in dataclasses.fields(Expect)}
    assert set(MEASURED_BY.values()) <= {*checks.names(), COLLECTIVES}


@pytest.mark.parametrize("name", LACKING)
def test_a_field_above_the_level_of_the_run_is_not_measured(name: str) -> None:
    check = MEASURED_BY[name]
    level = checks.load(check).LEVEL if check != COLLECTIVES else None
    for run in (1, 2, 3):
        left = unmeasured(Expect(**{name: LACKING[name]}), level=run)
        assert bool(left) is (level is None or level > run)
        assert all(finding.verdict is Verdict.ERROR for result in left for finding in result.findings)


@pytest.mark.parametrize("name", [name for name in LACKING if MEASURED_BY[name] != COLLECTIVES])
def test_a_field_whose_check_is_left_out_is_not_measured(name: str) -> None:
    (left,) = unmeasured(Expect(**{name: LACKING[name]}), level=3, left_out=[MEASURED_BY[name]])
    assert [finding.verdict for finding in left.findings] == [Verdict.ERROR]
    assert MEASURED_BY[name] in left.findings[0].reason
    assert unmeasured(Expect(), level=3, left_out=[MEASURED_BY[name]]) == ()


@pytest.mark.parametrize("words", ["oom_kills=0", "swap_used_gib=0", "mig=false", "ecc=false", "ib_ports=0", "gpus=0"])
def test_zero_and_false_are_measured_too(words: str) -> None:
    expect = resolve([words]).expect
    check = MEASURED_BY[words.partition("=")[0]]
    (left,) = unmeasured(expect, level=3, left_out=[check])
    assert [finding.reason.split(" ")[0] for finding in left.findings] == [words]
    assert unmeasured(expect, level=3) == ()


@pytest.mark.parametrize("words", ["dcgm=false", "gdr=false", "persistence=false", "collectives=false"])
def test_what_may_be_absent_needs_no_check(words: str) -> None:
    check = MEASURED_BY[words.partition("=")[0]]
    assert unmeasured(resolve([words]).expect, level=1, left_out=[check]) == ()


@pytest.mark.parametrize("other", [{"ib_rate_gbps": 400.0}, {"ib_link_layer": "InfiniBand"}, {"transport": "IB"}])
def test_no_port_and_a_property_of_ports_contradict_each_other(machine: Machine, other: dict[str, Any]) -> None:
    assert [str(finding.verdict) for finding in machine.judge("ib_ports", ib_ports=0, **other)] == ["error"]
    assert [str(finding.verdict) for finding in machine.judge("ib_ports", ib_ports=0)] == ["skip"]


def test_skip_does_not_drop_an_expectation(machine: Machine) -> None:
    def run(*skip: str, **expect: Any) -> Overall:
        return document.measure(machine.host, Expect(**expect), level=2, skip=skip, alone=True).overall

    assert run("gemm") is Overall.PASS
    assert run("gemm", gemm_tflops=500.0) is Overall.INCOMPLETE
    assert run("hbm", gemm_tflops=500.0) is Overall.PASS


@pytest.mark.parametrize("profile", ["H200", "ml.p5.48xlarge", "g5.12xlarge"])
def test_a_profile_states_nothing_above_level_1(profile: str) -> None:
    assert unmeasured(resolve([profile]).expect, level=1) == ()


@pytest.mark.parametrize("transport", ["EFA", "IB", "NVLS", "P2P", "Socket"])
def test_no_transport_passes_without_collectives(bare: Machine, transport: str) -> None:
    assert overall(bare, transport=transport) in (Overall.FAIL, Overall.INCOMPLETE)


@pytest.mark.parametrize("profile", ["H200", "ml.p5.48xlarge", "g5.12xlarge"])
def test_a_profile_of_gpus_fails_without_one(bare: Machine, profile: str) -> None:
    known = resolve([profile], bare.host)
    assert document.measure(bare.host, known.expect, level=1).overall is Overall.FAIL


def test_an_expectation_that_contradicts_itself_is_no_pass(bare: Machine) -> None:
    assert overall(bare, gpus=0, gpu_model="H200") is Overall.INCOMPLETE
    assert overall(bare, gpus=0) in (Overall.PASS, Overall.WARN)
