"""`dcgmi diag` at one of its levels, judged per GPU. Shared by dcgm.py and dcgm_stress.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from trainmaster.checks import nvidia
from trainmaster.core.errors import CommandMissing, HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, Verdict, error, fail, ok, skip, warn
from trainmaster.node.host import CommandResult, Host
from trainmaster.node.parse import ParseError, dcgm, shorten

# What DCGM asks for (severities and next steps of dcgm_errors.h), as one action. Its next steps for triage are a reset
# and another run, then the field diagnostic.
_ACTIONS = {
    "monitor": "watch the GPU and test it again",
    "isolate": nvidia.REPLACE,
    "triage": "drain the node, reset the GPU and test it again; if it returns, run NVIDIA's field diagnostic",
    "config": "mend the setting that DCGM names",
    "reset": nvidia.RESET,
}
_OFF_BUS, _TARGET_POWER = 120, 63  # DCGM_FR_FALLEN_OFF_BUS, DCGM_FR_TARGET_POWER
_SHORT = re.compile(r"Max power of (?P<drawn>[\d.]+) did not reach desired power minimum\D* of (?P<wanted>[\d.]+)")
# DCGM's next step for a missed power target is to look at clocks and utilisation: the GPU can work. One that draws less
# than half of it did not run the test.
_POWER_FAILS = 0.5
_POWER = "see that its clocks and utilisation were high (gpu_clocks, gpu_throttle, gpu_power), then test it again"
_GRAVE = ("isolate", "triage", "reset")  # severities that keep a GPU from work, whatever word the row has


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """`ran` None: it is not installed, or `trouble` says why there is no answer."""

    gpus: nvidia.Gpus
    level: int
    result: CommandResult | None
    trouble: str | None


def read(host: Host, level: int, timeout_s: float) -> Evidence:
    gpus = nvidia.read(host)
    try:
        result = host.run("dcgmi", "diag", "-r", str(level), "-j", timeout_s=timeout_s)
    except CommandMissing:
        return Evidence(gpus=gpus, level=level, result=None, trouble=None)
    except HostError as error:
        return Evidence(gpus=gpus, level=level, result=None, trouble=str(error))
    return Evidence(gpus=gpus, level=level, result=result, trouble=None)


def judge(evidence: Evidence, expect: Expect) -> list[Finding]:
    refused = nvidia.refuse(evidence.gpus, expect)
    if refused is not None:
        return [refused]
    if evidence.trouble is not None:
        return [error(evidence.trouble, action="run it by hand; if it hangs there too, reboot the node")]
    if evidence.result is None:
        if expect.dcgm:
            return [error("DCGM is not installed", action="install datacenter-gpu-manager")]
        return [skip("DCGM is not installed", proof="there is no dcgmi on PATH")]
    meant = dcgm.read_exit(evidence.result.exit_code)
    try:
        diag = dcgm.parse(evidence.result.stdout)
    except ParseError as exc:
        return [_nothing(evidence.result, meant, str(exc))]
    if not diag.tests:
        return [_nothing(evidence.result, meant, diag.runtime_error or "it names no test")]
    findings = [*_judge_gpus(evidence, diag, expect), *_judge_others(diag)]
    return [*findings, *_judge_run(evidence, diag, meant, findings)]


def _nothing(result: CommandResult, meant: dcgm.ExitCode, why: str) -> Finding:
    """The one finding of a run that tested nothing."""
    if meant.isolate:
        return fail(f"dcgmi: {meant.meaning}", action=nvidia.REPLACE, exit_code=result.exit_code)
    output = shorten(f"{result.stdout} {result.stderr}")
    reason = f"DCGM tested nothing ({why}); {meant.meaning}; it said: {output}"
    action = "start the host engine (systemctl start nvidia-dcgm) and run dcgmi diag by hand"
    return error(reason, action=action, exit_code=result.exit_code)


def _judge_gpus(evidence: Evidence, diag: dcgm.Diag, expect: Expect) -> Iterator[Finding]:
    """One finding per GPU that should be here. DCGM numbers those that the driver lists, in the order of the bus."""
    number = 0
    for slot in nvidia.slots(evidence.gpus, nvidia.expected(evidence.gpus, expect)):
        if slot.gpu is None or slot.gpu.lost is not None:
            yield nvidia.missing_gpu(slot)
            continue
        yield _judge_gpu(diag, number, slot.device)
        number += 1


def _judge_gpu(diag: dcgm.Diag, number: int, device: str) -> Finding:
    tests = {
        test.name: str(result.status) for test in diag.tests for result in test.results if result.gpu in (number, None)
    }
    status = dcgm.worst(diag, number)
    if status is dcgm.Status.PASS:
        return _judge_pass(diag, number, device, tests)
    bad = _bad(diag, number)
    values = {"tests": tests, "problems": [problem.text for _, problem in bad if problem][:10]}
    name, problem = bad[0] if bad else ("the diagnostic", None)
    why = f": {problem.text}" if problem else ""
    severity = dcgm.SEVERITIES.get(problem.severity or 0, "unknown") if problem else "unknown"
    action = _action(problem, severity, "drain the node and look at what DCGM reports of this GPU")
    if status is dcgm.Status.FAIL and _only_short_of_power(diag, number):
        return warn(f"{name} of DCGM fails{why}", action=_POWER, device=device, **values)
    if status is dcgm.Status.FAIL:
        return fail(f"{name} of DCGM fails{why}", action=action, device=device, **values)
    if status is dcgm.Status.WARN:
        say = fail if severity in _GRAVE else warn
        return say(f"{name} of DCGM warns{why}", action=action, device=device, **values)
    message = diag.runtime_error or next(iter(diag.faults), None) or f"{name} is {status}{why}"
    return error(f"DCGM did not test it: {message}", action="run dcgmi diag by hand", device=device, **values)


def _judge_pass(diag: dcgm.Diag, number: int, device: str, tests: dict[str, str]) -> Finding:
    """Finding of a GPU without a failed test: a warning attached to a pass counts, a skipped test does not."""
    rows = [(test, result) for test in diag.tests for result in test.results if result.gpu == number]
    problems = [(test.name, problem) for test, result in rows for problem in result.problems]
    grave = [(name, problem) for name, problem in problems if dcgm.SEVERITIES.get(problem.severity or 0) in _GRAVE]
    if grave:
        name, problem = grave[0]
        action = _action(problem, dcgm.SEVERITIES[problem.severity or 0], "")
        return fail(f"{name} of DCGM passes with an error: {problem.text}", action=action, device=device, tests=tests)
    hardware = [(test, result) for test, result in rows if test.category != dcgm.DEPLOYMENT and test.key != "software"]
    peers = {
        test.key
        for test in diag.tests
        for result in test.results
        if result.gpu not in (number, None) and result.status is dcgm.Status.PASS
    }
    skipped = [test for test, result in hardware if result.status is dcgm.Status.SKIP]
    lost = [test.name for test in skipped if test.key in peers]
    if lost or (skipped and len(skipped) == len(hardware)):
        what = f"{lost[0]} was skipped on it and run on others" if lost else "every hardware test was skipped"
        action = "run dcgmi diag by hand: a skipped test measured nothing"
        return error(f"DCGM did not test it: {what}", action=action, device=device, tests=tests)
    if problems:
        name, problem = problems[0]
        action = _ACTIONS.get(dcgm.SEVERITIES.get(problem.severity or 0, ""), _ACTIONS["monitor"])
        return warn(f"{name} of DCGM passes with a warning: {problem.text}", action=action, device=device, tests=tests)
    return ok(f"{sum(word == 'Pass' for word in tests.values())} tests of DCGM pass", device=device, tests=tests)


def _judge_others(diag: dcgm.Diag) -> Iterator[Finding]:
    """Findings about switches, CPUs and the node itself, by status and severity; those that pass have none."""
    for test in diag.tests:
        for result in test.results:
            # A row of the node that names nothing (DCGM 3) is part of each GPU's verdict, except its remarks.
            mild = result.status in (dcgm.Status.PASS, dcgm.Status.SKIP)
            if result.gpu is None and (mild or result.entity is not None):
                device = None if result.entity in (None, dcgm.NODE) else result.entity
                yield from _judge_other(test.name, result, device)


def _judge_other(name: str, result: dcgm.Result, device: str | None) -> Iterator[Finding]:
    ranked = sorted(result.problems, key=lambda problem: dcgm.SEVERITIES.get(problem.severity or 0) not in _GRAVE)
    problem = ranked[0] if ranked else None
    severity = dcgm.SEVERITIES.get(problem.severity or 0, "unknown") if problem else "unknown"
    why = f": {problem.text}" if problem else ""
    where = device or "the node"
    action = _action(problem, severity, "run dcgmi diag by hand and see what it reports of this part")
    if result.status is dcgm.Status.FAIL:
        yield fail(f"{name} of DCGM fails on {where}{why}", action=action, device=device)
    elif severity in _GRAVE:
        yield fail(f"{name} of DCGM reports an error of {where}{why}", action=action, device=device)
    elif result.status is dcgm.Status.WARN or (result.status is dcgm.Status.PASS and problem):
        yield warn(f"{name} of DCGM warns of {where}{why}", action=action, device=device)
    elif result.status in (dcgm.Status.NOT_RUN, dcgm.Status.UNKNOWN):
        yield error(f"{name} of DCGM is {result.word or result.status} on {where}{why}", action=action, device=device)


def _action(problem: dcgm.Problem | None, severity: str, otherwise: str) -> str:
    """One action for a problem; a GPU off the bus is power-cycled first, as for its Xid."""
    if problem is not None and (problem.error_id == _OFF_BUS or "fallen off the bus" in problem.text):
        return nvidia.POWER_CYCLE
    return _ACTIONS.get(severity, otherwise)


def _only_short_of_power(diag: dcgm.Diag, gpu: int) -> bool:
    """Whether all that fails on a GPU is the target of its power draw, by less than half."""
    failed = [
        (test, result)
        for test in diag.tests
        for result in test.results
        if result.gpu in (gpu, None) and result.status is dcgm.Status.FAIL
    ]
    problems = [problem for _, result in failed for problem in result.problems]
    return bool(problems) and all(test.key == "targeted_power" for test, _ in failed) and all(map(_is_short, problems))


def _is_short(problem: dcgm.Problem) -> bool:
    match = _SHORT.search(problem.text)
    if match is None:
        return problem.error_id == _TARGET_POWER
    return float(match["drawn"].rstrip(".")) >= _POWER_FAILS * float(match["wanted"].rstrip("."))


def _bad(diag: dcgm.Diag, number: int) -> list[tuple[str, dcgm.Problem | None]]:
    """Tests that did not pass on a GPU, failures first, each with DCGM's sentence."""
    rows = [(test.name, result) for test in diag.tests for result in test.results if result.gpu in (number, None)]
    order = {dcgm.Status.FAIL: 0, dcgm.Status.UNKNOWN: 1, dcgm.Status.NOT_RUN: 2, dcgm.Status.WARN: 3}
    chosen = sorted((row for row in rows if row[1].status in order), key=lambda row: order[row[1].status])
    return [(name, problem) for name, result in chosen for problem in (result.problems or (None,))]


def _judge_run(evidence: Evidence, diag: dcgm.Diag, meant: dcgm.ExitCode, findings: list[Finding]) -> Iterator[Finding]:
    """Findings of the whole run: a failure that names no GPU, a run that was cut short, missing tests."""
    assert evidence.result is not None
    code = evidence.result.exit_code
    # A GPU that is only short of power has a finding of its own, though DCGM counts it as failed.
    named = any(finding.verdict is Verdict.FAIL or finding.action == _POWER for finding in findings)
    if dcgm.worst(diag) is dcgm.Status.FAIL and not named:
        failed = next((test.name for test in diag.tests if _fails(test)), "a test")
        yield fail(f"{failed} of DCGM fails on this node", action="run dcgmi diag by hand", exit_code=code)
    elif meant.isolate and not named:
        yield fail(f"dcgmi: {meant.meaning}", action=nvidia.REPLACE, exit_code=code)
    elif code and not named:
        yield error(f"dcgmi ended with {code}: {meant.meaning}", action="run dcgmi diag by hand", exit_code=code)
    elif not named and (missing := dcgm.missing_tests(diag, evidence.level)):
        action = "run dcgmi diag by hand: it was cut short, or this GPU cannot run them"
        yield error(f"DCGM did not run {', '.join(missing)}", action=action, exit_code=code)


def _fails(test: dcgm.Test) -> bool:
    return test.summary is dcgm.Status.FAIL or any(result.status is dcgm.Status.FAIL for result in test.results)
