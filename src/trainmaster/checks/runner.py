"""Runner of the checks: one result per planned check, whatever the check does.

A check that raises, hangs or returns something else than findings yields an `error`: not measured is never a pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from trainmaster.checks import system_files
from trainmaster.checks.registry import load, plan, timeout_of
from trainmaster.core.errors import CommandMissing, CommandTimedOut, HostError, NotCaptured
from trainmaster.core.expect import Expect
from trainmaster.core.results import CheckResult, Finding, Verdict, error
from trainmaster.node.host import Host, Snapshot

# Empty where there is nothing to list: a kernel without modules, a network without IPv6.
_MAY_BE_EMPTY = ("/proc/modules", "/proc/net/if_inet6")


def run(
    host: Host,
    expect: Expect,
    *,
    level: int,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    on_result: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """Run the planned checks one after the other; each gives exactly one result."""
    host = WholeFiles(host)
    results = []
    for name in plan(level, only, skip):
        started = time.monotonic()
        findings = _measure(name, host, expect)
        results.append(CheckResult(check=name, findings=findings, took_s=round(time.monotonic() - started, 3)))
        if on_result is not None:
            on_result(results[-1])
    return results


def _measure(name: str, host: Host, expect: Expect) -> tuple[Finding, ...]:
    """Findings of a check, or one error with the reason why there are none.

    The check runs in a thread of its own: a read that hangs in the kernel (a dead NFS mount, a driver) cannot be
    interrupted, only abandoned. The thread is a daemon, so the process can still end.
    """
    answer: list[tuple[Finding, ...]] = []

    def work() -> None:
        try:
            check = load(name)
            answer.append(_findings(check.judge(check.read(host), expect)))
        except HostError as exc:
            answer.append((error(str(exc), action=_action(exc)),))
        except BaseException as exc:  # SystemExit too: a check may not end the run
            answer.append((_broken(f"{type(exc).__name__}: {exc}"),))

    timeout_s = timeout_of(name)
    thread = threading.Thread(target=work, name=f"check-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if answer:
        return answer[0]
    reason = f"no answer within {timeout_s:g} s; the check was abandoned"
    return (error(reason, action="look for a dead mount or a hung driver; reboot the node if it stays"),)


def _findings(judged: object) -> tuple[Finding, ...]:
    findings = judged if isinstance(judged, (list, tuple)) else (judged,)
    if not findings:
        return (_broken("it returned no finding"),)
    for item in findings:
        if not isinstance(item, Finding) or not isinstance(item.verdict, Verdict) or not item.reason:
            return (_broken(f"it returned {item!r:.80}, which is no finding"),)
        if item.verdict is Verdict.SKIP and not item.proof:
            return (_broken(f"it skipped without proof: {item.reason[:80]}"),)
    return tuple(findings)


def _broken(what: str) -> Finding:
    return error(f"the check itself failed: {what}", action="report it, with the folder that --capture writes")


def _action(failure: HostError) -> str:
    if isinstance(failure, CommandMissing):
        return "install it, or put it on PATH"
    if isinstance(failure, CommandTimedOut):
        return "run it by hand; if it hangs there too, the driver or the device hangs: reboot the node"
    if isinstance(failure, NotCaptured):
        return "capture the machine again with this version"
    return system_files.advise(system_files.code_of(failure))


class WholeFiles(Snapshot):
    """A snapshot of a machine whose files of /proc and /sys are whole, or an error.

    The kernel ends each of these files with a newline and writes ASCII. A file that is empty, was cut short or holds
    other bytes is a failed read; taken for an answer, it could hide the fault that it would have shown.
    """

    def read(self, path: str) -> str:
        text = super().read(path)
        if not path.startswith(("/proc/", "/sys/")) or (not text and path in _MAY_BE_EMPTY):
            return text
        if not text.endswith("\n"):
            raise HostError(f"{path} is empty or was cut short: {text[-40:]!r}")
        if "\x00" in text or "\ufffd" in text:
            raise HostError(f"{path} holds bytes that are no text")
        return text
