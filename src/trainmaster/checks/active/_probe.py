"""Run a probe (bench/probe) on every GPU of the node, and judge the GPUs that gave no report.

Each GPU gets a process of its own, all at once; a check never imports torch. The output of a probe is captured,
replayed and judged again like that of any command. A probe that crashed, hung or printed something else is a finding of
its GPU alone.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from trainmaster.checks import nvidia
from trainmaster.checks.active import _cuda_errors
from trainmaster.core.errors import CommandTimedOut, HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, Verdict, error, skip
from trainmaster.node.host import CommandResult, Host

# Above every probe's own deadline (a test holds that): only the probe itself can report the step at which it hung.
TIMEOUT_S = 130.0
CHECK_TIMEOUT_S = TIMEOUT_S + nvidia.CHECK_TIMEOUT_S
TAIL = 300  # characters of a dead probe's last words
FOREIGN_BYTES = 2 << 30  # of memory in use before we came; a context of our own takes half a GiB

Answer = CommandResult | HostError


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """GPUs of the node and the answers of their probes, by UUID."""

    gpus: nvidia.Gpus
    visible: str | None  # CUDA_VISIBLE_DEVICES as it stands
    hidden: frozenset[str]  # UUIDs that it keeps from this process
    answers: Mapping[str, Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Report of one GPU's probe."""

    name: str
    torch: str
    torch_cuda: str
    foreign_gib: float  # memory in use before the probe began
    results: Mapping[str, Any]
    took_s: float

    @property
    def software(self) -> dict[str, str]:
        """Versions that decide which kernels ran: results of other versions may differ in bits and rates."""
        return {"torch": self.torch, "torch_cuda": self.torch_cuda}


def read(host: Host, probe: str, *options: str, timeout_s: float = TIMEOUT_S) -> Probed:
    """Run the probe on every GPU that this process may use, all at once."""
    gpus = nvidia.read(host)
    uuids = [str(gpu.uuid) for gpu in gpus.smi.gpus if gpu.lost is None] if gpus.smi else []
    visible = host.env("CUDA_VISIBLE_DEVICES") if uuids else None
    hidden = hidden_from(uuids, visible)
    answers: dict[str, Answer] = {}

    def run_probe(uuid: str) -> None:
        try:
            answers[uuid] = host.run(*command(probe, uuid, *options), timeout_s=timeout_s)
        except HostError as error:
            answers[uuid] = error

    # Daemon threads: a process that cannot be killed must not keep this one from ending.
    threads = [
        threading.Thread(target=run_probe, args=(uuid,), name=f"probe-{probe}-{uuid}", daemon=True)
        for uuid in uuids
        if uuid not in hidden
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Probed(gpus=gpus, visible=visible, hidden=hidden, answers=answers)


def command(probe: str, gpu: str, *options: str) -> tuple[str, ...]:
    """Command line of a probe. It is the key of a capture, so it is the same on every machine."""
    return ("python", "-m", "trainmaster.bench.probe", probe, "--gpu", gpu, *options)


def sort_out(probed: Probed, probe: str, expect: Expect) -> tuple[dict[str, Report], list[Finding]]:
    """Whole reports by device (gpu0, …), and a finding for each GPU that gave none."""
    refused = nvidia.refuse(probed.gpus, expect)
    if refused is not None:
        return {}, [refused]
    reports: dict[str, Report] = {}
    findings: list[Finding] = []
    for slot in nvidia.slots(probed.gpus, nvidia.expected(probed.gpus, expect)):
        if slot.gpu is None or slot.gpu.lost is not None:
            findings.append(nvidia.missing_gpu(slot))
            continue
        uuid = str(slot.gpu.uuid)
        if uuid in probed.hidden:
            findings.append(hidden_gpu(probed, slot.device, expect))
            continue
        judged = judge_answer(probed.answers.get(uuid), probe, slot.device, uuid)
        if isinstance(judged, Finding):
            findings.append(judged)
        else:
            reports[slot.device] = judged
    return reports, findings


def judge_all(
    probed: Probed, probe: str, expect: Expect, judge_one: Callable[[str, Report, Mapping[str, Report]], Finding]
) -> list[Finding]:
    """One finding per GPU, in order; `judge_one` gets the device, its report and all reports."""
    reports, findings = sort_out(probed, probe, expect)
    for device, report in reports.items():
        try:
            findings.append(judge_one(device, report, reports))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            findings.append(_rubbish(f"{type(error).__name__}: {error}", device))
    return in_order(findings)


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Findings by device number; those of the node come first."""
    return sorted(findings, key=lambda finding: int(re.sub(r"\D", "", finding.device or "") or -1))


def hidden_from(uuids: Sequence[str], visible: str | None) -> frozenset[str]:
    """Which of them CUDA_VISIBLE_DEVICES hides. CUDA reads the list up to the first word it does not know."""
    if visible is None:
        return frozenset()
    shown: set[str] = set()
    for word in (part.strip() for part in visible.split(",")):
        if re.fullmatch(r"\d{1,4}", word, flags=re.ASCII) and int(word) < len(uuids):
            shown.add(uuids[int(word)])
        elif word.startswith("GPU-") and any(uuid.startswith(word) for uuid in uuids):
            shown.update(uuid for uuid in uuids if uuid.startswith(word))
        else:
            break
    return frozenset(uuids) - shown


def hidden_gpu(probed: Probed, device: str, expect: Expect) -> Finding:
    """Finding of a GPU that this process may not use: another job may be on it."""
    why = f"CUDA_VISIBLE_DEVICES={probed.visible} keeps it from this process"
    if expect.gpus is not None and expect.gpus > len(probed.answers):
        return error(f"not tried: {why}", action="unset CUDA_VISIBLE_DEVICES, or expect fewer GPUs", device=device)
    return skip("not given to this process", proof=why, device=device)


def judge_answer(answer: Answer | None, probe: str, device: str, uuid: str | None) -> Report | Finding:
    """Report of a probe, or the finding that there is none."""
    if answer is None:
        return error("its probe was never run", action="report it, with the captured folder", device=device)
    if isinstance(answer, CommandTimedOut):
        action = "look for Xid in the kernel log and reboot the node: what cannot be killed waits for the driver"
        return error(f"hung: {answer}", action=action, device=device)
    if isinstance(answer, HostError):
        return error(str(answer), action="run it by hand", device=device)
    try:
        document = parse(answer.stdout, probe)
    except ValueError as exc:
        return _crashed(answer, str(exc), device)
    if document["error"] is not None or answer.exit_code:
        return _judge_reported_error(document["error"] or {}, answer, device)
    who = document["device"]
    if who.get("type") != "cuda" or (uuid is not None and who.get("uuid") not in (uuid, None)):
        reason = f"its probe ran on {who.get('name')!r:.60} {who.get('uuid') or ''}, not on this GPU".replace("  ", " ")
        return error(reason, action="report it, with the captured folder", device=device)
    return Report(
        name=str(who.get("name")),
        torch=str(who.get("torch")),
        torch_cuda=str(who.get("cuda")),
        foreign_gib=_foreign(who),
        results=document["results"],
        took_s=answer.took_s,
    )


def parse(text: str, probe: str) -> dict[str, Any]:
    """The one JSON object of a probe. ValueError where it is anything else."""
    document = json.loads(text, parse_constant=_no_constant)
    if not isinstance(document, dict) or document.get("v") != 1 or document.get("probe") != probe:
        raise ValueError(f"it is no report of {probe}, version 1")
    for name in ("device", "error"):
        if not isinstance(document.get(name), (dict, type(None))):
            raise ValueError(f"its {name} is {document.get(name)!r:.40}")
    if not isinstance(document.get("results"), dict) or "error" not in document:
        raise ValueError("it has no results or does not say whether there was an error")
    if document["device"] is None:
        if document["error"] is None:
            raise ValueError("it does not say on which device it ran")
        document["device"] = {}
    return document


def results_of(answer: Answer | None, probe: str) -> dict[str, Any]:
    """Results of a probe, also of one that failed later. ValueError if there are none."""
    if not isinstance(answer, CommandResult):
        raise ValueError("there is no report")
    results: dict[str, Any] = parse(answer.stdout, probe)["results"]
    return results


def number(results: Mapping[str, Any], name: str, *, least: float = 0.0) -> float:
    """A number of a report. ValueError where it is missing, text (NaN comes as text), or too small to be one."""
    value = results.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
        raise ValueError(f"{name} is {value!r:.40}")
    return float(value)


def count(results: Mapping[str, Any], name: str) -> int:
    """A whole number of a report."""
    value = results.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r:.40}")
    return value


def foreign(report: Report) -> str:
    """Suffix of a reason if another process held memory of the GPU during the measurement."""
    gib = report.foreign_gib
    return f"; something else held {gib:.1f} GiB of its memory" if gib * (1 << 30) > FOREIGN_BYTES else ""


def _judge_reported_error(failure: Mapping[str, Any], answer: CommandResult, device: str) -> Finding:
    """Finding for an error that the probe itself reported."""
    kind, message, step = (str(failure.get(name, "")) for name in ("kind", "message", "step"))
    values = {"exit_code": answer.exit_code, "error": kind, "message": message[:TAIL], "step": step}
    if kind == "Hung":
        return _hung(message, step, device, values)
    code = failure.get("code")
    known = _cuda_errors.find(f"{message}\n{answer.stderr[-2000:]}", code if isinstance(code, int) else None)
    if known is not None:
        reason = f"CUDA error {known.code}, {known.words}: {known.meaning} (at: {step})"
        return Finding(verdict=known.verdict, reason=reason, action=known.action, device=device, values=values)
    shown = " ".join(message.split())[:TAIL] or _last_words(answer)
    if kind == "ModuleNotFoundError":
        action = "install it for the Python that runs this: pip install 'trainmaster[train]'"
        return error(f"could not be tried: {shown}", action=action, device=device, **values)
    if "not compiled with CUDA" in message:
        return error(f"could not be tried: {shown}", action="install a torch with CUDA", device=device, **values)
    action = "run the probe by hand and read its traceback"
    return error(
        f"its probe ended with {kind or answer.exit_code}: {shown} (at: {step})", action=action, device=device, **values
    )


def _hung(message: str, step: str, device: str, values: Mapping[str, Any]) -> Finding:
    # Before its first kernel, or while it waits for other GPUs, a hang is not this GPU's fault.
    innocent = step.startswith(("import", "waiting"))
    return Finding(
        verdict=Verdict.ERROR if innocent else Verdict.FAIL,
        reason=f"hung, {message} (at: {step})",
        action="look for a slow disk or another GPU that hangs"
        if innocent
        else "drain the node, look for Xid in the kernel log, reboot; replace the GPU if it hangs again",
        device=device,
        values=values,
    )


def _crashed(answer: CommandResult, why: str, device: str) -> Finding:
    """Finding for a probe that ended without a report."""
    values = {"exit_code": answer.exit_code, "last_words": _last_words(answer)}
    known = _cuda_errors.find(answer.stderr[-2000:])
    if known is not None:
        reason = f"CUDA error {known.code}, {known.words}: {known.meaning}"
        return Finding(verdict=known.verdict, reason=reason, action=known.action, device=device, values=values)
    if answer.exit_code == 0:
        return _rubbish(why, device)
    ended = f"exit code {answer.exit_code}"
    if answer.exit_code < 0:
        ended = f"signal {-answer.exit_code}"
        with contextlib.suppress(ValueError):
            ended += f" ({signal.Signals(-answer.exit_code).name})"
    action = "look for Xid and for the OOM killer in the kernel log"
    return error(f"its probe crashed, {ended}: {_last_words(answer)}", action=action, device=device, **values)


def _rubbish(why: str, device: str) -> Finding:
    action = "report it, with the captured folder"
    return error(f"its probe's report cannot be understood: {why[:TAIL]}", action=action, device=device)


def _last_words(answer: CommandResult) -> str:
    return " ".join((answer.stderr or answer.stdout).split())[-TAIL:] or "no output"


def _foreign(device: Mapping[str, Any]) -> float:
    total, free = device.get("memory_bytes"), device.get("free_bytes")
    return (total - free) / (1 << 30) if isinstance(total, int) and isinstance(free, int) else 0.0


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"it holds {word}, which is no number")
