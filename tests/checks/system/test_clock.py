"""A clock passes only if something steers it; an offset that was asked for must be shown."""

from __future__ import annotations

import pytest

from machines import Machine
from trainmaster.checks.system.clock import parse_chronyc, parse_ntpq, parse_timedatectl

CHRONYC = "A9FEA97B,169.254.169.123,4,1767323045.1,{offset},0.1,0.1,-5.2,0.0,0.01,0.0003,0.0002,16.2,{leap}\n"
STEERED = {"synchronised": True, "max_error_s": 0.02}
LOOSE = {"synchronised": False, "max_error_s": 16.0}


@pytest.mark.parametrize(
    ("kernel", "chronyc", "limit", "verdict"),
    [
        (STEERED, None, None, "pass"),
        (STEERED, None, 0.05, "pass"),  # the kernel's bound proves it
        (STEERED, None, 0.01, "error"),  # nothing shows it
        (LOOSE, None, None, "skip"),
        (LOOSE, None, 1.0, "error"),
        (STEERED, ("0.000004", "Normal"), 0.01, "pass"),
        (STEERED, ("-2.5", "Normal"), 0.01, "fail"),
        (STEERED, ("-2.5", "Normal"), None, "warn"),
        (STEERED, ("400.0", "Normal"), None, "fail"),
        (STEERED, ("0.04", "Normal"), None, "pass"),
        (LOOSE, ("0.000004", "Normal"), None, "pass"),
        (LOOSE, ("0.0", "Not synchronised"), None, "warn"),
        (LOOSE, ("0.0", "Not synchronised"), 1.0, "fail"),
    ],
)
def test_clock(
    machine: Machine, kernel: dict[str, object], chronyc: tuple[str, str] | None, limit: float | None, verdict: str
) -> None:
    machine.answer("clock", "", kernel)
    if chronyc is not None:
        machine.command("chronyc -c tracking", CHRONYC.format(offset=chronyc[0], leap=chronyc[1]))
    assert machine.verdicts("clock", clock_offset_s=limit) == {None: verdict}


def test_a_kernel_that_does_not_tell_leaves_it_to_the_service(machine: Machine) -> None:
    machine.answer("clock", "", {"error": "HostError", "message": "Operation not permitted"})
    assert machine.verdicts("clock") == {None: "error"}
    machine.command("timedatectl show", "Timezone=UTC\nNTPSynchronized=yes\n")
    assert machine.verdicts("clock") == {None: "pass"}
    assert machine.verdicts("clock", clock_offset_s=1.0) == {None: "error"}
    machine.command("timedatectl show", "Timezone=UTC\nNTPSynchronized=no\n")
    assert machine.verdicts("clock") == {None: "warn"}


def test_a_tool_without_its_service_is_no_answer(machine: Machine) -> None:
    machine.answer("clock", "", LOOSE)
    machine.command("chronyc -c tracking", "506 Cannot talk to daemon\n", exit_code=1)
    machine.command("timedatectl show", "", exit_code=1, stderr="System has not been booted with systemd")
    assert machine.verdicts("clock") == {None: "skip"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (CHRONYC.format(offset="-0.000012", leap="Normal"), (True, -0.000012)),
        (CHRONYC.format(offset="1e-6", leap="Insert second"), (True, 1e-6)),
        (CHRONYC.format(offset="0", leap="Not synchronised"), (False, None)),
        (CHRONYC.format(offset="nan", leap="Normal"), None),
        (CHRONYC.format(offset="0", leap="Fine"), None),
        ("", None),
        ("506 Cannot talk to daemon", None),
    ],
)
def test_chronyc(text: str, told: object) -> None:
    assert parse_chronyc(text) == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "associd=0 status=0615 leap_none,\nstratum=3, precision=-24, rootdelay=1.1,\noffset=-0.250, x=1\n",
            (True, -0.00025),
        ),
        ("associd=0 status=c016 leap_alarm,\nstratum=16, offset=0.000,\n", (False, None)),
        ("stratum=2,\n", (True, None)),
        ("ntpq: read: Connection refused", None),
    ],
)
def test_ntpq(text: str, told: object) -> None:
    assert parse_ntpq(text) == told


@pytest.mark.parametrize(
    ("text", "told"),
    [("NTPSynchronized=yes\n", (True, None)), ("NTPSynchronized=no\n", (False, None)), ("NTP=yes\n", None), ("", None)],
)
def test_timedatectl(text: str, told: object) -> None:
    assert parse_timedatectl(text) == told
