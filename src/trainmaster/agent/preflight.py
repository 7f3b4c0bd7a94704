"""Pre-flight: run the checks before the workload starts, and refuse the start if they fail. One event per result."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from trainmaster import checks
from trainmaster.agent.diagnose import Outcome
from trainmaster.agent.watch import Watch
from trainmaster.checks import document, profiles
from trainmaster.checks.expectations import unmeasured
from trainmaster.core import schema
from trainmaster.core.errors import TrainmasterError, UsageError
from trainmaster.core.plan import Plan
from trainmaster.core.results import CheckResult, Overall, Verdict, demand, judge_overall
from trainmaster.core.spec import Preflight
from trainmaster.core.states import Reason
from trainmaster.node.emit import Emitter
from trainmaster.node.host import Host

_SHOWN = 20  # findings kept as evidence; the events hold all


def run(plan: Plan, events: Emitter, watch: Watch) -> Outcome | None:
    """Run the pre-flight. An Outcome ends the attempt; None lets it start."""
    spec = plan.spec.preflight
    if spec.level == 0:
        return None
    try:
        planned = checks.plan(spec.level, (), spec.skip)
        checks.plan(spec.level, spec.require)  # a name that is wrong, or of a higher level, is refused
        if skipped := [name for name in spec.require if name in spec.skip]:
            raise UsageError(f"{skipped[0]} is both required and skipped")
        profiles.resolve(_expected(spec))  # an unknown profile is refused before anything is measured
    except TrainmasterError as error:
        return Outcome(reason=Reason.CHECK_INCOMPLETE, message=f"the pre-flight could not be planned: {error}")
    events.emit("PREFLIGHT", "start", planned=planned)
    results, stopped = _collect(plan, events, watch)
    if stopped is not None:
        return stopped
    left = unmeasured(profiles.resolve(_expected(spec)).expect, level=spec.level, left_out=spec.skip)
    planned, results = [*planned, *(result.check for result in left)], [*results, *left]
    overall = judge_overall(results, planned=planned)
    events.emit("PREFLIGHT", "end", overall=overall)
    return judge(overall, results, planned, allow_incomplete=spec.allow_incomplete)


def _expected(spec: Preflight) -> list[str | Mapping[str, object]]:
    """Expectation of each node: the profile, then what the spec states."""
    return [*([spec.profile] if spec.profile else []), document.stated(spec.expect)]


def _collect(plan: Plan, events: Emitter, watch: Watch) -> tuple[list[CheckResult], Outcome | None]:
    """Run the checks in a thread beside the watch: a check of minutes must not delay a stop request."""
    spec = plan.spec.preflight
    inbox: queue.SimpleQueue[CheckResult | BaseException | None] = queue.SimpleQueue()

    def put(item: CheckResult | BaseException | None) -> None:
        if isinstance(item, CheckResult):
            (item,) = demand([item], spec.require)
        inbox.put(item)
        watch.wake()

    def work() -> None:
        try:
            host = Host()
            expect = profiles.resolve(_expected(spec), host).expect
            checks.run(host, expect, level=spec.level, skip=spec.skip, on_result=put)
            put(None)
        except BaseException as error:  # raised again by the reader below
            put(error)

    # A daemon thread: on a stop it is abandoned, and its probes are killed with the other processes of the attempt.
    worker = threading.Thread(target=work, name="checks", daemon=True)
    worker.start()
    results: list[CheckResult] = []
    while True:
        watch.beat(ranks=0)
        while not inbox.empty():
            item = inbox.get()
            if item is None:
                worker.join()  # ranks are forked next, and a fork wants no second thread
                return results, None
            if isinstance(item, BaseException):
                raise item
            results.append(item)
            findings = schema.to_plain(item.findings)
            events.emit(
                "PREFLIGHT", "check", check=item.check, verdict=item.verdict, took_s=item.took_s, findings=findings
            )
        if stop := watch.asked():
            return results, Outcome(reason=stop.reason, message=f"{stop.message}; stopped during the pre-flight")
        watch.sleep()


def judge(
    overall: Overall, results: Sequence[CheckResult], planned: Sequence[str], *, allow_incomplete: bool
) -> Outcome | None:
    """The Outcome that these results end an attempt with; None if the ranks may start."""
    if overall in (Overall.PASS, Overall.WARN) or (overall is Overall.INCOMPLETE and allow_incomplete):
        return None
    bad: list[dict[str, Any]] = [
        {"check": result.check, **schema.to_plain(finding)}
        for result in results
        for finding in result.findings
        if finding.verdict in (Verdict.FAIL, Verdict.ERROR)
    ]
    silent = sorted(set(planned) - {result.check for result in results if result.findings})
    words = [f"{item['check']}: {item['reason']}" for item in bad] + [f"{name}: no result" for name in silent]
    reason = Reason.CHECK_FAILED if overall is Overall.FAIL else Reason.CHECK_INCOMPLETE
    message = f"pre-flight {overall}: " + ("; ".join(words)[:500] or "nothing was measured")
    return Outcome(reason=reason, message=message, evidence={"overall": overall.value, "findings": bad[:_SHOWN]})
