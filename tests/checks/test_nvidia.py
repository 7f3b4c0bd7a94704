"""Every schema and every kind of damage of `nvidia-smi -q -x`: read right, or refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machines import H200, PCI, Machine, smi_text
from trainmaster.checks import nvidia
from trainmaster.checks.gpu import gpu_count, gpu_memory, gpu_temperature
from trainmaster.core.expect import Expect
from trainmaster.core.results import Verdict
from trainmaster.node.parse import nvidia_smi

REAL = (H200 / "commands" / "nvidia-smi_-q_-x.out").read_text()
EIGHT = [f"0000:{16 + n:02x}:00.0" for n in range(8)]


def test_the_real_one_is_read() -> None:
    smi = nvidia_smi.parse(REAL)
    (gpu,) = smi.gpus
    assert (smi.driver, smi.cuda, smi.attached) == ("580.159.04", "13.0", 1)
    assert (gpu.bus, gpu.name) == ("0000:00:06.0", "NVIDIA H200")
    assert (gpu.memory_total_mib, gpu.memory_used_mib, gpu.temperature_c, gpu.headroom_c) == (143771, 0, 38, 49)


@pytest.mark.parametrize("schema", ["v11", "v12", "v13", "v14"])
def test_schemas_are_read_alike(schema: str) -> None:
    text = REAL.replace("nvsmi_device_v13", f"nvsmi_device_{schema}")
    if schema == "v11":
        text = text.replace("clocks_event_reasons", "clocks_throttle_reasons").replace(
            "<gpu_temp_tlimit>49 C", "<x>49 C"
        )
        text = text.replace("</gpu_temp_tlimit>", "</x>")
        assert nvidia_smi.parse(text).gpus[0].headroom_c is None
    assert nvidia_smi.parse(text).gpus[0].temperature_c == 38


NO_NUMBERS = ["N/A", "[N/A]", "ERR!", "Requested functionality has been deprecated", "Unknown Error", "[Unknown Error]",
              "", "38", "38 F", "GPU is lost", "1e3 C", "٣٨ C"]  # fmt: skip


@pytest.mark.parametrize("word", NO_NUMBERS)
def test_what_is_no_number_is_none_and_kept_as_text(word: str) -> None:
    gpu = nvidia_smi.parse(REAL.replace("<gpu_temp>38 C<", f"<gpu_temp>{word}<")).gpus[0]
    assert gpu.temperature_c is None
    assert gpu.texts["temperature"] == (word or "nothing")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not whole XML"),
        (REAL[:5000], "not whole XML"),
        ("<html/>", "html"),
        ("No devices were found\n", "not whole XML"),
        (REAL.replace("<attached_gpus>1</attached_gpus>", ""), "attached_gpus"),
        (REAL.replace("<attached_gpus>1<", "<attached_gpus>N/A<"), "attached_gpus"),
        (REAL.replace("<attached_gpus>1<", "<attached_gpus>0<"), "lists 1 GPUs but counts 0"),
        (REAL.replace('id="00000000:00:06.0"', ""), "no PCI address"),
        (REAL.replace('id="00000000:00:06.0"', 'id="00000000:00:07.0"'), "a GPU is at"),
        (REAL.replace("<uuid>GPU-00000000-1111-2222-3333-444444444444<", "<uuid>N/A<"), "no uuid"),
        (smi_text([EIGHT[0], EIGHT[0]], attached=2), "same address"),
        (smi_text(EIGHT[:2], attached=2).replace("000000000001<", "000000000000<"), "same uuid"),
        ("<!DOCTYPE x [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><nvidia_smi_log>&a;</nvidia_smi_log>", "entity"),
    ],
)
def test_damage_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        nvidia_smi.parse(text)


def gpus(on_bus: int, listed: list[int], *, attached: int | None = None, granted: int | None = None) -> nvidia.Gpus:
    addresses = [EIGHT[n] for n in listed]
    smi = nvidia_smi.parse(smi_text(addresses, attached=len(listed) if attached is None else attached))
    return nvidia.Gpus(bus=tuple(EIGHT[:on_bus]), devices=(), granted=granted, smi=smi, trouble=None)


def test_the_missing_gpu_keeps_its_number() -> None:
    """nvidia-smi renumbers what is left; the bus does not."""
    slots = nvidia.slots(gpus(8, [0, 1, 2, 4, 5, 6, 7]), 8)
    assert [slot.device for slot in slots] == [f"gpu{n}" for n in range(8)]
    assert [slot.device for slot in slots if slot.gpu is None] == ["gpu3"]
    assert slots[3].bus == EIGHT[3]


def test_a_gpu_that_left_the_bus_is_missing_without_a_name() -> None:
    slots = nvidia.slots(gpus(7, list(range(7))), 8)
    assert [(slot.device, slot.bus) for slot in slots if slot.gpu is None] == [("gpu7", None)]


def test_a_container_sees_the_whole_bus_and_only_its_own_gpus() -> None:
    slots = nvidia.slots(gpus(8, [2, 5]), 2)
    assert [(slot.device, slot.bus) for slot in slots] == [("gpu0", EIGHT[2]), ("gpu1", EIGHT[5])]
    short = nvidia.slots(gpus(8, [2]), 2)  # which of the other seven was ours is not known
    assert [(slot.device, slot.bus) for slot in short] == [("gpu0", EIGHT[2]), ("gpu1", None)]


@pytest.mark.parametrize(
    ("evidence", "stated", "count"),
    [
        (gpus(8, list(range(8))), None, 8),
        (gpus(8, list(range(7))), None, 8),
        (gpus(0, list(range(7)), attached=8), None, 8),
        (gpus(8, [0]), 1, 1),
        (gpus(8, [0], granted=1), None, 1),
        (gpus(8, [0], granted=2), None, 2),
        (gpus(8, list(range(7)), granted=1), None, 8),  # a privileged container: the grant says nothing
    ],
)
def test_how_many_should_be_here(evidence: nvidia.Gpus, stated: int | None, count: int) -> None:
    assert nvidia.expected(evidence, Expect(gpus=stated)) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [(None, None), ("", None), ("all", None), ("void", None), ("0", 1), ("0,1", 2), ("0,0", 1), ("GPU-aa-bb,GPU-cc", 2),
     ("MIG-aa", None), ("0:1", None), ("0,", None)],
)  # fmt: skip
def test_what_a_container_was_granted(text: str | None, count: int | None) -> None:
    assert nvidia._granted(text) == count


def test_only_display_and_3d_controllers_of_nvidia_are_gpus(machine: Machine) -> None:
    devices = {"0000:01:00.0": ("0x10de", "0x030000"), "0000:01:00.1": ("0x10de", "0x040300"),
               "0000:02:00.0": ("0x10de", "0x068000"), "0000:03:00.0": ("0x1002", "0x030000"),
               "0000:04:00.0": ("0x10de", "0x030200")}  # fmt: skip
    machine.answer("list", nvidia.PCI, list(devices))
    for address, (vendor, kind) in devices.items():
        machine.file(f"{nvidia.PCI}/{address}/vendor", vendor + "\n")
        machine.file(f"{nvidia.PCI}/{address}/class", kind + "\n")
    assert nvidia.read(machine.host).bus == ("0000:01:00.0", "0000:04:00.0")


# ── Mutations: whatever happens to the text, a GPU that is not in it never passes. ──

WORDS = ["N/A", "[N/A]", "ERR!", "", "0 MiB", "-1 C", "999999 MiB", "Requested functionality has been deprecated"]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, int]:
    """The XML of an 8-GPU node after GPUs were dropped and text was damaged, and how many GPUs it still holds."""
    kept = draw(st.lists(st.sampled_from(EIGHT), unique=True, max_size=8))
    text = smi_text(kept, attached=draw(st.integers(0, 9)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(text)))
        match draw(st.sampled_from(["cut", "word", "swap", "double"])):
            case "cut":
                text = text[:at] + text[at + draw(st.integers(1, 400)) :]
            case "word":
                start, end = text.find(">", at) + 1, text.find("<", text.find(">", at) + 1)
                text = text[:start] + draw(st.sampled_from(WORDS)) + text[end:] if 0 < start < end else text
            case "swap":
                text = text[:at] + draw(st.sampled_from("<>/0x\x00é")) + text[at + 1 :]
            case "double":
                start, end = text.find("\t<gpu id=", at), text.find("</gpu>\n", at)
                text = text[: end + 7] + text[start : end + 7] + text[end + 7 :] if 0 < start < end else text
    return text, len(kept)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(damaged(), st.sampled_from([None, 8]))
def test_a_gpu_that_is_not_there_never_passes(case: tuple[str, int], stated: int | None) -> None:
    text, present = case
    try:
        smi, trouble = nvidia_smi.parse(text), None
    except ValueError as error:
        smi, trouble = None, str(error)
    evidence = nvidia.Gpus(bus=tuple(EIGHT), devices=(), granted=None, smi=smi, trouble=trouble)
    for check in (gpu_count, gpu_memory, gpu_temperature):
        found = check.judge(evidence, Expect(gpus=stated))
        passed = [finding.device for finding in found if finding.verdict is Verdict.PASS and finding.device]
        assert len(set(passed)) == len(passed) <= present
        whole = all(finding.verdict is Verdict.PASS for finding in found)
        assert not (whole and present < 8)
        if smi is not None:  # every place is spoken of
            assert len({finding.device for finding in found if finding.device}) == max(
                8, smi.attached if stated is None else 8
            )


@pytest.mark.parametrize(
    ("vendor", "kind", "name"),
    [
        ("0x1002", "0x120000", "8 AMD"),
        ("0x1002", "0x038000", "8 AMD"),
        ("0x1002", "0x030000", "8 AMD"),
        ("0x1da3", "0x120000", "8 Intel Gaudi"),
        ("0x1d0f", "0x088000", "8 AWS Trainium"),
        ("0x17cb", "0x120000", "8 Qualcomm"),
        ("0x1d0f", "0x020000", None),  # the network adapter of the same maker
        ("0x8086", "0x030000", None),  # the graphics of a CPU
    ],
)
def test_accelerators_of_other_makers_are_named_and_never_pass(
    machine: Machine, vendor: str, kind: str, name: str | None
) -> None:
    machine.no_gpus()
    machine.answer("list", PCI, EIGHT)
    for address in EIGHT:
        machine.file(f"{PCI}/{address}/vendor", f"{vendor}\n")
        machine.file(f"{PCI}/{address}/class", f"{kind}\n")
    for check in ("gpu_count", "gpu_ecc", "xid"):
        finding = machine.judge(check)[0]
        if name is None and check == "xid":  # its log is judged without a GPU too
            assert finding.verdict == "pass"
            continue
        assert finding.verdict == ("skip" if name is None else "error")
        assert (name or "no NVIDIA GPU") in finding.reason


def test_an_accelerator_in_dev_alone_is_named(machine: Machine) -> None:
    machine.no_gpus()
    machine.file(f"{PCI}/0000:00:00.0/vendor", "0x8086\n")
    machine.answer("list", "/dev", ["null", *(f"neuron{n}" for n in range(16))])
    (finding,) = machine.judge("gpu_count")
    assert finding.verdict == "error"
    assert "16 AWS Trainium" in finding.reason


def test_accelerators_of_another_maker_beside_gpus_are_named(machine: Machine) -> None:
    machine.gpus(2)
    for number, kind in enumerate(("0x120000", "0x038000", "0x030000")):  # the last is the screen of a processor
        address = f"0000:c{number}:00.0"
        machine.answer("list", nvidia.PCI, [*machine.host.list(nvidia.PCI), address])
        machine.file(f"{nvidia.PCI}/{address}/vendor", "0x1002\n")
        machine.file(f"{nvidia.PCI}/{address}/class", f"{kind}\n")
    for stated, verdict in ((None, "error"), (2, "warn")):
        (named,) = [one for one in machine.judge("gpu_count", gpus=stated) if "no check supports" in one.reason]
        assert (named.verdict, "2 AMD" in named.reason) == (verdict, True)
