"""Exchange between GPUs: the bad link's two ends are named; what was measured before a hang is kept."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from probe_answers import TORCH, uuid

from machines import PCI, Machine
from trainmaster.checks.active import _probe
from trainmaster.core.results import Verdict


def document(count: int, gbps: float = 396.0) -> dict[str, Any]:
    gpus = [{"type": "cuda", "name": "NVIDIA H200", "uuid": uuid(n), **TORCH} for n in range(count)]
    pairs = [
        {"from": a, "to": b, "direct": True, "gbps": gbps, "rounds": [gbps] * 3, "wrong": 0}
        for a in range(count)
        for b in range(count)
        if a != b
    ]
    results = {"gpus": gpus, "buffer_bytes": 256 << 20, "pairs": pairs}
    return {"v": 1, "probe": "p2p", "device": gpus[0], "results": results, "error": None, "took_s": 9.0}


def exchange(
    machine: Machine, count: int, change: Callable[[dict[str, Any]], object] = lambda _: None, *, switch: bool = True
) -> None:
    machine.gpus(count)
    machine.answer("env", "CUDA_VISIBLE_DEVICES", None)
    if switch:
        machine.answer("list", PCI, [*(f"0000:{16 + n:02x}:00.0" for n in range(count)), "0000:c1:00.0"])
        machine.file(f"{PCI}/0000:c1:00.0/vendor", "0x10de\n")
        machine.file(f"{PCI}/0000:c1:00.0/class", "0x068000\n")
    told = document(count)
    change(told)
    command(machine, count, json.dumps(told), exit_code=0 if told["error"] is None else 4)


def command(machine: Machine, count: int, stdout: str, *, exit_code: int, stderr: str = "") -> None:
    """The one probe of all GPUs; its words are too many for a file's name."""
    machine.put_text("commands/p2p.out", stdout)
    machine.put_text("commands/p2p.err", stderr)
    line = shlex.join(_probe.command("p2p", ",".join(map(uuid, range(count)))))
    machine.answer("run", line, {"exit_code": exit_code, "took_s": 9.0, "text": "commands/p2p"})


def pair(a: int, b: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(told: dict[str, Any]) -> None:
        for entry in told["results"]["pairs"]:
            if (entry["from"], entry["to"]) == (a, b):
                entry.update(changes)

    return change


@pytest.mark.parametrize("switch", [True, False])
@pytest.mark.parametrize("count", [3, 8])
def test_a_healthy_board_passes(machine: Machine, count: int, switch: bool) -> None:
    exchange(machine, count, switch=switch)
    assert machine.verdicts("p2p") == {f"gpu{n}": "pass" for n in range(count)}
    assert machine.judge("p2p")[0].values["row"]["gpu0->gpu2"] == 396.0


def test_one_gpu_has_nobody_to_talk_to(machine: Machine) -> None:
    machine.gpus(1)
    machine.answer("env", "CUDA_VISIBLE_DEVICES", None)
    assert machine.verdicts("p2p") == {None: "skip"}


def test_two_gpus_on_an_unknown_board_warn_that_nothing_was_compared(machine: Machine) -> None:
    exchange(machine, 2, switch=False)
    assert set(machine.verdicts("p2p").values()) == {"warn"}


def test_a_weak_way_names_both_ends(machine: Machine) -> None:
    exchange(machine, 8, pair(2, 5, gbps=40.0))
    found = {finding.device: finding for finding in machine.judge("p2p")}
    assert {d for d, finding in found.items() if finding.verdict is Verdict.FAIL} == {"gpu2", "gpu5"}
    assert "from gpu2 to gpu5" in found["gpu2"].reason


def test_a_gpu_with_half_its_links_differs_from_its_peers(machine: Machine) -> None:
    def change(told: dict[str, Any]) -> None:
        for entry in told["results"]["pairs"]:
            if 3 in (entry["from"], entry["to"]):
                entry["gbps"] = 198.0

    exchange(machine, 8, change, switch=False)
    assert machine.verdicts("p2p") == {f"gpu{n}": "fail" if n == 3 else "pass" for n in range(8)}


@pytest.mark.parametrize("changes", [{"wrong": 5}, {"direct": False}])
def test_changed_data_and_detours_fail(machine: Machine, changes: dict[str, Any]) -> None:
    exchange(machine, 4, pair(0, 1, **changes))
    assert machine.verdicts("p2p") == {"gpu0": "fail", "gpu1": "fail", "gpu2": "pass", "gpu3": "pass"}


@pytest.mark.parametrize("model", ["NVIDIA H200", "NVIDIA B200", "NVIDIA Graphics Device"])
@pytest.mark.parametrize("changes", [{"gbps": 0.5}, {"gbps": 200.0}, {"direct": False}])
def test_a_bad_pair_fails_without_an_nvswitch_on_the_bus(machine: Machine, model: str, changes: dict[str, Any]) -> None:
    exchange(machine, 8, pair(2, 3, **changes), switch=False)
    machine.edit(None, {"product_name": model, "fabric/state": "N/A", "fabric/status": "N/A"})
    assert machine.verdicts("p2p") == {f"gpu{n}": "fail" if n in (2, 3) else "pass" for n in range(8)}


def sockets(told: dict[str, Any]) -> None:
    """Three GPUs on one socket, the others on a second: between them the ways are slow and not direct."""
    for entry in told["results"]["pairs"]:
        entry["gbps"] = 26.0
        if (entry["from"] < 3) != (entry["to"] < 3):
            entry.update(gbps=12.0, direct=False)


def test_a_board_whose_ways_differ_by_design_passes(machine: Machine) -> None:
    exchange(machine, 6, sockets, switch=False)
    machine.edit(None, {"product_name": "NVIDIA L40S", "fabric/state": "N/A", "fabric/status": "N/A"})
    assert set(machine.verdicts("p2p").values()) == {"pass"}


def test_the_same_ways_fail_on_a_symmetric_board(machine: Machine) -> None:
    exchange(machine, 8, sockets, switch=False)
    machine.edit(None, {"product_name": "NVIDIA H200"})
    assert "fail" in machine.verdicts("p2p").values()


def test_a_stated_floor_counts(machine: Machine) -> None:
    exchange(machine, 3, switch=False)
    assert set(machine.verdicts("p2p", p2p_gbps=390.0).values()) == {"pass"}
    assert set(machine.verdicts("p2p", p2p_gbps=400.0).values()) == {"fail"}


def test_a_hang_names_the_pairs_at_work_and_keeps_the_rest(machine: Machine) -> None:
    def change(told: dict[str, Any]) -> None:
        told["error"] = {"kind": "Hung", "message": "no end in 110 s", "step": "round 1: 0->2 1->3"}
        done = [(0, 3), (3, 0), (1, 2), (2, 1)]
        pairs = told["results"]["pairs"]
        told["results"]["pairs"] = [entry for entry in pairs if (entry["from"], entry["to"]) in done]

    exchange(machine, 5, change)
    found = {finding.device: finding for finding in machine.judge("p2p")}
    assert {device: str(finding.verdict) for device, finding in found.items()} == {
        "gpu0": "fail",
        "gpu1": "fail",
        "gpu2": "fail",
        "gpu3": "fail",
        "gpu4": "error",
    }
    assert "0->2 1->3" in found["gpu4"].reason


@pytest.mark.parametrize(
    "change",
    [
        pair(0, 1, gbps="nan"),
        pair(0, 1, gbps=0),
        pair(0, 1, to=9),
        lambda told: told["results"]["pairs"].clear(),
        lambda told: told["results"].pop("pairs"),
        lambda told: told["results"]["gpus"].pop(),
        lambda told: told["results"]["gpus"][1].update(uuid=uuid(7)),
        lambda told: told["results"]["gpus"][1].update(type="cpu"),
    ],
)
def test_a_report_that_makes_no_sense_is_an_error_of_all(machine: Machine, change: Any) -> None:
    exchange(machine, 3, change)
    assert machine.verdicts("p2p") == {"gpu0": "error", "gpu1": "error", "gpu2": "error"}


def test_a_pair_that_was_left_out_is_not_passed_over(machine: Machine) -> None:
    def change(told: dict[str, Any]) -> None:
        told["results"]["pairs"] = [e for e in told["results"]["pairs"] if (e["from"], e["to"]) != (1, 2)]

    exchange(machine, 4, change)
    assert machine.verdicts("p2p") == {"gpu0": "pass", "gpu1": "error", "gpu2": "error", "gpu3": "pass"}


def test_a_crash_is_an_error_of_all(machine: Machine) -> None:
    exchange(machine, 3)
    command(machine, 3, "", exit_code=-6, stderr="terminate called")
    findings = machine.judge("p2p")
    assert {finding.verdict for finding in findings} == {Verdict.ERROR}
    assert "SIGABRT" in findings[0].reason
