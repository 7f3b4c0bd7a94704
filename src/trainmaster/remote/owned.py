"""Processes of attempts on this machine, found by the mark in their environment (core/plan.py), without a database."""

from __future__ import annotations

from pathlib import Path

from trainmaster.core.plan import ATTEMPT_VARIABLE, EVENTS_VARIABLE, PLAN_FILE

_PROC = Path("/proc")


def find(proc: Path = _PROC) -> dict[str, tuple[str | None, list[int]]]:
    """Each attempt with its folder, if known from its processes, and its processes."""
    attempts: dict[str, tuple[str | None, list[int]]] = {}
    for entry in sorted(proc.iterdir() if proc.is_dir() else (), key=lambda entry: entry.name):
        if not entry.name.isdecimal():
            continue
        try:
            environment = _pairs((entry / "environ").read_bytes())
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:  # gone, or another user's
            continue
        attempt = environment.get(ATTEMPT_VARIABLE, "").partition("/")[0]
        if attempt:
            folder, processes = attempts.get(attempt, (None, []))
            attempts[attempt] = folder or _folder(environment, command), [*processes, int(entry.name)]
    return attempts


def _pairs(block: bytes) -> dict[str, str]:
    pairs = (item.decode(errors="replace").partition("=") for item in block.split(b"\0"))
    return {name: value for name, mark, value in pairs if mark}


def _folder(environment: dict[str, str], command: list[bytes]) -> str | None:
    """The attempt's folder, from a rank's event file or the agent's plan."""
    if (events := environment.get(EVENTS_VARIABLE)) and Path(events).is_absolute():
        return str(Path(events).parent)
    plans = [word.decode(errors="replace") for word in command if word.endswith(f"/{PLAN_FILE}".encode())]
    return str(Path(plans[0]).parent) if plans else None
