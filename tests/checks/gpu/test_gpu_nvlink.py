"""`nvidia-smi nvlink` before and after Blackwell: what is up, what is an error, and what only looks like one."""

from __future__ import annotations

import pytest

from machines import Machine
from trainmaster.checks.gpu import gpu_nvlink

UUIDS = [f"GPU-00000000-1111-2222-3333-{n:012x}" for n in range(2)]
# The counters of driver 595 on one healthy link of a B200; the first FEC bin grows on every link.
BLACKWELL = [
    "Tx packets: 123456789", "Tx bytes: 9876543210", "Rx packets: 123456789", "Rx bytes: 9876543210",
    "Malformed packet Errors: 0", "Buffer overrun Errors: 0", "Rx Errors: 0", "Rx remote Errors: 0",
    "Rx General Errors: 0", "Local link integrity Errors: 0", "Tx discards: 0", "Link recovery successful events: 0",
    "Link recovery failed events: 0", "Total link recovery events: 0", "Effective Errors: 0", "Effective BER: 15e-255",
    "Symbol Errors: 0", "Symbol BER: 15e-255", "FEC Errors - 0: 17941761", "FEC Errors - 1: 12", "FEC Errors - 15: 0",
    "PLR Xmit Blocks: 1234567890",
]  # fmt: skip


def text(lines: list[str], *, links: int = 18) -> str:
    body = "".join(f"\t Link {link}: {line}\n" for link in range(links) for line in lines)
    return "".join(f"GPU {n}: NVIDIA B200 (UUID: {uuid})\n{body}" for n, uuid in enumerate(UUIDS))


@pytest.fixture
def pair(machine: Machine) -> Machine:
    """Two B200s."""
    machine.gpus(2)
    machine.edit(None, {"product_name": "NVIDIA B200", "fb_memory_usage/total": "183359 MiB"})
    machine.command("nvidia-smi nvlink -s", text(["53.125 GB/s"]))
    machine.command("nvidia-smi nvlink -e", text(BLACKWELL))
    return machine


def test_a_healthy_pair_passes(pair: Machine) -> None:
    assert pair.verdicts("gpu_nvlink") == {"gpu0": "pass", "gpu1": "pass"}
    assert [finding.values["up"] for finding in pair.judge("gpu_nvlink")] == [18, 18]


@pytest.mark.parametrize(
    ("counter", "verdict"),
    [("Malformed packet Errors", "fail"), ("Buffer overrun Errors", "fail"), ("Rx General Errors", "fail"),
     ("Local link integrity Errors", "fail"), ("Link recovery failed events", "fail"), ("Rx Errors", "warn"),
     ("Rx remote Errors", "warn"), ("Tx discards", "warn"), ("Link recovery successful events", "warn"),
     ("Effective Errors", "warn"), ("Symbol Errors", "warn"), ("FEC Errors - 15", "pass")],
)  # fmt: skip
def test_each_counter_weighs_what_it_means(pair: Machine, counter: str, verdict: str) -> None:
    pair.replace("nvidia-smi nvlink -e", f"Link 5: {counter}: 0", f"Link 5: {counter}: 2")
    assert pair.verdicts("gpu_nvlink") == {"gpu0": verdict, "gpu1": "pass"}
    if verdict != "pass":
        assert f"link 5: {counter} 2" in pair.judge("gpu_nvlink")[0].reason


@pytest.mark.parametrize(("count", "verdict"), [(3, "pass"), (999, "pass"), (1000, "warn")])
@pytest.mark.parametrize("counter", ["Replay Errors", "CRC Errors"])
def test_before_blackwell_only_many_repeats_are_told(machine: Machine, counter: str, count: int, verdict: str) -> None:
    machine.gpus(2)
    machine.replace("nvidia-smi nvlink -e", f"Link 5: {counter}: 0", f"Link 5: {counter}: {count}")
    assert machine.verdicts("gpu_nvlink") == {"gpu0": verdict, "gpu1": "pass"}


UP = "Link 5: 53.125 GB/s"


@pytest.mark.parametrize(
    "damage",
    [(UP, "Link 5: <inactive>"), (UP, "Link 5: ERR!"), (UP, ""), ("\t Link 17: 53.125 GB/s\n", ""),
     (f"(UUID: {UUIDS[0]})", "(UUID: GPU-other)"), ("GPU 0:", "GPU zero:")],
)  # fmt: skip
def test_a_link_that_is_not_shown_up_is_not_up(pair: Machine, damage: tuple[str, str]) -> None:
    pair.replace("nvidia-smi nvlink -s", *damage)
    verdicts = pair.verdicts("gpu_nvlink")
    assert verdicts["gpu0"] in ("fail", "error")
    assert verdicts["gpu1"] == "pass"


def test_all_links_down_in_words(pair: Machine) -> None:
    words = "\t NVML: Unable to retrieve NVLink information as all links are inActive\n"
    said = "".join(f"GPU {n}: NVIDIA B200 (UUID: {uuid})\n{words}" for n, uuid in enumerate(UUIDS))
    pair.command("nvidia-smi nvlink -s", said)
    assert pair.verdicts("gpu_nvlink") == {"gpu0": "fail", "gpu1": "fail"}


def test_a_line_that_is_not_understood_is_no_pass(pair: Machine) -> None:
    pair.replace("nvidia-smi nvlink -e", "Link 5: Rx Errors: 0", "Link 5: Rx Errors: ???")
    assert pair.verdicts("gpu_nvlink")["gpu0"] == "error"


def test_a_link_that_is_said_to_be_both_is_down() -> None:
    links = gpu_nvlink.parse(f"GPU 0: x (UUID: {UUIDS[0]})\nLink 0: 25 GB/s\nLink 0: <inactive>\n")[UUIDS[0]]
    assert (links.up, links.down) == (frozenset(), {0})


def test_a_gpu_whose_links_are_all_slow_fails(pair: Machine) -> None:
    first, _, second = text(["53.125 GB/s"]).partition("GPU 1:")
    pair.command("nvidia-smi nvlink -s", first + "GPU 1:" + second.replace("53.125", "26.562"))
    assert pair.verdicts("gpu_nvlink") == {"gpu0": "pass", "gpu1": "fail"}


def test_an_error_on_standard_error_is_no_pass(pair: Machine) -> None:
    pair.command("nvidia-smi nvlink -e", text(BLACKWELL), stderr="Unable to read counters: Unknown Error\n")
    assert pair.verdicts("gpu_nvlink") == {"gpu0": "error", "gpu1": "error"}
