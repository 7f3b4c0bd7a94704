"""`nvidia-smi -q` as text gives the same values as its XML, and damage in it is refused."""

from __future__ import annotations

import pytest

from trainmaster.node.parse import ParseError, nvidia_smi

GPU = """\
GPU 00000000:{bus}:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Persistence Mode                      : Enabled
    MIG Mode
        Current                           : Disabled
        Pending                           : Disabled
    GPU UUID                              : GPU-00000000-1111-2222-3333-0000000000{bus}
    PCI
        Bus                               : 0x{bus}
        Bus Id                            : 00000000:{bus}:00.0
        GPU Link Info
            PCIe Generation
                Max                       : 5
                Current                   : 5
            Link Width
                Max                       : 16x
                Current                   : 8x
    Clocks Event Reasons
        Idle                              : Active
        HW Slowdown                       : Not Active
    FB Memory Usage
        Total                             : 81559 MiB
        Reserved                          : 551 MiB
        Used                              : 4 MiB
    ECC Mode
        Current                           : Enabled
        Pending                           : Enabled
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 2
        Pending                           : Yes
        Remapping Failure Occurred        : No
    Temperature
        GPU Current Temp                  : 38 C
        GPU T.Limit Temp                  : N/A
    Fabric
        State                             : Completed
        Status                            : Success
"""
TEXT = """
==============NVSMI LOG==============

Timestamp                                 : Sat Nov 14 23:59:36 2026
Driver Version                            : 570.133.20
CUDA Version                              : 12.8

Attached GPUs                             : 2
""" + GPU.format(bus="18") + GPU.format(bus="2a")  # fmt: skip


def test_the_text_gives_what_the_xml_gives() -> None:
    smi = nvidia_smi.parse(TEXT)
    assert (smi.driver, smi.cuda, smi.attached, len(smi.gpus), smi.remarks) == ("570.133.20", "12.8", 2, 2, ())
    gpu = smi.gpus[1]
    assert (gpu.bus, gpu.name) == ("0000:2a:00.0", "NVIDIA H100 80GB HBM3")
    assert (gpu.memory_total_mib, gpu.temperature_c, gpu.headroom_c) == (81559, 38, None)
    for path, value in {
        "ecc_mode/current_ecc": "Enabled",
        "mig_mode/current_mig": "Disabled",
        "pci/pci_gpu_link_info/pcie_gen/max_link_gen": "5",
        "pci/pci_gpu_link_info/link_widths/current_link_width": "8x",
        "remapped_rows/remapped_row_unc": "2",
        "remapped_rows/remapped_row_pending": "Yes",
        "clocks_event_reasons/clocks_event_reason_gpu_idle": "Active",
        "fabric/state": "Completed",
    }.items():
        assert gpu.leaves[path] == value


def test_a_warning_between_the_values_is_kept() -> None:
    smi = nvidia_smi.parse(TEXT + "WARNING: infoROM is corrupted at gpu 0000:18:00.0\n")
    assert smi.broken_inforom == ("0000:18:00.0",)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Attached GPUs                             : 2", ""),
        ("Attached GPUs                             : 2", "Attached GPUs                             : 1"),
        ("GPU 00000000:2a:00.0", "GPU 00000000:18:00.0"),
        ("    GPU UUID                              : GPU-00000000-1111-2222-3333-000000000018\n", ""),
    ],
)
def test_a_text_that_contradicts_itself_is_refused(old: str, new: str) -> None:
    assert old in TEXT
    with pytest.raises(ParseError):
        nvidia_smi.parse(TEXT.replace(old, new, 1))


def test_a_text_that_was_cut_off_counts_a_gpu_that_is_not_listed() -> None:
    smi = nvidia_smi.parse(TEXT[: TEXT.index("GPU 00000000:2a")])
    assert (smi.attached, len(smi.gpus)) == (2, 1)
