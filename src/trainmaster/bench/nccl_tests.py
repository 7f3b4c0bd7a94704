"""NVIDIA's nccl-tests: run where installed, or judged from output that any launcher kept.

Their output is no verdict yet: N copies that never met each print a whole table, wrong data is one word at the end, a
launcher reports a crash beside a whole table, and the average depends on the sweep. So the number of ranks is computed
from the bandwidths, speed is compared at named sizes, and warnings and reports of dead processes are evidence.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from trainmaster.bench import limits, link_limits
from trainmaster.bench.collectives.transport import Expected, Proof, prove_nccl
from trainmaster.core.errors import CommandMissing, HostError
from trainmaster.core.node_links import LATENCY_BOUND
from trainmaster.core.results import CheckResult, Finding, Verdict, error, fail, ok, warn
from trainmaster.node.host import Host
from trainmaster.node.parse import ParseError, nccl_debug, nccl_tests
from trainmaster.node.parse.nccl_tests import Output, Row, Run

CHECK = "nccl_tests"
# Locations in images of clouds and of NVIDIA; PATH comes first.
FOLDERS = ("", "/opt/nccl-tests/build/", "/opt/nccl_tests/build/", "/usr/local/bin/", "/usr/local/nccl-tests/build/")
_MEET = "start them under mpirun with an nccl-tests built with MPI=1, so that they meet"
_NEIGHBOURS = 16  # process numbers: copies of one launch are this close; a run before has started threads in between
_SHOWN = 5  # messages or sizes written out
# Of the dynamic loader, the shell, srun and mpirun. A program that has printed its head did start.
_NO_START = re.compile(
    r"error while loading shared libraries|cannot open shared object file|command not found|symbol lookup error"
    r"|execve\(\): .{1,300}: (?:No such file|Permission denied|Exec format)|unable to find the specified executable"
    r"|version `[\w.]{1,40}' not found"
)
_BEGUN = re.compile(r"\bnThread \d|Using devices")
# Bandwidth rises with the size. Between two protocols of NCCL it dips by a third; half of what a smaller message
# reached is a fault of that size. Below 16 MiB latency counts, and a quarter is.
_HOLE, _SMALL_HOLE, _LEAST_OF_CURVE = 0.5, 0.25, 1 << 20
_AVERAGE_SLACK = 0.05  # of the printed average: rows are rounded, and some versions average over ranks
_PROGRAMS = {"all_to_all": "alltoall"}
_NAMES = {"alltoall": "all_to_all"}


def plan(collective: str, *, gpus: int, max_size: str, folder: str = "") -> list[str]:
    """The command: all GPUs of this machine in one process, data verified, sizes with baselines."""
    program = f"{folder}{_PROGRAMS.get(collective, collective)}_perf"
    return [program, "-b", "8K", "-e", max_size, "-f", "2", "-g", str(gpus), "-c", "1"]


def run(
    host: Host,
    collectives: Sequence[str],
    *,
    max_size: str = "8G",
    timeout_s: float = 900.0,
    least_gbps: float | None = None,
) -> CheckResult:
    """Run collectives one after the other, on all GPUs of this machine."""
    gpus = count_gpus(host)
    if not gpus:
        return CheckResult.of(
            CHECK, [error("nvidia-smi lists no GPU, so nccl-tests cannot run", action="run it on a GPU node")]
        )
    findings: list[Finding] = []
    for name in collectives:
        output = _run_one(host, name, gpus, max_size, timeout_s=timeout_s)
        if isinstance(output, Finding):
            findings.append(output)
        else:
            findings += judge(output, ranks=gpus, least_gbps=least_gbps, collective=name).findings
    return CheckResult.of(CHECK, findings)


def _run_one(host: Host, name: str, gpus: int, max_size: str, *, timeout_s: float) -> str | Finding:
    for folder in FOLDERS:
        argv = plan(name, gpus=gpus, max_size=max_size, folder=folder)
        try:
            result = host.run(*argv, timeout_s=timeout_s)
        except CommandMissing:
            continue
        except HostError as exc:
            return error(f"{name}: {exc}", action="run `trainmaster bandwidth` to see which rank hangs")
        # Warnings of NCCL, and reports of dead processes, are on standard error.
        output = f"{result.stdout.rstrip()}\n{result.stderr}"
        if result.exit_code and _not_started(result.exit_code, output):
            reason = f"{name}: nccl-tests could not be started (exit code {result.exit_code}): {_last(output)}"
            return error(reason, action="install it with the libraries it was built for (MPI, NCCL, CUDA)")
        if result.exit_code:
            # What it printed until then may name a fault; its exit code is one by itself.
            return fail(
                f"{name}: nccl-tests ended with exit code {result.exit_code}: {_last(output)}",
                action="read its output with NCCL_DEBUG=INFO",
            )
        return output
    return error(
        f"{name}: nccl-tests are not installed here ({plan(name, gpus=gpus, max_size=max_size)[0]} is not on PATH)",
        action="run `trainmaster bandwidth` without --nccl-tests: it needs only torch",
    )


def _not_started(exit_code: int, output: str) -> bool:
    """Whether the program never ran: nothing was measured, so the hardware is not at fault."""
    return not _BEGUN.search(output) and (exit_code in (126, 127) or _NO_START.search(output) is not None)


def judge(
    raw: str | bytes,
    *,
    ranks: int | None = None,
    least_gbps: float | None = None,
    expected: Expected | None = None,
    collective: str | None = None,
) -> CheckResult:
    """Verdict on the output of nccl-tests. `ranks`: number that must have met; `collective`: for unnamed tables.

    With NCCL_DEBUG=INFO the same output proves the transport, and with it which baseline applies.
    """
    if least_gbps is not None and not (math.isfinite(least_gbps) and least_gbps > 0):
        reason = f"a floor of {least_gbps} GB/s cannot be missed"
        return CheckResult.of(CHECK, [error(reason, action="state a bandwidth above 0 with --min-busbw")])
    try:
        output = nccl_tests.parse(raw)
    except ParseError as exc:
        return CheckResult.of(
            CHECK, [error(f"this is no output of nccl-tests: {exc}", action="give its whole standard output")]
        )
    findings = [*_met(output, ranks), *_reported(output)]
    proof = _prove(raw, output, expected)
    fabric = proof.fabric if proof is not None else None
    findings += [proof.finding] if proof is not None else []
    speeds = [_settle(run, _speed(run, fabric, collective, least_gbps)) for run in output.runs]
    findings += [finding for run in output.runs for finding in (*_data(run), *_summary(run), *_uneven(run))]
    findings += [finding for run in output.runs for finding in _holes(run)] + speeds
    if unjudged := [str(speed.values.get("collective")) for speed in speeds if speed.verdict is Verdict.SKIP]:
        words = f"measured, not judged: there is no baseline for {', '.join(dict.fromkeys(unjudged))}"
        findings.append(error(words, action="state what you expect with --min-busbw GB/s"))
    return CheckResult.of(CHECK, findings)


def _prove(raw: str | bytes, output: Output, expected: Expected | None) -> Proof | None:
    """Proof of transport; None where none was expected and NCCL logged nothing."""
    try:
        log = nccl_debug.parse(raw)
    except ParseError:
        log = None
    # With NCCL_DEBUG=WARN or VERSION there are lines of NCCL and no channel among them: no proof was asked for.
    if expected is None and (log is None or not log.carried):
        return None
    hosts = {host for run in output.runs for host in run.hosts}
    return prove_nccl(log, expected, nodes=len(hosts) or 1, world=sum(run.ranks for run in output.runs))


def _met(output: Output, ranks: int | None) -> list[Finding]:
    """Whether each run had all its ranks, by its list of devices and by its bandwidths."""
    if not output.runs:
        return [error("no run of nccl-tests is in this output", action="give its whole standard output")]
    if (apart := _apart(output.runs, ranks)) is not None:
        return [apart]
    return [_met_in(run, ranks, many=len(output.runs) > 1) for run in output.runs]


def _apart(runs: Sequence[Run], ranks: int | None) -> Finding | None:
    """A finding where these runs were copies that never met, or may have been. Sequential runs are none."""
    if len(runs) < 2:
        return None
    known = sorted({count for count in map(_count, runs) if count is not None})
    each = " or ".join(map(str, known)) or "an unknown number of"
    if len({run.label for run in runs}) > 1 or any(_same_start(a, b) for a, b in pairwise(runs)):
        reason = f"these were {len(runs)} separate runs of {each} ranks, not one run of all of them"
        return fail(reason, action=_MEET, runs=len(runs), ranks=known)
    if ranks is None and len({_devices(run) for run in runs}) > 1:
        reason = f"{len(runs)} runs of {each} ranks on different GPUs: one after the other, or copies that never met"
        action = "state the number of ranks of each run with --ranks"
        return error(reason, action=action, runs=len(runs), ranks=known)
    return None


def _same_start(a: Run, b: Run) -> bool:
    """Two runs of one collective by processes with neighbouring numbers were started together."""
    first, second = (
        min((device.pid for device in run.devices if device.pid is not None), default=None) for run in (a, b)
    )
    if first is None or second is None or first == second or a.collective != b.collective:
        return False
    return a.hosts == b.hosts and abs(first - second) <= _NEIGHBOURS


def _devices(run: Run) -> frozenset[tuple[str, str]]:
    return frozenset((device.host, device.bus_id) for device in run.devices)


def _met_in(run: Run, ranks: int | None, *, many: bool) -> Finding:
    name = f"{run.collective or 'a run'}: " if many else ""
    listed = run.ranks or None
    proven = run.proven_ranks()
    if listed is not None and proven is not None and proven[0] > listed and (ranks is None or _fits(ranks, proven)):
        # More ranks took part than the list shows: an excerpt of a log, not a split run.
        reason = f"{name}{listed} ranks are listed, but the bandwidths are those of {_words(proven)}"
        action = "give the whole output, with its list of devices"
        return error(f"{reason}: the list is an excerpt", action=action, proven=list(proven), listed=listed)
    wanted = ranks if ranks is not None else listed
    if proven is not None and proven[1] is not None and proven[1] < proven[0]:
        # Rows that contradict each other, as one that was cut off: nothing is proven of any rank.
        reason = f"{name}the bandwidths are those of {_words(proven)}: rows contradict each other"
        return error(reason, action="give the whole output, or run it again", proven=list(proven))
    if proven is not None and wanted is not None and not _fits(wanted, proven):
        how = "these were" if listed == wanted else "as in"
        split = f": {how} {wanted // proven[0]} separate runs of {proven[0]} ranks" if _splits(wanted, proven) else ""
        reason = f"{name}{wanted} ranks should have met, but the bandwidths are those of {_words(proven)}{split}"
        return fail(reason, action=_MEET, proven=list(proven), wanted=wanted)
    if ranks is not None and listed is not None and listed != ranks:
        reason = f"{name}{ranks} ranks should have met, {listed} are listed"
        return fail(reason, action="check that every node was started")
    if ranks is not None and listed is None and proven is None:
        action = "give the whole output, with its list of devices"
        return error(f"{name}nothing shows that {ranks} ranks met", action=action)
    met = f"{listed} ranks on {len(run.hosts)} nodes" if listed else "the ranks"
    return ok(f"{name}{met} met in one run", ranks=listed)


def _fits(wanted: int, proven: tuple[int, int | None]) -> bool:
    return proven[0] <= wanted and (proven[1] is None or wanted <= proven[1])


def _words(proven: tuple[int, int | None]) -> str:
    least, most = proven
    if most is None:
        return f"at least {least} ranks"
    if most < least:
        return "no possible number of ranks"
    return f"{least} ranks" if least == most else f"{least} to {most} ranks"


def _splits(wanted: int, proven: tuple[int, int | None]) -> bool:
    least, most = proven
    return least == most and least > 1 and wanted % least == 0


def _count(run: Run) -> int | None:
    proven = run.proven_ranks()
    if proven is not None and proven[0] == proven[1]:
        return proven[0]
    return run.ranks or None


def _reported(output: Output) -> list[Finding]:
    """Failures and warnings in words: of the tool, of its launcher, of NCCL."""
    action = "read its output with NCCL_DEBUG=INFO"
    findings = [fail(f"nccl-tests reports: {words}", action=action) for words in output.errors]
    findings += [
        fail(f"a process of the run died, or its launcher failed: {words}", action="find its cause, then run again")
        for words in output.deaths[:_SHOWN]
    ]
    findings += [warn(f"NCCL warned: {words}", action=action) for words in output.warnings[:_SHOWN]]
    return findings + [error(f"the output is damaged: {words}", action="run it again") for words in output.faults]


def _data(run: Run) -> list[Finding]:
    if run.corrupt:
        sides = [side for row in run.rows for side in (row.out_of_place, row.in_place) if side is not None]
        count = sum(side.wrong or 0 for side in sides)
        return [
            fail(
                f"{run.collective or 'the run'}: wrong data arrived ({count or run.out_of_bounds or 'some'} elements)",
                action="run `trainmaster bandwidth` to see which rank receives it",
            )
        ]
    findings = [error(f"the output is damaged: {words}", action="run it again") for words in run.faults]
    if run.validated is False:
        findings.append(error("it ran with -c 0: the data was not verified", action="run it again with -c 1"))
    elif unchecked := [row.size_bytes for row in run.rows if not _verified(row)]:
        sizes = ", ".join(map(limits.render_size, unchecked[:_SHOWN]))
        reason = f"the data was not verified at {sizes}: the number of wrong values is N/A or absent"
        findings.append(error(reason, action="run it again with -c 1"))
    return findings


def _summary(run: Run) -> list[Finding]:
    """An error where the printed average is not that of the rows: lines are missing, or of another run."""
    printed, rates = run.average_busbw_gbps, [*_rates(run)]
    if printed is None or not rates:
        return []
    out_of_place = [row.out_of_place.busbw_gbps or 0.0 for row in run.rows if row.out_of_place is not None]
    means = [sum(part) / len(part) for part in (rates, out_of_place) if part]
    if any(abs(mean - printed) <= 0.02 + _AVERAGE_SLACK * mean for mean in means):
        return []
    reason = f"the summary contradicts the rows: an average of {printed:g} GB/s, and theirs is {means[0]:.3g}"
    return [error(reason, action="give the whole output of one run, or run it again")]


def _rates(run: Run) -> Iterator[float]:
    for row in run.rows:
        for side in (row.out_of_place, row.in_place):
            if side is not None and side.busbw_gbps is not None:
                yield side.busbw_gbps


def _curve(run: Run) -> dict[int, float]:
    """Bus bandwidth by size. Out of place and in place, and a size that comes twice: the worst decides."""
    seen: dict[int, float] = {}
    for row in run.rows:
        for side in (row.out_of_place, row.in_place):
            if side is not None and side.busbw_gbps is not None:
                seen[row.size_bytes] = min(side.busbw_gbps, seen.get(row.size_bytes, side.busbw_gbps))
    return seen


def _holes(run: Run) -> list[Finding]:
    """A failure where a message is far slower than a smaller one, whatever sizes have a baseline."""
    proven = run.proven_ranks()
    if run.faults or (proven is not None and proven[1] is not None and proven[1] < proven[0]):
        return []  # a row that was cut off is no slow one
    best, holes, curve = 0.0, [], _curve(run)
    for size in sorted(curve):
        share = _HOLE if size >= LATENCY_BOUND else _SMALL_HOLE
        if size >= _LEAST_OF_CURVE and curve[size] < share * best:
            holes.append(f"{curve[size]:.3g} GB/s at {limits.render_size(size)}")
        best = max(best, curve[size])
    if not holes:
        return []
    reason = (
        f"{run.collective or 'the run'}: the curve has a hole: {', '.join(holes[:_SHOWN])}; smaller messages are faster"
    )
    return [fail(reason, action="run it again; if it stays, see NCCL's tuning (NCCL_ALGO, NCCL_PROTO) and the links")]


def _settle(run: Run, speed: Finding) -> Finding:
    """Verdict on a shape without a baseline: by the link inside the node, or by figures of its class between nodes."""
    models = {device.name for device in run.devices}
    if speed.verdict is not Verdict.SKIP or len(models) != 1 or run.ranks < 2:
        return speed
    return link_limits.by_class(speed, models.pop(), nodes=len(run.hosts)) or speed


def _uneven(run: Run) -> list[Finding]:
    """Warnings of a run over unequal nodes: its bandwidth is that of the weakest, and no baseline describes it."""
    models = Counter(device.name for device in run.devices)
    each = Counter(device.host for device in run.devices)
    findings = []
    if len(models) > 1:
        words = ", ".join(f"{count} × {name}" for name, count in sorted(models.items()))
        findings.append(
            warn(f"ranks ran on different GPUs: {words}", action="use nodes of one type, or test each alone")
        )
    if len(set(each.values())) > 1:
        words = ", ".join(f"{count} on {host}" for host, count in sorted(each.items())[:_SHOWN])
        findings.append(
            warn(f"nodes gave different numbers of ranks: {words}", action="start one rank per GPU on each")
        )
    return findings


def _verified(row: Row) -> bool:
    """One side with a result is enough: alltoall and sendrecv print N/A for in-place."""
    sides = (row.out_of_place, row.in_place)
    return any(side is not None and (side.wrong is not None or side.delta is not None) for side in sides)


def _speed(run: Run, fabric: str | None, collective: str | None, least_gbps: float | None) -> Finding:
    stated = _PROGRAMS.get(collective, collective) if collective is not None else None
    name = run.collective or stated
    if name is None:
        reason = "the table does not name its collective, and its bandwidths fit more than one"
        return error(reason, action="state it with --collective")
    if run.collective is not None and stated not in (None, run.collective):
        return error(f"the table is one of {run.collective}, not of {stated}", action="correct --collective")
    name = _NAMES.get(name, name)
    seen = _curve(run)
    finding = limits.judge(
        _key(run, fabric, name), seen, baselines=limits.load(), least_gbps=least_gbps, collective=name
    )
    return replace(finding, values={**finding.values, "ranks": run.ranks}) if run.devices else finding


def _key(run: Run, fabric: str | None, name: str) -> limits.Key | None:
    models = {limits.gpu_model(device.name) for device in run.devices}
    nodes = len(run.hosts)
    # Between nodes the tables do not say what carried it; the caller must know, from NCCL's log.
    joined = fabric or ("nvlink" if nodes == 1 else None)
    if len(models) != 1 or not nodes or run.ranks % nodes or joined is None:
        return None
    return limits.Key(gpu=models.pop(), nodes=nodes, gpus_per_node=run.ranks // nodes, fabric=joined, collective=name)


def count_gpus(host: Host) -> int:
    """GPUs that `nvidia-smi -L` lists; 0 where it does not answer."""
    try:
        result = host.run("nvidia-smi", "-L", timeout_s=30.0)
    except HostError:
        return 0
    return len(re.findall(r"^GPU \d+:", result.stdout, flags=re.MULTILINE)) if result.exit_code == 0 else 0


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"
