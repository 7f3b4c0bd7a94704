"""Events on the terminal: one line each, without nested values."""

from __future__ import annotations

from typing import Any

import pytest

from trainmaster.cli.jobs.events import describe


def finding(verdict: str, reason: str, device: str | None = None) -> dict[str, Any]:
    return {"verdict": verdict, "reason": reason, "device": device, "values": {"a": 1}}


@pytest.mark.parametrize(
    ("phase", "event", "data", "line"),
    [
        (
            "PREFLIGHT",
            "check",
            {"check": "cpu", "verdict": "pass", "took_s": 0.1, "findings": [finding("pass", "2 CPUs usable")]},
            "PREFLIGHT cpu pass: 2 CPUs usable",
        ),
        (
            "PREFLIGHT",
            "check",
            {
                "check": "gpu_ecc",
                "verdict": "fail",
                "findings": [
                    finding("pass", "fine", "gpu0"),
                    *[finding("fail", "2 errors", f"gpu{i}") for i in (1, 2)],
                ],
            },
            "PREFLIGHT gpu_ecc gpu1 fail: 2 errors (and 1 more)",
        ),
        (
            "PROJECT",
            "end",
            {"ok": True, "reason": None, "message": "every rank exited with 0", "time_taken": 1.478391021999414},
            "PROJECT end ok=True time_taken=1.4784: every rank exited with 0",
        ),
        (
            "STEP",
            "metrics",
            {"step": 7, "loss": 2.5, "peers": [1, 2], "more": {"x": 1}},
            "STEP metrics step=7 loss=2.5",
        ),
        ("PREFLIGHT", "check", {"check": "cpu", "findings": "?"}, "PREFLIGHT check check=cpu findings=?"),
    ],
)
def test_an_event_is_one_readable_line(phase: str, event: str, data: dict[str, Any], line: str) -> None:
    assert describe(phase, event, data) == line
