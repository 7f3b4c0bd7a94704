"""The transport is proven from NCCL's log: a silent fall back to TCP fails, and an unfinished log proves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.bench.collectives.transport import Proof, parse_expected, prove_gloo, prove_nccl, read_logs
from trainmaster.core.errors import UsageError
from trainmaster.core.results import Verdict
from trainmaster.node.parse.nccl_debug import parse

SAMPLES = Path(__file__).parents[1] / "node" / "parse" / "samples"


def prove(name: str, expected: str | None, *, nodes: int = 2, world: int = 4, old: str = "", new: str = "") -> Proof:
    text = (SAMPLES / f"nccl-debug-{name}.txt").read_text()
    assert old in text
    return prove_nccl(parse(text.replace(old, new)), parse_expected(expected), nodes=nodes, world=world)


@pytest.mark.parametrize(
    ("log", "expected", "verdict", "fabric"),
    [
        ("efa", "EFA", Verdict.PASS, "efa"),
        ("ib", "IB", Verdict.PASS, "ib"),
        ("socket", "Socket", Verdict.PASS, "tcp"),
        ("efa", None, Verdict.PASS, "efa"),
        ("ib", None, Verdict.PASS, "ib"),
        ("socket", None, Verdict.WARN, "tcp"),  # nobody said what the fabric is, but nobody wants this
        ("socket", "EFA", Verdict.FAIL, "tcp"),
        ("socket", "IB", Verdict.FAIL, "tcp"),
        ("ib", "EFA", Verdict.FAIL, "ib"),
        ("efa", "IB", Verdict.FAIL, "efa"),
        ("ib", "Socket", Verdict.FAIL, "ib"),
    ],
)
def test_what_carried_it_against_what_should_have(
    log: str, expected: str | None, verdict: Verdict, fabric: str
) -> None:
    proof = prove(log, expected)
    assert (proof.finding.verdict, proof.fabric) == (verdict, fabric), proof.finding.reason


def test_the_fall_back_to_tcp_is_told_in_words() -> None:
    finding = prove("socket", "IB").finding
    assert "TCP sockets carried the traffic between nodes" in finding.reason
    assert "2×8 H200 gave 3.8 GB/s once" in finding.reason
    assert finding.action


def test_libfabric_over_tcp_is_not_efa() -> None:
    proof = prove("efa", "EFA", old="Selected provider is efa", new="Selected provider is tcp")
    assert (proof.finding.verdict, proof.fabric) == (Verdict.FAIL, "tcp")


def test_roce_is_another_fabric_than_infiniband() -> None:
    assert prove("ib", "IB", old=":1/IB", new=":1/RoCE").fabric == "roce"


@pytest.mark.parametrize("expected", ["IB", "EFA", "NVLS", "P2P", "Socket", None])
def test_without_a_log_nothing_is_proven(expected: str | None) -> None:
    proof = prove_nccl(None, parse_expected(expected), nodes=2, world=4)
    assert (proof.finding.verdict, proof.fabric) == (Verdict.ERROR, None)


def test_a_log_that_lacks_ranks_or_is_damaged_is_no_proof() -> None:
    assert prove("ib", "IB", world=16).finding.verdict is Verdict.ERROR
    assert prove("ib", "IB", old="[send] via NET/IB/0", new="[send] via NET/I@").finding.verdict is not Verdict.PASS


def test_ranks_on_one_node_prove_nothing_about_its_network() -> None:
    lines = [line for line in (SAMPLES / "nccl-debug-ib.txt").read_text().splitlines() if "NET/IB/" not in line]
    one = "\n".join(lines).replace("node2", "node1")
    assert prove_nccl(parse(one), "IB", nodes=1, world=4).finding.verdict is Verdict.ERROR
    assert prove_nccl(parse(one), "P2P", nodes=1, world=4).finding.verdict is Verdict.PASS
    assert prove_nccl(parse(one), "P2P", nodes=1, world=4).fabric == "nvlink"
    shm = one.replace("P2P/CUMEM", "SHM/direct/direct")
    assert prove_nccl(parse(shm), "P2P", nodes=1, world=4).finding.verdict is Verdict.FAIL
    assert prove_nccl(parse(shm), None, nodes=1, world=4).fabric == "host"


def test_nvls_must_be_there_and_nothing_may_go_through_host_memory() -> None:
    assert prove("ib", "NVLS").finding.verdict is Verdict.PASS
    gone = prove("ib", "NVLS", old="NVLS multicast support is available", new="NVLS multicast support is not available")
    assert gone.finding.verdict is Verdict.FAIL
    assert prove("ib", "NVLS", old="via P2P/CUMEM", new="via SHM/direct/direct").finding.verdict is Verdict.FAIL


def test_gloo_is_tcp_and_says_so() -> None:
    assert prove_gloo(None, 1).finding.verdict is Verdict.PASS
    assert "TCP" in prove_gloo(None, 1).words
    assert prove_gloo("IB", 2).finding.verdict is Verdict.FAIL


def test_logs_of_all_ranks_are_one(tmp_path: Path) -> None:
    assert read_logs([]) is None
    text = (SAMPLES / "nccl-debug-efa.txt").read_text()
    for node in ("node1", "node2"):
        (tmp_path / f"nccl-{node}.log").write_text("\n".join(line for line in text.splitlines() if node in line))
    log = read_logs(tmp_path.glob("*.log"))
    assert log is not None
    assert log.carried == parse(text).carried


def test_an_unknown_transport_is_refused() -> None:
    assert parse_expected("efa") == "EFA"
    with pytest.raises(UsageError):
        parse_expected("carrier pigeon")
