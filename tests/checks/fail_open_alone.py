"""Values of one GPU without peers, sources that contradict each other, and kernel messages: one change each."""

from __future__ import annotations

from collections.abc import Callable

from fail_open_cases import Case
from gpu_faults import kernel, make
from nodes import IB, ibstat_text, infiniband, put

from machines import Machine

LINK = "pci/pci_gpu_link_info"
SPENT = "clocks_event_reasons_counters/clocks_event_reasons_counters_hw_power_brake"


def alone(changes: dict[str, str | None]) -> Callable[[Machine], None]:
    """One GPU: no equal one shows what it should report."""

    def change(machine: Machine) -> None:
        make(machine, 1)
        machine.edit(0, changes)

    return change


def lines(text: str, times: int = 1) -> Callable[[Machine], None]:
    def change(machine: Machine) -> None:
        make(machine)
        kernel(text, times=times)(machine)

    return change


def ibstat(old: str, new: str, *, count: int = 1) -> Callable[[Machine], None]:
    """A node of eight ports whose ibstat contradicts /sys."""

    def change(machine: Machine) -> None:
        make(machine)
        infiniband(machine)
        text = "".join(ibstat_text(f"mlx5_{number}") for number in range(8))
        assert old in text
        machine.command("ibstat", text.replace(old, new, count))

    return change


def old_rates(machine: Machine) -> None:
    """SDR: 2.5 Gb/s a lane, of which ibstat prints the whole part."""
    infiniband(machine)
    put(machine, files={f"{IB}/mlx5_{number}/ports/1/rate": "2.5 Gb/sec (4X SDR)\n" for number in range(8)})
    text = "".join(ibstat_text(f"mlx5_{number}") for number in range(8))
    machine.command("ibstat", text.replace("Rate: 400", "Rate: 2"))


CASES = (
    Case(name="5 ibstat shows a lower rate than /sys", check="ib_ports", before="PASS", after="FAIL",
         put=ibstat("Rate: 400", "Rate: 100")),
    Case(name="5 ibstat shows a lower rate of all ports", check="ib_ports", before="PASS", after="INCOMPLETE",
         put=ibstat("Rate: 400", "Rate: 100", count=8)),
    Case(name="5 ibstat shows a lower rate, eight ports expected", check="ib_ports", before="PASS", after="FAIL",
         expect=("ib_ports=8",), put=ibstat("Rate: 400", "Rate: 100")),
    Case(name="5 ibstat shows another link layer than /sys", check="ib_ports", before="PASS", after="INCOMPLETE",
         put=ibstat("Link layer: InfiniBand", "Link layer: Ethernet")),
    Case(name="5 no fault: ibstat prints whole Gb/s of 2.5", check="ib_ports", before="PASS", after="PASS",
         put=old_rates),
    Case(name="7 one GPU: a negative error counter", check="gpu_ecc", before="PASS", after="INCOMPLETE",
         put=alone({"ecc_errors/volatile/dram_correctable": "-99999"})),
    Case(name="7 one GPU: negative PCIe replays", check="gpu_pcie", before="PASS", after="INCOMPLETE",
         put=alone({"pci/replay_counter": "-99999"})),
    Case(name="7 one GPU: a negative number of remapped rows", check="gpu_remap", before="PASS", after="INCOMPLETE",
         put=alone({"remapped_rows/remapped_row_unc": "-512"})),
    Case(name="7 one GPU: a higher PCIe generation than it has", check="gpu_pcie", before="PASS", after="INCOMPLETE",
         put=alone({f"{LINK}/pcie_gen/current_link_gen": "99"})),
    Case(name="7 one GPU: no lifetime count of uncorrectable errors", check="gpu_ecc", before="PASS",
         after="INCOMPLETE", put=alone({"ecc_errors/aggregate/dram_uncorrectable": None})),
    Case(name="7 one GPU: half of the SRAM counters absent", check="gpu_ecc", before="PASS", after="INCOMPLETE",
         put=alone({"ecc_errors/volatile/sram_uncorrectable_secded": None})),
    Case(name="7 one GPU: the SRAM threshold flag absent", check="gpu_ecc", before="PASS", after="INCOMPLETE",
         put=alone({"ecc_errors/aggregate/sram_threshold_exceeded": None})),
    Case(name="7 one GPU: a pending-repair flag absent", check="gpu_ecc", before="PASS", after="INCOMPLETE",
         put=alone({"ecc_errors/channel_repair_pending": None})),
    Case(name="7 one GPU: a throttle counter absent", check="gpu_throttle", before="PASS", after="INCOMPLETE",
         put=alone({SPENT: None})),
    Case(name="7 one GPU: no recovery action with driver 580", check="gpu_recovery,gpu_count", before="PASS",
         after="INCOMPLETE", put=alone({"gpu_recovery_action": None})),
    Case(name="7 one GPU: no count of banks without spare rows", check="gpu_remap", before="PASS", after="INCOMPLETE",
         put=alone({"remapped_rows/row_remapper_histogram/row_remapper_histogram_none": None})),
    Case(name="7 one GPU: a low clock without the default beside it", check="gpu_clocks", before="PASS",
         after="INCOMPLETE", put=alone({"applications_clocks/graphics_clock": "345 MHz",
                                        "default_applications_clocks/graphics_clock": None})),
    Case(name="4 a call of the driver reports a lost GPU", check="xid", before="PASS", after="FAIL",
         put=lines("NVRM: nvCheckOkFailedNoLog: Check failed: GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0xF)")),
    Case(name="4 a GPU without its power cables", check="xid", before="PASS", after="FAIL",
         put=lines("NVRM: GPU 0000:13:00.0: GPU does not have the necessary power cables connected.")),
    Case(name="4 a crash report of the GSP firmware", check="xid", before="PASS", after="FAIL",
         put=lines("NVRM: ******************** GSP-CrashCat Report ********************")),
    Case(name="4 CPUs slowed down by heat", check="xid", before="PASS", after="WARN",
         put=lines("mce: CPU12: Core temperature is above threshold, cpu clock is throttled (total events = 9)", 40)),
)  # fmt: skip
