"""XID, SXID and OOM lines in every form, counted without being kept; the catalog is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.node.parse import ParseError, kernel_log, xid_catalog
from trainmaster.node.parse.kernel_log import Sxid, Xid

SAMPLES = Path(__file__).parent / "samples"
CATALOG = xid_catalog.load()


def one(line: str) -> Xid:
    (xid,) = kernel_log.parse(line + "\n").xids
    return xid


def test_the_whole_sample() -> None:
    log = kernel_log.parse((SAMPLES / "kernel-log.txt").read_text())
    assert [(xid.device, xid.code, xid.count) for xid in log.xids] == [
        ("0000:3b:00", 79, 1),
        ("0000:86:00", 63, 1),
        ("0000:86:00", 94, 1),
        ("0018:01:00", 149, 1),
        ("0018:01:00", 154, 1),
    ]
    assert [(sxid.device, sxid.code, sxid.fatal, sxid.link) for sxid in log.sxids] == [
        ("0000:c1:00", 28006, False, 46),
        ("0000:c2:00", 20034, True, 30),
    ]
    assert log.recovery == (("0018:01:00", "Node Reboot Required"),)
    assert [(kill.process, kill.cgroup, kill.count) for kill in log.oom_kills] == [("python", True, 1)]
    assert (log.oom_events, log.faults, log.lines) == (1, (), 15)


@pytest.mark.parametrize(
    ("line", "time"),
    [
        ("[  123.456789] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "123.456789"),
        ("[Tue Mar  3 12:00:03 2026] NVRM: Xid (PCI:0000:3B:00): 79, x", "Tue Mar  3 12:00:03 2026"),
        (
            "2026-03-03T12:00:02,123456+00:00 NVRM: Xid (PCI:00000000:3b:00.0): 79, x",
            "2026-03-03T12:00:02,123456+00:00",
        ),
        ("Mar  3 12:00:01 node7 kernel: [ 9.5] NVRM: Xid (0000:3b:00): 79, x", "Mar  3 12:00:01"),
        ("4,1234,9300567890,-;NVRM: Xid (PCI:0000:3b:00): 79, x", "9300.567890"),
        ("<4>[    7.000000] NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 79, x", "7.000000"),
        ("NVRM: Xid (PCI:0000:3b:00): 79", None),
    ],
)
def test_every_form_of_time_and_address(line: str, time: str | None) -> None:
    xid = one(line)
    assert (xid.device, xid.code, xid.first) == ("0000:3b:00", 79, time)


def test_pid_and_name_are_read_where_they_are() -> None:
    xid = one("NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=python, Ch 00000008")
    assert (xid.pid, xid.process, xid.text) == (1234, "python", "Ch 00000008")
    xid = one("NVRM: Xid (PCI:0000:3b:00): 45, pid='<unknown>', name=<unknown>, Ch 00000008")
    assert (xid.pid, xid.process, xid.text) == (None, None, "Ch 00000008")


@pytest.mark.slow
def test_200_thousand_lines_are_counted_and_not_kept() -> None:
    lines = (
        f"[{n}.5] NVRM: Xid (PCI:0000:{n % 29:02x}:00): 95, pid=7, name=python, Uncontained" for n in range(200_000)
    )
    log = kernel_log.parse_lines(lines)
    assert len(log.xids) == 29
    assert sum(xid.count for xid in log.xids) == log.lines == 200_000
    assert log.xids[0].first == "0.5" and log.xids[-1].last is not None


def test_more_kinds_of_events_than_are_kept_are_a_fault() -> None:
    lines = (f"NVRM: Xid (PCI:{n:04x}:01:00): 79, x" for n in range(10_100))
    log = kernel_log.parse_lines(lines)
    assert len(log.xids) == 10_000
    assert any("100 lines beyond" in fault for fault in log.faults)


def test_a_line_about_an_xid_that_cannot_be_read_is_a_fault() -> None:
    log = kernel_log.parse("[1.0] NVRM: Xid (PCI:0000:3b:00): seventy-nine\n")
    assert log.xids == () and len(log.faults) == 1


def test_a_gpu_that_fell_off_the_bus_without_a_code_is_79() -> None:
    xid = one("[1.0] NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.")
    assert (xid.device, xid.code, xid.implied) == ("0000:18:00", 79, True)


def test_nvlink_5_lines_are_decoded() -> None:
    fatal = one("NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x0)")
    assert fatal.nvlink is not None
    assert (fatal.nvlink.unit, fatal.nvlink.link, fatal.nvlink.reason) == ("NETIR_LINK_EVT", 8, 4)
    assert CATALOG.of_xid(fatal).severity == "fail"
    mild = one("NVRM: Xid (PCI:0018:01:00): 145, pid=1, name=a, RLW_SRC_TRACK Nonfatal XC1 i0 Link -1 (0x1 0x2)")
    assert mild.nvlink is not None and mild.nvlink.link is None
    assert CATALOG.of_xid(mild).severity == "info"  # NVIDIA: ignore, and nothing to investigate
    torn = one("NVRM: Xid (PCI:0018:01:00): 149, NETIR_LI")
    assert torn.nvlink is None and CATALOG.of_xid(torn).severity == "fail"


@pytest.mark.parametrize(
    ("code", "unit", "words", "severity", "action"),
    [
        (144, "SAW_MVB Nonfatal", "0x1 0x4", "info", "nothing to do"),
        (144, "SAW_MVB Nonfatal", "0x1 0x1", "warn", "nothing to do now"),
        (144, "SAW_MVB Nonfatal", "0x1 0x5", "warn", "nothing to do now"),  # two bits: the graver one
        (144, "SAW_MVB Fatal", "0x1 0x2", "fail", "reset"),
        (145, "RLW_CTRL Nonfatal", "0x3 0x80000000", "warn", "nothing to do now"),
        (145, "RLW_REMAP Nonfatal", "0x4 0x8", "warn", "Xid 154"),
        (145, "RLW_REMAP Nonfatal", "0x4 0x48", "fail", "reset"),
        (145, "RLW_REMAP Fatal", "0x4 0x100", "fail", "reset"),  # the driver's word is graver than the table
        (146, "TLW_RX/TLW_RX_PIPE0 Nonfatal", "0xa 0x1", "info", "nothing to do"),
        (146, "TLW_TX_PIPE1 Nonfatal", "0xd 0x2", "warn", "nothing to do now"),
        (147, "TREX Nonfatal", "0xe 0x1", "warn", "nothing to do now"),
        (148, "NVLPW_CTRL Nonfatal", "0xf 0x80000000", "warn", "nothing to do now"),
        (149, "NETIR_BER_EVENT Nonfatal", "0x13 0x2", "warn", "cable"),
        (149, "NETIR_MFDE_EVENT Nonfatal", "0x14 0x3", "info", "nothing to do"),
        (149, "NETIR_LINK_EVT Fatal", "0x004505c6 0x0", "fail", "reset"),
        (149, "NETIR_LINK_EVT Fatal", "0x02600011 0x0", "warn", "took the link down"),
        (150, "MSE_WATCHDOG Fatal", "0x0 0x0", "fail", "reset"),
        (147, "NEW_UNIT Nonfatal", "0x0 0x1", "warn", "nothing to do now"),
        (147, "NEW_UNIT Fatal", "0x0 0x1", "fail", "reset"),
    ],
)
def test_nvlink_5_asks_for_what_nvidias_catalog_says(
    code: int, unit: str, words: str, severity: str, action: str
) -> None:
    row = CATALOG.of_xid(one(f"NVRM: Xid (PCI:0018:01:00): {code}, {unit} XC0 i0 Link 08 ({words} 0x0 0x0)"))
    assert (row.severity, action in row.action) == (severity, True), row.action


def test_a_grave_error_of_a_link_is_not_counted_with_a_mild_one() -> None:
    lines = [f"NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 ({intr} 0x0)\n"
             for intr in ("0x02600011", "0x00450011")]  # fmt: skip
    log = kernel_log.parse("".join(lines))
    assert [CATALOG.of_xid(xid).severity for xid in log.xids] == ["warn", "fail"]


def test_no_action_is_graver_than_its_severity() -> None:
    """Who is told to take work from a GPU has a FAIL, and who has a FAIL is told more than to look."""
    grave = ("drain", "take the node out", "power", "reboot", "restart the virtual machine", "reset the GPU and",
             "read the action", "reset every", "reset the GPUs", "check the cooling")  # fmt: skip
    for code, row in CATALOG.xids.items():
        idle = "when it is next idle" in row.action
        assert (row.severity == "fail") == (row.action.startswith(grave) and not idle), (code, row)
    assert {code: CATALOG.xids[code].severity for code in (122, 123, 124, 125, 156)} == dict.fromkeys(
        (122, 123, 124, 125, 156), "fail"
    )


@pytest.mark.parametrize(
    ("to", "severity", "action"),
    [
        ("0x0 (None)", "info", "nothing"),
        ("0x1 (GPU Reset Required)", "fail", "reset the GPU"),
        ("0x2 (Node Reboot Required)", "fail", "reboot"),
        ("0x2 (OS Reboot)", "fail", "reboot"),
        ("0x4 (Drain and Reset)", "fail", "drain"),
        ("0x9 (Sacrifice a Goat)", "fail", "Goat"),
    ],
)
def test_a_recovery_action_says_what_to_do(to: str, severity: str, action: str) -> None:
    line = "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to "
    row = CATALOG.of_xid(one(line + to))
    assert row.severity == severity and action in row.action


def test_the_last_recovery_action_of_a_gpu_stands() -> None:
    line = "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to "
    log = kernel_log.parse(
        f"{line}0x1 (GPU Reset Required)\n{line}0x0 (None)\n{line}0x1 (GPU Reset Required)\n{line}0x0 (None)\n"
    )
    assert log.recovery == (("0000:3b:00", "None"),)


def test_the_catalog_holds_every_code_that_matters() -> None:
    codes = [8, 13, 31, 32, 38, 43, 45, 46, 48, *range(56, 66), 68, 69, 74, 79, *range(92, 96), 109, 110]
    codes += [*range(119, 124), 136, 137, 140, *range(143, 152), *range(154, 159), 171, 172]
    assert [code for code in codes if code not in CATALOG.xids] == []
    for row in [*CATALOG.xids.values(), *CATALOG.sxids.values()]:
        assert row.meaning and row.action and row.source.startswith("NVIDIA")
    assert {code: CATALOG.xids[code].severity for code in (43, 63, 48, 79, 95)} == {
        43: "info",
        63: "warn",
        48: "fail",
        79: "fail",
        95: "fail",
    }


def test_an_unknown_code_is_a_warning() -> None:
    assert CATALOG.of_xid(one("NVRM: Xid (PCI:0000:3b:00): 9999, x")).severity == "warn"
    sxid = Sxid(device="0000:c1:00", code=99999, count=1, first=None, last=None, text="", fatal=None, link=None)
    assert "unknown" in CATALOG.of_sxid(sxid).meaning


def test_a_fatal_sxid_fails_whatever_its_code() -> None:
    sxid = Sxid(device="0000:c1:00", code=11012, count=1, first=None, last=None, text="", fatal=True, link=1)
    assert CATALOG.of_sxid(sxid).severity == "fail"


def test_a_site_lays_its_own_rows_over_ours() -> None:
    ours = '[xid]\n31 = { meaning = "m", severity = "fail", action = "a", source = "site" }\n'
    merged = CATALOG.overlay(xid_catalog.parse(ours))
    assert merged.xids[31].severity == "fail" and merged.xids[79] == CATALOG.xids[79]


@pytest.mark.parametrize(
    "text",
    [
        "[xid",
        "x = 1",
        "[xid]\n79 = 1",
        "[xid]\nabc = {}",
        '[xid]\n79 = { meaning = "m", severity = "bad", action = "a", source = "s" }',
        '[xid]\n79 = { meaning = "m", severity = "fail" }',
        "xid = 3",
    ],
)
def test_a_wrong_catalog_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        xid_catalog.parse(text)


XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


@pytest.mark.parametrize(
    "line",
    [
        f"[  123.456789] systemd[1]: monitor.service: {XID}",
        f"[  123.456789] n7 systemd[1]: monitor.service: {XID}",
        f"[  123.456789] n7 unknown: {XID}",
        f"[Tue Mar  3 12:00:03 2026] agent[77]: {XID}",
        f"Mar  3 12:00:01 n7 agent: {XID}",
        f"Mar  3 12:00:01 n7 agent[77]: saw [ 9.5] {XID}",
        f"2026-03-03T12:00:02.123456+00:00 n7 dcgm-exporter[9]: {XID}",
        f"12,1234,9300567890,-;{XID}",
        f"<14>[  123.456789] {XID}",
        f"user  :notice: [  123.456789] {XID}",
        f'[  123.456789] audit: type=1400 audit(1.2:3): comm="{XID}"',
        f'[    0.000000] Command line: BOOT_IMAGE=/vmlinuz note="{XID}"',
        "[  123.456789] agent[77]: nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM",
        "[  123.456789] agent[77]: EXT4-fs (sda1): Remounting filesystem read-only",
        "[  123.456789] agent[77]: NVRM: The NVIDIA GPU 0000:b3:00.0 has fallen off the bus",
        "[  123.456789] agent[77]: Out of memory: Killed process 12 (python) total-vm:1kB",
        "[  123.456789] agent[77]: nvidia 0000:3b:00.0: resetting",
    ],
)
def test_a_program_that_quotes_the_kernel_accuses_nobody(line: str) -> None:
    log = kernel_log.parse(f"{line}\n")
    assert (log.xids, log.sxids, log.events, log.oom_events, log.resets, log.faults) == ((), (), (), 0, (), ())


@pytest.mark.parametrize(
    "line",
    [
        f"kern  :warn  : [  123.456789] {XID}",
        f"[  123.456789][ T1234] {XID}",
        f"[  123.456789] n7 kernel: {XID}",
        f"2026-03-03T12:00:02.123456+00:00 n7 kernel: [  9.500000] {XID}",
        f"[  123.456789] usb 1-1: new high-sp[  123.456790] {XID}",
    ],
)
def test_the_kernels_own_line_counts_in_every_form(line: str) -> None:
    assert (one(line).device, one(line).code) == ("0000:3b:00", 79)


def test_an_xid_inside_a_line_without_a_sender_is_not_judged_and_not_lost() -> None:
    log = kernel_log.parse(f"[1.0] monitor: {XID}\n")
    assert log.xids == () and "cannot be parsed" in log.faults[0]
