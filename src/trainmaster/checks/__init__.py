"""Health checks. One file per check; the folder is the registry, and this is the contract and the runner.

A check is a module with

    LEVEL: int                                             1 passive (seconds), 2 uses the GPU, 3 stress
    TIMEOUT_S: float                                       optional; the runner cuts it off then
    def read(host: Host) -> Data                           asks the machine, and only through `host`
    def judge(data: Data, expect: Expect) -> Finding | list[Finding]          pure

The runner owns the rest. Whatever a check does (raise, hang, return rubbish), it yields findings, because a check that
says nothing was not measured, and not measured is never a pass.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from trainmaster.core.errors import CommandMissing, CommandTimedOut, HostError, NotCaptured, UsageError
from trainmaster.core.expect import Expect
from trainmaster.core.results import CheckResult, Finding, Verdict, error
from trainmaster.node.host import Host, Snapshot

LEVELS = (1, 2, 3)
FOLDERS = ("gpu", "active", "fabric", "system")
TIMEOUT_S = 60.0  # of a check that states none; above the 30 s a command may take, so that its own error is told


class Check(Protocol):
    """What a module of this folder offers."""

    LEVEL: int

    def read(self, host: Host) -> Any: ...

    def judge(self, data: Any, expect: Expect) -> Finding | list[Finding]: ...


def names() -> list[str]:
    """Every check there is: the modules of the four folders whose name has no leading underscore."""
    return sorted(_folders())


def load(name: str) -> Check:
    """The check of that name."""
    return cast(Check, importlib.import_module(f"{__name__}.{_folders()[name]}.{name}"))


def _folders() -> dict[str, str]:
    """The folder of each check."""
    return {
        module.name: folder
        for folder in FOLDERS
        for module in pkgutil.iter_modules([f"{place}/{folder}" for place in __path__])
        if not module.name.startswith("_")
    }


def plan(level: int, only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[str]:
    """The names that `run` will report on, in order. Level 0 is none."""
    known = names()
    for word in (*only, *skip):
        if word not in known:
            close = difflib.get_close_matches(word, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise UsageError(f"there is no check {word}; {hint}")
    wanted = [name for name in known if (not only or name in only) and name not in skip]
    above = [name for name in wanted if _level_of(name) > level]
    if only and above:
        raise UsageError(f"{above[0]} needs --level {_level_of(above[0])}; this is level {level}")
    planned = [name for name in wanted if name not in above]
    if level and not planned:
        raise UsageError("nothing is left to check; skip less, or use level 0 to check nothing on purpose")
    return planned


def run(
    host: Host,
    expect: Expect,
    *,
    level: int,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    on_result: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """Run what is planned, one check after the other; each gives exactly one result."""
    host = host if isinstance(host, Snapshot) else Snapshot(host)
    results = []
    for name in plan(level, only, skip):
        started = time.monotonic()
        findings = _measure(name, host, expect)
        results.append(CheckResult(check=name, findings=findings, took_s=round(time.monotonic() - started, 3)))
        if on_result is not None:
            on_result(results[-1])
    return results


def _level_of(name: str) -> int:
    """The check's level. One that cannot be loaded is planned at every level, so that its error is seen."""
    try:
        return int(load(name).LEVEL)
    except Exception:
        return LEVELS[0]


def _measure(name: str, host: Host, expect: Expect) -> tuple[Finding, ...]:
    """The check's findings, or the one error that says why there are none.

    It runs in a thread of its own: a read that hangs in the kernel (a dead NFS mount, a driver) cannot be interrupted,
    only left behind. The thread is a daemon, so the process can still end.
    """
    answer: list[tuple[Finding, ...]] = []

    def work() -> None:
        try:
            check = load(name)
            answer.append(_findings(check.judge(check.read(host), expect)))
        except HostError as wrong:
            answer.append((error(str(wrong), action=_action(wrong)),))
        except BaseException as wrong:  # SystemExit too: a check may not end the run
            answer.append((_broken(f"{type(wrong).__name__}: {wrong}"),))

    timeout_s = _timeout_of(name)
    thread = threading.Thread(target=work, name=f"check-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if answer:
        return answer[0]
    reason = f"it gave no answer in {timeout_s:g} s and was left behind"
    return (error(reason, action="see what it waits for: a dead mount or a hung driver; reboot the node if it stays"),)


def _timeout_of(name: str) -> float:
    try:
        return float(getattr(load(name), "TIMEOUT_S", TIMEOUT_S))
    except Exception:
        return TIMEOUT_S


def _findings(judged: object) -> tuple[Finding, ...]:
    found = judged if isinstance(judged, (list, tuple)) else (judged,)
    if not found:
        return (_broken("it returned no finding"),)
    for item in found:
        if not isinstance(item, Finding) or not isinstance(item.verdict, Verdict) or not item.reason:
            return (_broken(f"it returned {item!r:.80}, which is no finding"),)
    return tuple(found)


def _broken(what: str) -> Finding:
    return error(f"the check itself failed: {what}", action="report it, with the folder that --capture writes")


def _action(wrong: HostError) -> str:
    if isinstance(wrong, CommandMissing):
        return "install it, or put it on PATH"
    if isinstance(wrong, CommandTimedOut):
        return "run it by hand; if it hangs there too, the driver or the device does: reboot the node"
    if isinstance(wrong, NotCaptured):
        return "capture the machine again with this version"
    return "make it readable for this user, or skip the check by name"
