"""Evidence of several equal nodes, of which one differs: the verdict of the cluster, from captures to exit code."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from checks import gpu_faults
from checks.nodes import infiniband
from machines import H200, Machine
from trainmaster.checks import document
from trainmaster.cluster.health import compare
from trainmaster.core.expect import Expect
from trainmaster.core.health import ClusterHealth
from trainmaster.core.results import Finding, Verdict

pytestmark = pytest.mark.slow
UNKNOWN = "NVIDIA X300"  # a model that no table has: only its peers say what it should be
SMI = "nvidia-smi -q -x"
CHECKS = (
    "cpu gpu_clocks gpu_count gpu_driver gpu_ecc gpu_fabric gpu_memory gpu_model gpu_nvlink gpu_pcie gpu_peers "
    "gpu_power gpu_temperature gpu_vbios ib_ports ram"
).split()
RACK = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
OTHER = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
Put = Callable[[Machine], None]


def edit(**paths: str | None) -> Put:
    return lambda node: node.edit(None, {path.replace("__", "/"): value for path, value in paths.items()})


def word(old: str, new: str, line: str = SMI) -> Put:
    return lambda node: node.replace(line, old, new, count=-1)


def domain(uuid: str, clique: str = "7") -> Put:
    """GPUs in an NVLink domain of several nodes, with its service."""

    def put(node: Machine) -> None:
        node.edit(None, {"fabric/clusterUuid": uuid, "fabric/cliqueId": clique})
        node.command("systemctl is-active nvidia-imex", "active\n")

    return put


def ports(count: int) -> Put:
    return lambda node: infiniband(node, count)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One of `nodes` nodes gets `put`, the others `others`; `named`: the finding names that node."""

    name: str
    put: Put
    verdict: str
    named: bool = True
    others: Put = lambda node: None
    nodes: int = 4
    odd: int = 1  # how many nodes get `put`


def links(count: int) -> Put:
    return lambda node: node.nvlinks(8, links=count)


CASES = [
    Case(name="nothing", put=lambda node: None, verdict="PASS", named=False),
    Case(name="fewer NVLinks of an unknown model", put=links(12), verdict="FAIL"),
    Case(name="fewer NVLinks, two equal groups", put=links(12), verdict="WARN", named=False, odd=2),
    Case(name="ECC off", put=edit(ecc_mode__current_ecc="Disabled", ecc_mode__pending_ecc="Disabled"), verdict="FAIL"),
    Case(name="another driver", put=word("580.159.04", "570.86.15"), verdict="FAIL"),
    Case(name="another driver, two nodes", put=word("580.159.04", "570.86.15"), verdict="WARN", named=False, nodes=2),
    Case(name="no CUDA version", put=word("<cuda_version>13.0<", "<cuda_version>N/A<"), verdict="INCOMPLETE"),
    Case(name="another NVLink domain", put=domain(OTHER), others=domain(RACK), verdict="WARN"),
    Case(name="another clique", put=domain(RACK, "8"), others=domain(RACK), verdict="WARN"),
    Case(name="no NVLink domain", put=domain("00000000-0000-0000-0000-000000000000", "0"), others=domain(RACK),
         verdict="FAIL"),
    Case(name="two racks", put=domain(OTHER), others=domain(RACK), verdict="PASS", named=False, odd=2),
    Case(name="one adapter fewer", put=ports(7), others=ports(8), verdict="FAIL"),
    Case(name="adapters, two equal groups", put=ports(7), others=ports(8), verdict="WARN", named=False, odd=2),
    Case(name="hot GPUs", put=edit(temperature__gpu_temp="70 C"), others=edit(temperature__gpu_temp="35 C"),
         verdict="WARN"),
    Case(name="no memory temperature", put=edit(temperature__memory_temp="N/A"), verdict="INCOMPLETE"),
    Case(name="a narrower PCIe link on all GPUs", verdict="FAIL",
         put=edit(pci__pci_gpu_link_info__link_widths__max_link_width="8x",
                  pci__pci_gpu_link_info__link_widths__current_link_width="8x")),
    Case(name="a lower clock on all GPUs", verdict="FAIL",
         put=edit(max_clocks__graphics_clock="1410 MHz", max_clocks__sm_clock="1410 MHz")),
    Case(name="less memory on all GPUs", put=edit(fb_memory_usage__total="71000 MiB"), verdict="FAIL"),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node of eight GPUs that are equal."""
    folder = tmp_path_factory.mktemp("hgx") / "node"
    shutil.copytree(H200, folder)
    gpu_faults.make(Machine(folder))
    return folder


def judge(whole: Path, folder: Path, nodes: Mapping[str, Put]) -> tuple[ClusterHealth, list[Finding]]:
    healths = []
    for number, (name, put) in enumerate(nodes.items()):
        machine = Machine(folder / name, of=whole)
        put(machine)
        for line in (SMI, "nvidia-smi nvlink -s", "nvidia-smi nvlink -e"):
            text = machine.host.run(*line.split()).stdout
            machine.command(line, text.replace("NVIDIA H200", UNKNOWN).replace("GPU-00000000", f"GPU-0000000{number}"))
        healths.append(document.measure(machine.host, Expect(), level=1, only=CHECKS, node=name))
    cluster = compare.compare(healths)
    health = ClusterHealth(asked=tuple(nodes), nodes=tuple(healths), cluster=cluster)
    return health, [finding for result in cluster for finding in result.findings]


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_node_differs(whole: Path, tmp_path: Path, case: Case) -> None:
    names = [f"n{number}" for number in range(case.nodes)]
    odd = names[-case.odd :]
    health, found = judge(whole, tmp_path, {name: case.put if name in odd else case.others for name in names})
    told = [f"{f.verdict} {f.device}: {f.reason}" for f in found]
    alone = {node.node: str(node.overall) for node in health.nodes}
    assert str(health.overall) == case.verdict, (alone, told)
    bad = {finding.device for finding in found if finding.verdict not in (Verdict.PASS, Verdict.SKIP)}
    assert bad == (set(odd) if case.named else {None} if case.verdict != "PASS" else set()), told
